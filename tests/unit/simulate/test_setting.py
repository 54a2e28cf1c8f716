"""The options of `echelon simulate`, and the Setting that they describe."""

import pytest

from echelon.errors import ConfigError
from echelon.simulate.profile import Costs, VirtualLink
from echelon.simulate.setting import Setting, SimulateSettings


def test_without_options_the_setting_is_the_default():
    settings = SimulateSettings()
    assert settings.setting() == Setting()
    assert (settings.compute_s, settings.costs, settings.virtual_link) == (None, None, VirtualLink())


def test_text_with_units_becomes_numbers():
    settings = SimulateSettings(
        workers=2,
        compute="20ms",
        server_costs="1ms,2ms,3ms",
        link="8mbit",
        latency="5ms",
        every="1",
        speed="1,0.5",
    )
    assert settings.compute_s == 0.02
    assert settings.costs == Costs(queue_s=0.001, apply_s=0.002, hand_s=0.003)
    assert settings.virtual_link == VirtualLink(latency_s=0.005, bytes_per_s=1e6)
    assert settings.setting() == Setting(workers=2, speeds=(1.0, 0.5), evaluate_every_s=1.0)


def test_a_rate_per_worker_is_a_link_per_worker():
    settings = SimulateSettings(workers=2, link="8mbit,16mbit", groups="1,1")
    assert settings.setting().links == (1e6, 2e6)
    assert settings.setting().groups == ((0,), (1,))


@pytest.mark.parametrize(
    ("given", "where"),
    [
        ({"every": "0"}, "--every"),
        ({"link": "1gbit,1gbit"}, "--link"),
        ({"compute": "0"}, "--compute"),
        ({"server_costs": "1ms,-1ms,1ms"}, "--server-costs"),
        ({"latency": "-1ms"}, "--latency"),
        ({"jobs": 0}, "--jobs"),
        ({"servers": 0}, "--servers"),
    ],
)
def test_an_error_names_the_option(given, where):
    with pytest.raises(ConfigError) as caught:
        SimulateSettings(**given)
    assert caught.value.where == where
