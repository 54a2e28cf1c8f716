"""Any state that a checkpoint accepts can be restored exactly."""

from __future__ import annotations

import json
import math
from collections import Counter, OrderedDict, namedtuple
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load, save
from torch import nn

from echelon.checkpoint.state_tree import flatten, restore
from echelon.errors import CheckpointError

DTYPES = [
    torch.bool, torch.uint8, torch.uint16, torch.uint32, torch.uint64, torch.int8, torch.int16, torch.int32,
    torch.int64, torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64,
    torch.complex128, torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2, torch.float8_e5m2fnuz,
    torch.float8_e8m0fnu,
]  # fmt: skip


def same(a, b):
    """Equal in type, order and value, with nan equal to nan."""
    if type(a) is not type(b):
        return False
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and a.shape == b.shape and bits(a) == bits(b)
    if isinstance(a, dict):
        return same(list(a.items()), list(b.items()))
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, float):
        return (a == b and math.copysign(1, a) == math.copysign(1, b)) or (math.isnan(a) and math.isnan(b))
    return a == b


def bits(tensor):
    return tensor.contiguous().reshape(-1).view(torch.uint8).tolist()


def through_bytes(state):
    """The state, converted to the stored bytes and back."""
    tree, tensors = flatten(state)
    return restore(tree, load(save(tensors)))


@st.composite
def tensors(draw):
    dtype = draw(st.sampled_from(DTYPES))
    shape = draw(st.lists(st.integers(0, 3), max_size=3))
    raw = draw(st.randoms(use_true_random=False)).randbytes(math.prod(shape) * dtype.itemsize)
    if dtype is torch.bool:
        raw = bytes(byte & 1 for byte in raw)
    flat = torch.frombuffer(bytearray(raw), dtype=dtype) if raw else torch.empty(0, dtype=dtype)
    tensor = flat.reshape(shape)
    return tensor.mT if tensor.dim() > 1 and draw(st.booleans()) else tensor


scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.integers(min_value=2**63, max_value=2**64),
    st.floats(),
    st.text(max_size=5),
    st.binary(max_size=5),
)
keys = st.one_of(
    st.text(max_size=5),
    st.integers(),
    st.booleans(),
    st.none(),
    st.binary(max_size=2),
    st.floats(allow_nan=False),
)
states = st.recursive(
    scalars | tensors(),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(st.text(max_size=5), inner, max_size=3),
        st.dictionaries(keys, inner, max_size=3),
        st.dictionaries(keys, inner, max_size=3).map(OrderedDict),
        st.dictionaries(keys, st.integers(), max_size=3).map(Counter),
    ),
    max_leaves=12,
)


@given(states)
@settings(max_examples=200, deadline=None)
def test_state_is_restored_exactly(state):
    assert same(through_bytes(state), state)


@given(states)
@settings(max_examples=50, deadline=None)
def test_the_tree_is_strict_json_in_ascii(state):
    def refuse(word):
        raise AssertionError(word)

    json.loads(flatten(state)[0].decode("ascii"), parse_constant=refuse)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (0,), (0, 3), (2, 3)], ids=str)
def test_every_dtype_and_shape_is_restored(dtype, shape):
    tensor = torch.ones(shape).to(dtype)
    assert same(through_bytes({"t": tensor}), {"t": tensor})


@pytest.mark.parametrize(
    "number", [10**5000, -(10**5000), 2**63, -(2**63) - 1, 2**53 + 1], ids=int.bit_length
)
def test_numbers_of_any_size_are_restored(number):
    assert through_bytes([number]) == [number]


def test_numpy_scalars_become_python_scalars():
    state = {"a": np.float32(0.5), "b": np.int64(3), "c": np.bool_(True), np.int64(7): np.str_("x")}
    assert same(through_bytes(state), {"a": 0.5, "b": 3, "c": True, 7: "x"})


def test_tied_weights_are_restored_equal_and_separate():
    weight = torch.arange(6.0)
    back = through_bytes({"a": weight, "b": weight, "c": weight[2:4], "d": weight.view(2, 3)})
    assert same(back, {"a": weight, "b": weight, "c": weight[2:4], "d": weight.view(2, 3)})
    back["a"].zero_()
    assert torch.equal(back["b"], weight)


def test_conjugated_and_negated_views_are_restored_as_their_values():
    z = torch.tensor([1 + 2j, 3 - 4j])
    assert same(
        through_bytes([z.conj(), z.conj().imag]),
        [torch.tensor([1 - 2j, 3 + 4j]), torch.tensor([-2.0, 4.0])],
    )


@pytest.mark.parametrize("name", ["__metadata__", "", "a.b", "\udc80"])
def test_tensors_can_have_any_name(name):
    state = {name: torch.ones(1), "a": {"b": torch.zeros(2)}, "tensor": {"tensor": torch.ones(3)}}
    assert same(through_bytes(state), state)


def test_dicts_that_look_like_the_format_are_restored():
    state = {"tensor": "x", "dict": {"tuple": [1]}, "bytes": "AA==", "float": "nan", "int": "0x1"}
    assert same(through_bytes(state), state)


def test_modules_and_parameters_are_restored_with_their_versions():
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    saved = through_bytes({"model": model.state_dict(), "parameter": model[0].weight})
    assert saved["model"]._metadata == model.state_dict()._metadata
    assert same(saved["model"], model.state_dict())
    assert same(saved["parameter"], model[0].weight.detach())


def _schedulers(optimizer):
    lr = torch.optim.lr_scheduler
    return [
        lr.StepLR(optimizer, 3),
        lr.MultiStepLR(optimizer, [2, 5]),
        lr.CosineAnnealingLR(optimizer, 10),
        lr.OneCycleLR(optimizer, max_lr=0.1, total_steps=20),
        lr.CyclicLR(optimizer, 0.01, 0.1),
        lr.ReduceLROnPlateau(optimizer),
        lr.LambdaLR(optimizer, lambda step: 0.9**step),
        lr.SequentialLR(optimizer, [lr.ConstantLR(optimizer), lr.ExponentialLR(optimizer, 0.9)], [3]),
    ]


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW, torch.optim.LBFGS])
def test_optimizers_are_restored(kind):
    model = nn.Linear(3, 1)
    optimizer = kind(model.parameters(), lr=torch.tensor(0.1) if kind is torch.optim.AdamW else 0.1)

    def closure():
        optimizer.zero_grad()
        loss = model(torch.ones(2, 3)).square().mean()
        loss.backward()
        return loss

    optimizer.step(closure)
    assert same(through_bytes(optimizer.state_dict()), optimizer.state_dict())


def test_torchs_schedulers_are_restored():
    optimizer = torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=0.1, momentum=0.9)
    for scheduler in _schedulers(optimizer):
        assert same(through_bytes(scheduler.state_dict()), scheduler.state_dict()), scheduler


Point = namedtuple("Point", "x y")


class Thing:
    pass


@pytest.mark.parametrize(
    ("bad", "what", "fix"),
    [
        (lambda: None, "function", "set it again after loading"),
        (Thing, "function or class (Thing)", "set it again"),
        (Thing(), "object of type", "state_dict()"),
        (partial(int), "object of type functools.partial", "state_dict()"),
        (Point(1, 2), "Point", "plain tuple"),
        (torch.Size([1]), "torch.Size", "plain tuple"),
        ({1, 2}, "a set", "list"),
        (1j, "complex", "plain values"),
        (np.zeros(2), "numpy array", "from_numpy"),
        (torch.eye(2).to_sparse(), "not dense", "to_dense"),
        (torch.empty(2, device="meta"), "meta", "real device"),
        (nn.LazyLinear(2).weight, "no shape yet", "one batch"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_value_that_cannot_be_stored_is_named_by_its_path_with_a_fix(bad, what, fix):
    with pytest.raises(CheckpointError) as caught:
        flatten({"scheduler": {0: {"lr_lambdas": [bad]}}})
    assert caught.value.where == "scheduler.0.lr_lambdas[0]"
    assert what in caught.value.message
    assert fix in caught.value.fix


def test_a_key_that_cannot_be_stored_is_named():
    with pytest.raises(CheckpointError, match="dict key that is a tuple") as caught:
        flatten({"cache": {(1, 2): "x"}})
    assert caught.value.where == "cache.(1, 2)"


def test_state_that_contains_itself_is_refused():
    state: dict = {}
    state["again"] = [state]
    with pytest.raises(CheckpointError, match="contains itself"):
        flatten(state)


@pytest.mark.parametrize(
    "tree",
    [b"", b"{", b"\xff", b"{}", b'{"pickle":"x"}', b'{"tensor":"missing"}', b'{"dict":[]}', b'{"tuple":1}',
     b'{"bytes":"?"}', b'{"int":"x"}', b'{"items":[[1]]}', b'{"items":[[[],1]]}', b'{"tensor":[]}',
     b"[" * 9999],
)  # fmt: skip
def test_an_invalid_tree_is_a_checkpoint_error(tree):
    with pytest.raises(CheckpointError, match="cannot be read"):
        restore(tree, {})
