import dataclasses
import json
from pathlib import Path

import pytest

from echelon.config.schema import TrainSettings


def _rows(out: str) -> dict[str, list[str]]:
    return {line.split()[0]: line.split()[1:] for line in out.splitlines()[1:]}


def test_every_setting_is_shown_with_its_table_value_and_origin(echelon):
    ended = echelon("config", "show")
    rows = _rows(ended.out)
    assert ended.code == 0
    assert len(rows) == len(dataclasses.fields(TrainSettings))
    assert rows["run.shares"] == ["auto", "default"]
    assert rows["run.workers"] == ["-", "default"]
    assert rows["train.epochs"] == ["3", "default"]


def test_values_from_file_and_command_line_are_distinguished(echelon):
    Path("echelon.toml").write_text("[run]\nworkers = 4\nseed = 1\n")
    rows = _rows(echelon("config", "show", "--set", "seed=2", "--set", "train.lr=1").out)
    assert rows["run.workers"] == ["4", "echelon.toml"]
    assert rows["run.seed"] == ["2", "command", "line"]
    assert rows["train.lr"] == ["1.0", "command", "line"]


def test_json_output_has_the_same_values_and_origins(echelon):
    Path("other.toml").write_text("[train]\nepochs = 9\n")
    ended = echelon("config", "show", "--json", "--config", "other.toml", "--set", "join-timeout-s=5")
    answer = json.loads(ended.out)
    assert answer["epochs"] == {"value": 9, "from": "other.toml"}
    assert answer["join_timeout_s"] == {"value": 5.0, "from": "command line"}
    assert answer["port"] == {"value": None, "from": "default"}


@pytest.mark.parametrize(
    ("text", "setting", "value"),
    [
        ("model=mlp(width=3, depth=2)", "model", "mlp(width=3, depth=2)"),
        ("speed=1,0.5", "speed", "1,0.5"),
        ("name=7", "name", "7"),
        ("delay=normal(0, 1)", "delay", "normal(0, 1)"),
        ("optimizer=adamw", "optimizer", "adamw"),
        ("workers = 3", "workers", 3),
        ("lr=1e-3", "lr", 0.001),
    ],
)
def test_values_are_read_as_the_command_line_reads_them(echelon, text, setting, value):
    answer = json.loads(echelon("config", "show", "--json", "--set", text).out)
    assert answer[setting] == {"value": value, "from": "command line"}


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("epochs", "sets nothing"),
        ("epochs=", "does not fit"),
        ("epochs=two", "does not fit"),
        ("epochs=1(", "does not fit"),
        ("epochs=0", "epochs is 0"),
        ("epoch=2", "did you mean 'epochs'?"),
        ("run.epochs=2", "write --set train.epochs=2"),
        ("=2", "unknown setting ''"),
    ],
)
def test_invalid_assignment_is_explained(echelon, text, told):
    ended = echelon("config", "show", "--set", text)
    assert (ended.code, ended.out) == (2, "")
    assert told in ended.err
    assert len(ended.err.splitlines()) == 3


def test_a_file_that_is_not_there_is_named(echelon):
    ended = echelon("config", "show", "--config", "nowhere.toml")
    assert ended.code == 2
    assert "nowhere.toml" in ended.err


def test_markup_in_a_value_is_shown_as_it_is(echelon):
    assert "[bold]x:100:" in echelon("config", "show", "--set", "name=[bold]x:100:").out
