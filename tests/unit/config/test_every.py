"""How often: a time, steps or epochs."""

from __future__ import annotations

import pytest

from echelon.config.every import Every
from echelon.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "every"),
    [
        ("5min", Every(seconds=300)),
        ("30", Every(seconds=30)),
        ("1.5h", Every(seconds=5400)),
        ("500steps", Every(steps=500)),
        ("1 step", Every(steps=1)),
        ("1epoch", Every(epochs=1)),
        ("2 Epochs", Every(epochs=2)),
    ],
)
def test_a_period_is_a_time_steps_or_epochs(text, every):
    assert Every.parse(text, where="here") == every


@pytest.mark.parametrize("text", ["", "0steps", "0", "-5min", "5 minutes", "steps", "1.5epochs", "1e400s"])
def test_anything_else_is_refused_with_an_example(text):
    with pytest.raises(ConfigError, match="is not a time, steps or epochs") as caught:
        Every.parse(text, where="--checkpoint-every")
    assert caught.value.where == "--checkpoint-every"
