"""Which batch a forward pass belongs to."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from echelon.train.batches import BatchTracker, HandedBatch


def batch(size, loader=0, workers=4):
    share, rest = divmod(size, workers)
    parts = tuple(share + (rank < rest) for rank in range(workers))
    return HandedBatch(loader=loader, share=parts[-1], batch=size, parts=parts)


def drawn(*batches):
    tracker = BatchTracker()
    for one in batches:
        tracker.drew(one)
    return tracker


def test_weights_agree_only_if_they_are_the_same_on_every_worker():
    assert batch(64).agrees(batch(32))
    assert not batch(30).agrees(batch(10))
    assert batch(6, workers=4).weight == 1 / 6
    assert not batch(6).agrees(HandedBatch(loader=0, share=1, batch=6, parts=(1, 2, 2, 1)))


def test_batch_among_the_inputs_is_the_one_whatever_was_drawn_last():
    first, last = batch(30), batch(10)
    tracker = drawn(first, last)
    assert tracker.entered([first]).batch is first
    assert tracker.entered([last]).batch is last
    assert tracker.entered([first]).batch is first, "a batch may be trained twice"


def test_inputs_of_two_weights_are_ambiguous():
    first, last = batch(30), batch(10)
    belongs = drawn(first, last).entered([first, last])
    assert belongs.batch is first
    assert belongs.others == (last,)


def test_unknown_inputs_belong_to_the_batch_that_was_found_after_the_last_draw():
    first, last = batch(30), batch(10)
    tracker = drawn(first, last)
    tracker.entered([first])
    assert tracker.entered([]).batch is first
    assert not tracker.entered([]).others


def test_unknown_inputs_belong_to_the_only_batch_that_was_drawn():
    tracker = BatchTracker()
    assert tracker.entered([]) is None
    for one in (batch(30), batch(30), batch(10)):
        tracker.drew(one)
        assert tracker.entered([]).batch is one
        assert tracker.entered([]).batch is one, "a second pass over the same batch"
        assert not tracker.entered([]).others


def test_unknown_inputs_are_ambiguous_if_batches_of_two_weights_wait():
    first, last = batch(30), batch(10)
    tracker = drawn(first, last)
    assert tracker.entered([]).others == (last,)
    assert tracker.entered([]).others == (first,), "the first may be trained again"
    tracker = drawn(batch(32), batch(64))
    assert not tracker.entered([]).others


def test_forgotten_batches_are_no_candidates():
    evaluated, trained = batch(10, loader=1), batch(30)
    tracker = drawn(evaluated, trained)
    tracker.forget(lambda one: one.loader == 1)
    assert tracker.entered([]).batch is trained


@given(st.lists(st.sampled_from([10, 30]), min_size=1, max_size=8), st.data())
def test_a_decision_without_others_is_never_wrong_for_loops_that_train_what_they_draw(sizes, data):
    """The loop draws up to three batches ahead and trains in order; inputs may or may not be known."""
    tracker = BatchTracker()
    batches = [batch(size) for size in sizes]
    ahead, known = data.draw(st.integers(0, 3)), data.draw(st.booleans())
    for at, one in enumerate(batches):
        for new in batches[0 if at == 0 else at + ahead : at + ahead + 1]:
            tracker.drew(new)
        belongs = tracker.entered([one] if known else [])
        if not belongs.others:
            assert belongs.batch.agrees(one)
        assert not (known and belongs.others)
