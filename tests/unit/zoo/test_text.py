"""Text as windows of characters."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from echelon.errors import ConfigError, DataError
from echelon.zoo.dataset import DATASETS
from echelon.zoo.datasets.text import Text


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    text=st.text(st.characters(codec="utf-8", exclude_characters="\r"), min_size=60, max_size=400),
    context=st.integers(1, 5),
)
def test_windows_cover_the_text_and_targets_are_shifted_by_one(
    tmp_path: Path, text: str, context: int
) -> None:
    file = tmp_path / "text.txt"
    file.write_text(text, encoding="utf-8")
    splits = Text(path=str(file), context=context).load()
    vocabulary = sorted(set(text))
    assert splits.spec.classes == len(vocabulary)
    assert splits.spec.shape == (context,)
    cut = len(text) * 9 // 10
    for split, part in ((splits.train, text[:cut]), (splits.test, text[cut:])):
        assert len(split) == (len(part) - 1) // context
        inputs, targets = split.__getitems__(range(len(split)))
        assert inputs.dtype == targets.dtype == torch.int64
        used = len(split) * context
        assert "".join(vocabulary[code] for code in inputs.flatten()) == part[:used]
        assert "".join(vocabulary[code] for code in targets.flatten()) == part[1 : used + 1]


def test_a_vocabulary_of_more_than_256_characters_works(tmp_path: Path) -> None:
    text = "".join(chr(0x4E00 + n) for n in range(1000)) * 2
    (tmp_path / "text.txt").write_text(text, encoding="utf-8")
    splits = Text(path=str(tmp_path / "text.txt"), context=10).load()
    assert splits.spec.classes == 1000
    assert splits.train[99][0].tolist() == list(range(990, 1000))


def test_default_is_tinyshakespeare_under_the_data_folder(data_home: Path) -> None:
    with pytest.raises(DataError) as caught:
        DATASETS.build("text").load()
    assert f"tinyshakespeare.txt into {data_home / 'text'}" in caught.value.fix
    (data_home / "text").mkdir()
    (data_home / "text" / "tinyshakespeare.txt").write_text("to be or not to be. " * 200)
    assert DATASETS.build("text(context=16)").load().spec.classes == len(set("to be or not to be. "))


def test_a_text_shorter_than_a_window_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("abc " * 200)
    with pytest.raises(DataError, match=r"the last 10 % of the text has 80 characters") as caught:
        Text(path=str(tmp_path / "text.txt"), context=80).load()
    assert caught.value.where == str(tmp_path / "text.txt")


@pytest.mark.parametrize(("content", "reason"), [(b"", "empty"), (b"abc\xff\xfe", "UTF-8")])
def test_a_file_that_is_not_text_is_an_error_naming_it(tmp_path: Path, content: bytes, reason: str) -> None:
    (tmp_path / "text.txt").write_bytes(content)
    with pytest.raises(DataError, match=reason) as caught:
        Text(path=str(tmp_path / "text.txt")).load()
    assert caught.value.where == str(tmp_path / "text.txt")


def test_a_folder_in_place_of_a_text_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="directory"):
        Text(path=str(tmp_path)).load()


def test_a_context_of_zero_is_refused() -> None:
    with pytest.raises(ConfigError, match="context cannot be 0"):
        Text(context=0)


def test_the_path_python_loads_pythons_manual():
    splits = DATASETS.build("text(path=python, context=16)").load()
    assert len(splits.train) > 5000
    assert 60 < splits.spec.classes < 300
    inputs, targets = splits.train[0]
    assert inputs[1:].tolist() == targets[:-1].tolist()
