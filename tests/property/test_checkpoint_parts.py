"""A part is a safetensors file with the tensors' bits, and parts share tensors out evenly."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from echelon.checkpoint.manifest import Damaged, Manifest
from echelon.checkpoint.part import Changed, Part, PartFacts, PartMemory, divided, hash_of

DTYPES = (
    torch.float32,
    torch.float64,
    torch.bfloat16,
    torch.int64,
    torch.bool,
    torch.uint8,
    torch.complex64,
)
SHAPES = st.lists(st.integers(0, 4), max_size=3)
TENSORS = st.dictionaries(
    st.text(min_size=1, max_size=8).filter(lambda name: name != "__metadata__" and name.isprintable()),
    st.tuples(st.sampled_from(DTYPES), SHAPES, st.booleans()),
    max_size=6,
)


def made(kind):
    dtype, shape, turned = kind
    tensor = (torch.rand(shape) * 9).to(dtype)
    return tensor.transpose(0, -1) if turned and len(shape) > 1 else tensor


@given(kinds=TENSORS)
@settings(deadline=None)
def test_any_safetensors_reader_reads_a_part(kinds):
    tensors = {name: made(kind) for name, kind in kinds.items()}
    memory = PartMemory()
    memory.take(100)[:] = 255  # left by the part before
    part = Part.of(tensors, memory)
    part.copy(tensors)
    with tempfile.TemporaryDirectory() as folder:
        facts = part.write(Path(folder) / "part")
        read = load_file(Path(folder) / "part")
        assert facts.size_bytes == (Path(folder) / "part").stat().st_size
        assert facts.xxh3 == hash_of(Path(folder) / "part")
    assert read.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert read[name].dtype == tensor.dtype
        assert torch.equal(read[name], tensor)


@given(sizes=st.dictionaries(st.text(max_size=5), st.integers(0, 1000)), parts=st.integers(1, 6))
def test_names_are_divided_evenly_each_once(sizes, parts):
    out = divided(sizes, parts)
    assert len(out) == parts
    assert sorted(name for part in out for name in part) == sorted(sizes)
    totals = [sum(sizes[name] for name in part) for part in out]
    assert max(totals) - min(totals) <= max(sizes.values(), default=0)
    assert divided(dict(reversed(sizes.items())), parts) == out, "whatever the order"


def test_a_tensor_that_changes_during_the_copy_is_noticed():
    tensors = {"a": torch.zeros(3)}
    part = Part.of(tensors, PartMemory())
    versions = part.versions(["a"])
    part.copy(["a"], versions)
    tensors["a"].add_(1)
    with pytest.raises(Changed, match="a"):
        part.copy(["a"], versions)


TREES = st.recursive(st.none() | st.integers() | st.text(), lambda inner: st.lists(inner, max_size=3))


@given(
    step=st.integers(0, 10**9),
    figures=st.dictionaries(st.text(), st.floats(allow_nan=False, allow_infinity=False), max_size=3),
    parts=st.lists(st.tuples(st.text(), st.integers(0, 10**12), st.text()), max_size=3),
    trees=st.tuples(TREES, TREES, st.lists(TREES, max_size=3)),
    data=st.data(),
)
def test_a_manifest_is_read_as_it_was_written_and_any_changed_bit_is_noticed(
    step, figures, parts, trees, data
):
    listed = [PartFacts(file=file, size_bytes=size, xxh3=xxh3) for file, size, xxh3 in parts]
    common, lead, workers = trees
    whole = Manifest(step=step, parts=listed, common=common, lead=lead, workers=workers, figures=figures)
    written = whole.encode()
    assert Manifest.decode(written) == whole
    changed = bytearray(written)
    at = data.draw(st.integers(0, len(written) * 8 - 1))
    changed[at // 8] ^= 1 << at % 8
    with pytest.raises(Damaged):
        Manifest.decode(bytes(changed))
