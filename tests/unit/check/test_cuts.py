"""Which rows of a random tensor belong to a worker."""

from __future__ import annotations

import pytest

from echelon.check.cuts import BatchPart, RowCut, cut_of

PART = BatchPart(offset=4, share=3, batch=9)


@pytest.mark.parametrize(
    ("whole", "own", "cut"),
    [
        pytest.param((9, 5), (3, 5), RowCut(axis=0, start=4, stop=7), id="rows"),
        pytest.param((7, 9, 5), (7, 3, 5), RowCut(axis=1, start=4, stop=7), id="batch second"),
        pytest.param((36, 5), (12, 5), RowCut(axis=0, start=16, stop=28), id="four rows for each sample"),
        pytest.param((9,), (3,), RowCut(axis=0, start=4, stop=7), id="one dimension"),
        pytest.param((9, 9), (3, 3), None, id="two dimensions differ"),
        pytest.param((9, 5), (2, 5), None, id="no multiple of the share"),
        pytest.param((10, 5), (3, 5), None, id="no multiple of the batch"),
        pytest.param((18, 5), (3, 5), None, id="another multiple"),
        pytest.param((9, 5), (3, 5, 1), None, id="another number of dimensions"),
    ],
)
def test_a_worker_gets_the_rows_of_its_samples(whole, own, cut):
    assert cut_of(whole, own, [PART], rank=1, workers=3) == cut


def test_a_draw_for_an_earlier_batch_finds_that_batch():
    newest = BatchPart(offset=1, share=1, batch=2)
    assert cut_of((9, 5), (3, 5), [newest, PART], rank=1, workers=3) == RowCut(axis=0, start=4, stop=7)


def test_without_a_loader_equal_parts_by_rank_are_assumed():
    cut = RowCut(axis=0, start=8, stop=12, guessed=True)
    assert cut_of((12, 5), (4, 5), [], rank=2, workers=3) == cut
    turns = RowCut(axis=0, start=2, stop=12, every=3, guessed=True)
    assert cut_of((12, 5), (4, 5), [], rank=2, workers=3, alternate=True) == turns
    assert cut_of((12, 5), (5, 5), [], rank=2, workers=3) is None


def test_a_part_of_a_share_is_not_taken_for_a_share():
    """Alone the first half of a batch are other samples than the first halves of all shares."""
    assert cut_of((6, 5), (2, 5), [BatchPart(offset=4, share=4, batch=12)], rank=1, workers=3) is None
