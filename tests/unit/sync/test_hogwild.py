import pytest

from echelon.errors import ConfigError
from echelon.sync.policy import POLICIES, ClusterInfo


def test_hogwild_needs_no_server_on_one_machine():
    policy = POLICIES.build("hogwild")
    policy.check(ClusterInfo(workers=8, machines=1, servers=0))
    assert policy.resolved().family == "share"


def test_more_than_one_machine_is_refused_with_an_alternative():
    with pytest.raises(ConfigError, match="the workers are on 3") as caught:
        POLICIES.build("hogwild").check(ClusterInfo(workers=8, machines=3))
    assert "--sync async --servers 1" in caught.value.fix
