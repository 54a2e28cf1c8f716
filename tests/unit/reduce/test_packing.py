from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from echelon.reduce.packing import BUCKET_BYTES, FIRST_BYTES, Item, assign

items_of = st.lists(
    st.builds(Item, size_bytes=st.integers(0, 60), kind=st.sampled_from(["float32", "bfloat16", "cuda"])),
    max_size=40,
)
limits = {"first_bytes": 10, "bucket_bytes": 40}


def _items(*sizes: int, kind: str = "float32") -> list[Item]:
    return [Item(size_bytes=size, kind=kind) for size in sizes]


def test_no_parameters_make_no_buckets():
    assert assign([]) == []


def test_last_layer_is_in_a_small_first_bucket():
    assert assign(_items(20, 20, 5, 5), **limits) == [[3, 2], [1, 0]]


def test_parameter_larger_than_a_bucket_has_its_own_bucket():
    assert assign(_items(5, 100, 5), **limits) == [[2], [1], [0]]


def test_a_first_parameter_larger_than_the_first_bucket_is_not_held_back():
    assert assign(_items(5, 30), **limits) == [[1], [0]]


def test_a_bucket_holds_one_type_even_when_types_alternate():
    items = [Item(size_bytes=4, kind=kind) for kind in ["a", "b", "a", "b"]]
    assert assign(items, **limits) == [[3, 1], [2, 0]]


def test_the_default_first_bucket_is_smaller_than_the_others():
    assert 0 < FIRST_BYTES < BUCKET_BYTES
    sizes = [1 << 18] * 100
    buckets = assign(_items(*sizes))
    assert len(buckets[0]) == FIRST_BYTES >> 18
    assert len(buckets[1]) == BUCKET_BYTES >> 18


@settings(max_examples=100)
@given(items_of)
def test_every_parameter_is_in_exactly_one_bucket(items):
    buckets = assign(items, **limits)
    assert sorted(index for bucket in buckets for index in bucket) == list(range(len(items)))
    assert all(buckets)


@settings(max_examples=100)
@given(items_of)
def test_buckets_follow_the_order_in_which_backward_produces_gradients(items):
    buckets = assign(items, **limits)
    for bucket in buckets:
        assert all(earlier > later for earlier, later in pairwise(bucket))
    for kind in {item.kind for item in items}:
        of_kind = [index for bucket in buckets for index in bucket if items[index].kind == kind]
        assert of_kind == sorted(of_kind, reverse=True)
    assert [bucket[0] for bucket in buckets] == sorted((bucket[0] for bucket in buckets), reverse=True)


@settings(max_examples=100)
@given(items_of)
def test_a_bucket_is_of_one_kind_and_within_its_limit_unless_one_parameter_exceeds_it(items):
    for at, bucket in enumerate(assign(items, **limits)):
        assert len({items[index].kind for index in bucket}) == 1
        sizes = [items[index].size_bytes for index in bucket if items[index].size_bytes]
        limit = limits["first_bytes"] if at == 0 else limits["bucket_bytes"]
        assert sum(sizes) <= limit or len(sizes) == 1


@settings(max_examples=100)
@given(items_of)
def test_bucket_is_closed_only_when_the_next_parameter_does_not_fit(items):
    buckets = assign(items, **limits)
    for kind in {item.kind for item in items}:
        own = [(at, b) for at, b in enumerate(buckets) if items[b[0]].kind == kind]
        for (at, bucket), (_, after) in pairwise(own):
            limit = limits["first_bytes"] if at == 0 else limits["bucket_bytes"]
            filled = sum(items[index].size_bytes for index in bucket)
            assert filled + items[after[0]].size_bytes > limit


@settings(max_examples=50)
@given(items_of)
def test_workers_with_the_same_parameters_make_the_same_buckets(items):
    twin = [Item(size_bytes=item.size_bytes, kind=item.kind) for item in items]
    assert assign(items, **limits) == assign(twin, **limits)


def test_a_parameter_without_elements_does_not_get_a_bucket_of_its_own():
    assert assign(_items(100, 0), **limits) == [[1, 0]]


@pytest.mark.parametrize("count", [1, 2, 3])
def test_parameters_without_elements_are_in_a_bucket(count):
    assert assign(_items(*[0] * count), **limits) == [list(reversed(range(count)))]
