"""The options of `echelon bench codecs`, and the Bench that they describe."""

import pytest

from echelon.bench.codecs import Bench, usual_codecs
from echelon.bench.settings import QUICK, BenchSettings
from echelon.errors import ConfigError


def test_without_options_the_bench_is_the_default():
    assert BenchSettings().bench() == Bench()
    assert BenchSettings().codec_texts() == list(usual_codecs())


def test_quick_settings_take_fewer_steps_with_the_same_workers():
    assert QUICK.bench().steps < Bench().steps
    assert QUICK.bench().workers == Bench().workers


def test_codecs_are_separated_by_semicolons():
    assert BenchSettings(codecs="fp16; top-k(ratio=0.1)").codec_texts() == ["fp16", "top-k(ratio=0.1)"]
    with pytest.raises(ConfigError, match="empty place"):
        BenchSettings(codecs="fp16;").codec_texts()


def test_a_wrong_rate_is_refused_when_the_settings_are_made():
    with pytest.raises(ConfigError) as caught:
        BenchSettings(link="fast")
    assert caught.value.where == "--link"
