import dataclasses
import math

import pytest

from echelon.config.schema import SECTIONS, RunSettings, TrainSettings, section_of
from echelon.errors import ConfigError


def test_defaults_alone_make_valid_settings():
    settings = TrainSettings()
    assert (settings.workers, settings.shares, settings.seed) == (None, "auto", 0)
    assert (settings.model, settings.data) == ("lenet", "digits")


def test_every_setting_has_a_help_text_that_is_a_sentence():
    for field in dataclasses.fields(TrainSettings):
        text = field.metadata["help"]
        assert text[0].isupper(), field.name
        assert text.endswith("."), field.name


def test_every_setting_belongs_to_the_table_of_the_class_that_introduces_it():
    run = {field.name for field in dataclasses.fields(RunSettings)}
    for field in dataclasses.fields(TrainSettings):
        assert section_of(field.name) == ("run" if field.name in run else "train")
    assert list(SECTIONS.items()) == [("run", RunSettings), ("train", TrainSettings)]


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("workers", 0),
        ("threads", 0),
        ("port", 0),
        ("port", 65536),
        ("seed", -1),
        ("seed", 2**63),
        ("delayed", -0.1),
        ("delayed", 1.1),
        ("delayed", math.nan),
        ("join_timeout_s", 0),
        ("join_timeout_s", math.inf),
        ("round_timeout_s", -1.0),
        ("epochs", 0),
        ("batch", 0),
        ("loader_workers", -1),
        ("lr", 0.0),
        ("lr", math.nan),
        ("momentum", -0.5),
        ("momentum", math.inf),
        ("weight_decay", -1e-4),
        ("until_accuracy", 0.0),
        ("until_accuracy", 95.0),
    ],
)
def test_a_value_out_of_range_is_refused_naming_the_option_and_what_fits(setting, value):
    with pytest.raises(ConfigError) as caught:
        TrainSettings(**{setting: value})
    assert caught.value.where == "--" + setting.replace("_", "-")
    assert caught.value.fix.startswith("give ")


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("workers", 1),
        ("port", 1),
        ("port", 65535),
        ("seed", 2**63 - 1),
        ("delayed", 0.0),
        ("delayed", 1.0),
        ("until_accuracy", 1.0),
        ("momentum", 0.0),
        ("weight_decay", 0.0),
        ("loader_workers", 0),
    ],
)
def test_the_ends_of_each_range_are_accepted(setting, value):
    assert getattr(TrainSettings(**{setting: value}), setting) == value


def test_speeds_are_read_from_a_list_of_numbers():
    assert RunSettings(speed="1, 0.5,.25").speeds == (1.0, 0.5, 0.25)
    assert RunSettings().speeds == ()


@pytest.mark.parametrize("text", ["fast", "1,,2", "1;2", ","])
def test_speeds_that_are_not_numbers_are_refused(text):
    with pytest.raises(ConfigError, match="not a list of speeds") as caught:
        _ = RunSettings(speed=text).speeds
    assert caught.value.where == "--speed"
