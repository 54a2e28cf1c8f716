import dataclasses
from pathlib import Path

import pytest

from echelon.config import allowed
from echelon.config.resolve import resolve
from echelon.config.schema import RunSettings, TrainSettings
from echelon.errors import ConfigError, UnknownName


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def _file(text: str, name: str = "my.toml") -> Path:
    path = Path(name)
    path.write_text(text)
    return path


def test_all_settings_are_defaults_without_file_and_options():
    resolved = resolve(TrainSettings, {})
    assert resolved.settings == TrainSettings()
    assert set(resolved.origins) == {field.name for field in dataclasses.fields(TrainSettings)}
    assert set(resolved.origins.values()) == {"default"}


def test_command_line_overrides_the_file_and_the_file_overrides_the_default():
    file = _file("[run]\nworkers = 2\nseed = 7\n[train]\nepochs = 4\nlr = 1\n")
    resolved = resolve(TrainSettings, {"seed": 9, "epochs": None, "batch": 8}, file)
    settings, origins = resolved.settings, resolved.origins
    assert (settings.workers, origins["workers"]) == (2, "my.toml")
    assert (settings.seed, origins["seed"]) == (9, "command line")
    assert (settings.epochs, origins["epochs"]) == (4, "my.toml")
    assert (settings.lr, origins["lr"]) == (1.0, "my.toml")
    assert (settings.batch, origins["batch"]) == (8, "command line")
    assert (settings.model, origins["model"]) == ("lenet", "default")


def test_echelon_toml_in_the_current_folder_is_read():
    _file("[run]\nworkers = 3\n", "echelon.toml")
    resolved = resolve(RunSettings, {})
    assert (resolved.settings.workers, resolved.origins["workers"]) == (3, "echelon.toml")


def test_given_file_replaces_the_one_in_the_current_folder():
    _file("[run]\nworkers = 3\nseed = 5\n", "echelon.toml")
    resolved = resolve(RunSettings, {}, _file("[run]\nworkers = 2\n"))
    assert (resolved.settings.workers, resolved.settings.seed) == (2, 0)


def test_a_run_without_training_ignores_the_training_table_but_still_checks_it():
    assert resolve(RunSettings, {}, _file("[train]\nepochs = 4\n")).settings == RunSettings()
    with pytest.raises(UnknownName, match="unknown key 'epoch'"):
        resolve(RunSettings, {}, _file("[train]\nepoch = 4\n"))


def test_an_unknown_table_is_named_with_its_file_and_nearest():
    with pytest.raises(UnknownName, match="unknown table 'trian'") as caught:
        resolve(TrainSettings, {}, _file("[trian]\nepochs = 4\n"))
    assert caught.value.where == "my.toml"
    assert caught.value.nearest == "train"


def test_an_unknown_key_is_named_with_its_file_table_and_nearest():
    with pytest.raises(UnknownName, match="unknown key 'worker'") as caught:
        resolve(TrainSettings, {}, _file("[run]\nworker = 4\n"))
    assert caught.value.where == "my.toml, [run]"
    assert caught.value.nearest == "workers"


def test_a_key_in_the_wrong_table_is_unknown_there():
    with pytest.raises(UnknownName, match="unknown key 'epochs'") as caught:
        resolve(TrainSettings, {}, _file("[run]\nepochs = 4\n"))
    assert caught.value.where == "my.toml, [run]"


def test_a_key_above_all_tables_is_explained():
    with pytest.raises(ConfigError, match="run is not a table") as caught:
        resolve(TrainSettings, {}, _file("run = 4\n"))
    assert caught.value.where == "my.toml"
    assert "[run]" in caught.value.fix


@pytest.mark.parametrize(
    ("line", "table", "key"),
    [
        ('[run]\nworkers = "two"', "run", "workers"),
        ("[run]\nworkers = 2.5", "run", "workers"),
        ("[run]\nname = 5", "run", "name"),
        ("[run]\nspeed = [1, 0.5]", "run", "speed"),
        ('[train]\noptimizer = "adam"', "train", "optimizer"),
        ("[train]\nlr = true", "train", "lr"),
    ],
)
def test_a_wrong_type_is_named_with_file_table_and_key(line, table, key):
    with pytest.raises(ConfigError, match="does not fit") as caught:
        resolve(TrainSettings, {}, _file(line))
    assert caught.value.where == f"my.toml, [{table}], {key}"


def test_value_out_of_range_in_a_file_names_the_file_and_not_an_option():
    with pytest.raises(ConfigError, match="epochs is 0") as caught:
        resolve(TrainSettings, {}, _file("[train]\nepochs = 0\n"))
    assert caught.value.where == "my.toml, [train], epochs"


def test_value_out_of_range_on_the_command_line_names_the_option():
    with pytest.raises(ConfigError, match="epochs is 0") as caught:
        resolve(TrainSettings, {"epochs": 0}, _file("[train]\nepochs = 3\n"))
    assert caught.value.where == "--epochs"


def test_place_names_the_file_that_set_an_option_and_keeps_other_text():
    resolved = resolve(TrainSettings, {"seed": 1}, _file('[train]\nmodel = "mlp"\n'))
    assert resolved.place("--model, width") == "my.toml, [train], model, width"
    assert resolved.place("--seed") == "--seed"
    assert resolved.place("--data") == "--data"
    assert resolved.place("rank 0, --model") == "rank 0, --model"
    assert resolved.place("") == ""


def test_unknown_setting_on_the_command_line_suggests_the_nearest_name():
    with pytest.raises(UnknownName, match="unknown setting 'epoch'") as caught:
        resolve(TrainSettings, {"epoch": 3})
    assert caught.value.nearest == "epochs"


def test_a_wrong_type_on_the_command_line_names_the_option():
    with pytest.raises(ConfigError) as caught:
        resolve(TrainSettings, {"optimizer": "adam"})
    assert caught.value.where == "--optimizer"
    assert "sgd | adamw" in caught.value.fix


@pytest.mark.parametrize("content", [b"[run", b"\xff\xfe", b"[run]\nworkers = \n"])
def test_a_file_that_is_not_toml_is_named(content):
    Path("my.toml").write_bytes(content)
    with pytest.raises(ConfigError, match="not TOML") as caught:
        resolve(TrainSettings, {}, Path("my.toml"))
    assert caught.value.where == "my.toml"


@pytest.mark.parametrize("path", ["nowhere.toml", "."])
def test_a_file_that_cannot_be_read_is_named(path):
    with pytest.raises(ConfigError, match="cannot read") as caught:
        resolve(TrainSettings, {}, Path(path))
    assert caught.value.where == path


def test_written_settings_read_back_the_same():
    given = {
        "workers": 3,
        "speed": "1,0.5,0.5",
        "delay": 'sometimes(0.5, 1)  # "quoted"',
        "name": "Größe [x]",
        "model": "mlp(width=8)",
        "lr": 0.1,
        "until_accuracy": 0.9,
        "checkpoint": "C:\\ck",
    }
    resolved = resolve(TrainSettings, given)
    Path("again.toml").write_bytes(resolved.to_toml().encode())
    again = resolve(TrainSettings, {}, Path("again.toml"))
    assert again.settings == resolved.settings
    assert again.origins["lr"] == "again.toml"


def test_settings_without_a_value_are_not_written():
    assert "\nport =" not in resolve(TrainSettings, {}).to_toml()


def test_settings_name_code_that_may_be_imported_but_those_of_a_run_folder_do_not(tmp_path, monkeypatch):
    monkeypatch.setattr(allowed, "_given", set())
    file = tmp_path / "config.toml"
    file.write_text('[run]\nsync = "theirs(mine:grow)"\n')
    (tmp_path / "plan.toml").touch()
    (tmp_path / "events").mkdir()
    resolve(RunSettings, {}, file)
    assert not allowed.is_allowed("mine:grow")
    (tmp_path / "events").rmdir()
    resolve(RunSettings, {}, file)
    assert allowed.is_allowed("mine:grow")
