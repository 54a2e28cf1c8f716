"""Where the run's secret comes from; files that others may read are refused."""

from __future__ import annotations

import tempfile

import pytest

from echelon.comm.meet import secret
from echelon.errors import ConfigError

LONG = "0123456789abcdef" * 2
OTHER = "another one, which is set"


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "secret"
    path.write_text(LONG + "\n")
    path.chmod(0o600)
    return path


def test_the_environment_comes_before_the_file_and_both_before_anything_else(file):
    assert secret.find({"ECHELON_SECRET": OTHER}, "head") == (OTHER.encode(), True)
    assert secret.find({"ECHELON_SECRET_FILE": str(file)}, "head") == (LONG.encode(), True)
    both = {"ECHELON_SECRET": OTHER, "ECHELON_SECRET_FILE": str(file)}
    assert secret.find(both, "head") == (OTHER.encode(), True)


def test_a_file_that_others_may_read_or_that_holds_too_little_is_refused(file, tmp_path):
    file.chmod(0o640)
    with pytest.raises(ConfigError, match="others may read or write the file") as caught:
        secret.read_file(file)
    assert "chmod 600" in caught.value.fix
    file.chmod(0o600)
    file.write_text("short\n")
    with pytest.raises(ConfigError, match="has 5 bytes, which can be guessed"):
        secret.read_file(file)
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        secret.read_file(tmp_path / "none")


def test_a_secret_in_the_environment_that_is_too_short_is_refused():
    for take in (lambda env: secret.find(env, "head"), secret.for_workers):
        with pytest.raises(
            ConfigError, match="ECHELON_SECRET has 15 bytes, which can be guessed"
        ) as caught:
            take({"ECHELON_SECRET": "x" * 15})
        assert "token_hex" in caught.value.fix
    assert secret.given({"ECHELON_SECRET": "x" * 16}) == b"x" * 16


def test_workers_of_one_machine_share_a_file_of_their_user(monkeypatch, tmp_path):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    found, protected = secret.find({}, "127.0.0.1")
    assert protected
    assert len(found) == 64
    assert secret.find({}, "localhost") == secret.find({}, "::1") == (found, True)
    together = {"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "4"}
    assert secret.find(together, "head") == (found, True)
    (folder,) = tmp_path.iterdir()
    assert folder.stat().st_mode & 0o777 == 0o700
    assert [path.stat().st_mode & 0o777 for path in folder.iterdir()] == [0o600]
    (folder / "secret").chmod(0o644)
    with pytest.raises(ConfigError, match="is not this user's alone"):
        secret.find({}, "127.0.0.1")


def test_on_several_machines_there_is_none_and_a_launcher_draws_one(caplog):
    assert secret.find({"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2"}, "head") == (secret.PUBLIC, False)
    secret.warn_unprotected()
    assert "the run has no secret" in caplog.text
    first, second = secret.for_workers({}), secret.for_workers({})
    assert first.keys() == {"ECHELON_SECRET"}
    assert first != second
    assert secret.for_workers({"ECHELON_SECRET": OTHER}) == {"ECHELON_SECRET": OTHER}
