"""Settings as options, on a command of their own."""

import dataclasses
from dataclasses import dataclass
from typing import Literal

import pytest
import typer
from typer.testing import CliRunner

from echelon.cli.command import PlainCommand
from echelon.cli.options import with_settings
from echelon.config.schema import RunSettings, TrainSettings
from echelon.errors import ConfigError


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def seen():
    return {}


@pytest.fixture
def call(seen):
    """Calls a command that has the settings of TrainSettings as options and a word of its own."""

    def command(resolved, word: str = typer.Argument("none")) -> None:
        """Does it."""
        seen.update(settings=resolved.settings, origins=resolved.origins, word=word)
        if word == "refuse":
            raise ConfigError("no", where="--lr, somewhere")

    app = typer.Typer(add_completion=False)
    app.command(cls=PlainCommand)(with_settings(TrainSettings, {"lr": "Rates"})(command))

    def run(*args: str):
        return CliRunner().invoke(app, args, env={"COLUMNS": "100", "NO_COLOR": "1"})

    return run


def test_without_options_everything_is_the_default(call, seen):
    assert call().exit_code == 0
    assert seen["settings"] == TrainSettings()
    assert set(seen["origins"].values()) == {"default"}


def test_options_are_read_with_their_types(call, seen):
    result = call("hello", "--workers", "3", "--lr", "1", "--until-accuracy", "0.5", "--name", "7")
    assert result.exit_code == 0, result.output
    settings = seen["settings"]
    assert (settings.workers, settings.lr, settings.until_accuracy, settings.name) == (3, 1.0, 0.5, "7")
    assert seen["origins"]["until_accuracy"] == "command line"
    assert seen["origins"]["epochs"] == "default"
    assert seen["word"] == "hello"


def test_an_option_given_its_default_value_still_comes_from_the_command_line(call, seen, tmp_path):
    (tmp_path / "echelon.toml").write_text("[train]\nepochs = 5\n")
    call("--epochs", "3")
    assert (seen["settings"].epochs, seen["origins"]["epochs"]) == (3, "command line")


def test_a_settings_file_can_be_given(call, seen, tmp_path):
    (tmp_path / "my.toml").write_text("[train]\nepochs = 5\n")
    call("--config", "my.toml")
    assert (seen["settings"].epochs, seen["origins"]["epochs"]) == (5, "my.toml")


@pytest.mark.parametrize("args", [("--workers", "two"), ("--lr", "fast"), ("--epochs",)])
def test_a_value_of_the_wrong_type_ends_with_code_two(call, seen, args):
    result = call(*args)
    assert result.exit_code == 2
    assert args[0] in result.output
    assert seen == {}


def test_a_choice_is_checked_by_the_settings(call):
    error = call("--optimizer", "adam").exception
    assert isinstance(error, ConfigError)
    assert error.where == "--optimizer"


def test_error_of_the_command_names_the_file_that_set_the_option(call, tmp_path):
    (tmp_path / "my.toml").write_text("[train]\nlr = 1\n")
    assert call("refuse", "--config", "my.toml").exception.where == "my.toml, [train], lr, somewhere"
    assert call("refuse", "--config", "my.toml", "--lr", "2").exception.where == "--lr, somewhere"


def test_help_has_every_setting_with_its_default_and_panel(call):
    told = call("--help").output
    told = " ".join(told.replace("│", " ").split())
    for field in dataclasses.fields(TrainSettings):
        assert "--" + field.name.replace("_", "-") in told
    assert "Rates" in told
    assert f"Default: {TrainSettings().lr}." in told
    assert "Default: 60." in told
    assert "Default: 60.0" not in told
    assert "sgd|adamw" in told
    assert "bool" not in told.lower()
    assert "None" not in told


def test_a_new_setting_becomes_an_option_by_being_declared():
    @dataclass(frozen=True, slots=True, kw_only=True)
    class Mine(RunSettings):
        new_thing: Literal["a", "b"] = dataclasses.field(default="a", metadata={"help": "New."})

    app = typer.Typer(add_completion=False)
    app.command()(with_settings(Mine, {})(lambda resolved: typer.echo(resolved.settings.new_thing)))
    assert CliRunner().invoke(app, ["--new-thing", "b"]).output == "b\n"
