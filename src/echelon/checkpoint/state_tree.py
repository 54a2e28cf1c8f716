"""Converts nested state to JSON plus named tensors, and back exactly.

`flatten` and `restore` are inverse for None, bool, int, float, str, bytes, list, tuple, dict, OrderedDict,
Counter and dense tensors of any dtype, nested freely. Two things change: numpy scalars become Python
scalars, and tensors that shared memory (tied weights) become equal tensors that do not. Nothing else is
accepted, so reading a checkpoint never runs code: there is no pickle.

In JSON, null, true, numbers, text and lists represent themselves. Everything else is an object whose first
key names its type:

    {"dict": {"a": 1}}                   a dict whose keys are all text
    {"items": [[1, "a"], [null, "b"]]}   a dict with other keys
    {"ordered": [["a", 1]], "metadata"}  an OrderedDict, with the `_metadata` of a module's state_dict
    {"counter": [[30, 1]]}               a Counter
    {"tuple": [1, 2]}   {"bytes": "base64"}   {"float": "nan"}   {"int": "0x..."}
    {"tensor": "model.fc.weight"}        a tensor of that name; "as" if it is stored as another dtype
"""

from __future__ import annotations

import base64
import json
import math
from collections import Counter, OrderedDict
from collections.abc import Iterable, Mapping
from typing import Any, TypeAlias

import numpy as np
import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor
from torch.nn.parameter import is_lazy

from echelon.errors import CheckpointError

Node: TypeAlias = Any  # what json.dumps takes

_MAX_DEPTH = 100
_INT64_BITS = 63
_RESERVED = "__metadata__"  # safetensors reserves this name

# Stored directly. Two more are stored as other dtypes, and all others are refused.
_DTYPES = frozenset(
    {
        torch.bool,
        torch.uint8,
        torch.uint16,
        torch.uint32,
        torch.uint64,
        torch.int8,
        torch.int16,
        torch.int32,
        torch.int64,
        torch.float16,
        torch.bfloat16,
        torch.float32,
        torch.float64,
        torch.complex64,
        torch.float8_e4m3fn,
        torch.float8_e4m3fnuz,
        torch.float8_e5m2,
        torch.float8_e5m2fnuz,
    }
)
_AS_FLOAT64 = "complex128"  # pairs of float64
_AS_UINT8 = "float8_e8m0fnu"  # its bytes
_OTHER_DTYPES = {torch.complex128: _AS_FLOAT64, torch.float8_e8m0fnu: _AS_UINT8}


def flatten(state: Any) -> tuple[bytes, dict[str, Tensor]]:
    """The state as JSON and tensors: on the CPU, contiguous, without shared memory.

    A tensor is copied only if necessary, so write the result before training changes the state.
    """
    writer = _Writer()
    tree = writer.node(state, "", 0)
    return json.dumps(tree, allow_nan=False, separators=(",", ":")).encode("ascii"), writer.tensors


def leaves(state: Any, prefix: str = "") -> tuple[Node, dict[str, Tensor]]:
    """The state as a tree for JSON, and its tensors as they are: on their device, not copied.

    Tensors may share memory, and change when training goes on. Their names begin with `prefix`.
    """
    writer = _Writer(prefix, as_they_are=True)
    return writer.node(state, "", 0), writer.tensors


def restore(tree_json: bytes, tensors: Mapping[str, Tensor]) -> Any:
    """The state that was passed to `flatten`."""
    try:
        tree = json.loads(tree_json)
    except (ValueError, RecursionError) as error:
        raise _unreadable(error) from error
    return restore_node(tree, tensors)


def restore_node(tree: Node, tensors: Mapping[str, Tensor]) -> Any:
    """The state that was passed to `leaves`."""
    try:
        return _read(tree, tensors)
    except CheckpointError:
        raise
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError, RuntimeError) as error:
        raise _unreadable(error) from error


def _unreadable(error: Exception) -> CheckpointError:
    return CheckpointError(
        f"the checkpoint's state cannot be read: {type(error).__name__}: {error}",
        fix="use another checkpoint; Echelon did not write this one, or it is damaged",
    )


def pack(state: Any) -> bytes:
    """The state as one sequence of bytes."""
    tree, tensors = flatten(state)
    return len(tree).to_bytes(8, "little") + tree + safetensors.torch.save(tensors)


def unpack(data: bytes) -> Any:
    """The state that was passed to `pack`."""
    length = int.from_bytes(data[:8], "little")
    try:
        tensors = safetensors.torch.load(data[8 + length :])
    except (SafetensorError, ValueError, KeyError, TypeError, RuntimeError) as error:
        raise _unreadable(error) from error
    return restore(data[8 : 8 + length], tensors)


class _Writer:
    """Walks the state once and collects its tensors under unique names."""

    def __init__(self, prefix: str = "", *, as_they_are: bool = False) -> None:
        self._prefix = prefix
        self.tensors: dict[str, Tensor] = {}
        self._as_they_are = as_they_are
        self._storages: set[int] = set()

    def node(self, value: Any, path: str, depth: int) -> Node:
        """One value as JSON; `path` names it in errors."""
        if depth > _MAX_DEPTH:
            raise CheckpointError(
                f"the state is nested deeper than {_MAX_DEPTH} levels, or contains itself",
                where=path[:80] + "...",
                fix="store a flatter structure",
            )
        if isinstance(value, Tensor):
            return self._tensor(value, path)
        kind = type(value)
        if kind is list:
            return self._sequence(value, path, depth)
        if kind is tuple:
            return {"tuple": self._sequence(value, path, depth)}
        if kind is dict and all(type(key) is str for key in value):
            return {"dict": {key: self.node(v, _join(path, key), depth + 1) for key, v in value.items()}}
        if kind is dict:
            return {"items": self._pairs(value, path, depth)}
        if kind is Counter:
            return {"counter": self._pairs(value, path, depth)}
        if kind is OrderedDict:
            return self._ordered(value, path, depth)
        return _scalar(value, path)

    def _sequence(self, values: Iterable[Any], path: str, depth: int) -> list[Node]:
        return [self.node(item, f"{path}[{i}]", depth + 1) for i, item in enumerate(values)]

    def _pairs(self, values: Mapping[Any, Any], path: str, depth: int) -> list[Node]:
        out = []
        for key, value in values.items():
            here = _join(path, key)
            out.append([_key(key, here), self.node(value, here, depth + 1)])
        return out

    def _ordered(self, value: OrderedDict[Any, Any], path: str, depth: int) -> Node:
        node: dict[str, Node] = {"ordered": self._pairs(value, path, depth)}
        # A module's state_dict keeps the format versions of its modules here.
        metadata = getattr(value, "_metadata", None)
        if metadata is not None:
            node["metadata"] = self.node(metadata, _join(path, "_metadata"), depth + 1)
        return node

    def _tensor(self, value: Tensor, path: str) -> Node:
        tensor = _plain(value, path)
        node = {"tensor": self._name(path)}
        if tensor.dtype in _OTHER_DTYPES:
            node["as"] = _OTHER_DTYPES[tensor.dtype]
            tensor = torch.view_as_real(tensor) if tensor.is_complex() else tensor.view(torch.uint8)
        if self._as_they_are:
            self.tensors[node["tensor"]] = tensor
            return node
        tensor = tensor.cpu().contiguous()
        if tensor.data_ptr() and tensor.untyped_storage().data_ptr() in self._storages:
            tensor = tensor.clone()
        self._storages.add(tensor.untyped_storage().data_ptr())
        self.tensors[node["tensor"]] = tensor
        return node

    def _name(self, path: str) -> str:
        """The path, made unique (`a.b` may be one key or two) and valid UTF-8."""
        stem = self._prefix + path.encode("utf-8", "backslashreplace").decode("utf-8") or "state"
        name, count = stem, 1
        while name in self.tensors or name == _RESERVED:
            count += 1
            name = f"{stem}#{count}"
        return name


def _plain(value: Tensor, path: str) -> Tensor:
    """The tensor as a plain one; raises CheckpointError if it cannot be stored."""
    if is_lazy(value):
        raise _refusal("a parameter that has no shape yet", path, "run one batch through the model first")
    tensor = value.detach()
    if type(tensor) is not torch.Tensor:
        raise _refusal(f"a tensor of type {_type_name(tensor)}", path, "convert it to a plain tensor first")
    if tensor.is_meta:
        raise _refusal("a tensor on the meta device", path, "give it values first, on a real device")
    if tensor.layout is not torch.strided or tensor.is_nested:
        raise _refusal("a tensor that is not dense", path, "store tensor.to_dense()")
    if tensor.dtype not in _DTYPES and tensor.dtype not in _OTHER_DTYPES:
        raise _refusal(f"a tensor of {tensor.dtype}", path, "convert it to a usual dtype first")
    return tensor.resolve_conj().resolve_neg()


def _scalar(value: Any, path: str) -> Node:
    if isinstance(value, np.generic):
        value = value.item()
    kind = type(value)
    if value is None or kind is bool or kind is str:
        return value
    if kind is int:
        return value if value.bit_length() <= _INT64_BITS else {"int": hex(value)}
    if kind is float:
        return value if math.isfinite(value) else {"float": repr(value)}
    if kind is bytes:
        return {"bytes": base64.b64encode(value).decode("ascii")}
    raise _refusal(*_unknown(value, path))


def _key(key: Any, path: str) -> Node:
    try:
        return _scalar(key, path)
    except CheckpointError as error:
        raise CheckpointError(
            f"a checkpoint cannot hold a dict key that is {_article(_type_name(key))}",
            where=path,
            fix="use text or numbers as keys",
        ) from error


def _unknown(value: Any, path: str) -> tuple[str, str, str]:
    """The value's description, its path, and what to store instead."""
    name = _type_name(value)
    if isinstance(value, np.ndarray):
        return "a numpy array", path, "store torch.from_numpy(array), or array.tolist()"
    if callable(value) and hasattr(value, "__qualname__"):
        what = f"a function or class ({value.__qualname__})"
        return what, path, "leave it out and set it again after loading"
    for base in (dict, list, tuple, str, bytes, int, float):
        if isinstance(value, base):
            return _article(name), path, f"store it as a plain {base.__name__}"
    if isinstance(value, set | frozenset):
        return f"a {name}", path, "store sorted(...), a list"
    return (
        f"an object of type {name}",
        path,
        "store its state_dict(), or plain values, in its place",
    )


def _refusal(what: str, path: str, fix: str) -> CheckpointError:
    return CheckpointError(f"a checkpoint cannot hold {what}", where=path or "the state itself", fix=fix)


def _type_name(value: Any) -> str:
    kind = type(value)
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


def _article(name: str) -> str:
    return f"{'an' if name[0].lower() in 'aeiou' else 'a'} {name}"


def _join(path: str, key: object) -> str:
    return f"{path}.{key}" if path else f"{key}"


def _read(node: Node, tensors: Mapping[str, Tensor]) -> Any:
    if isinstance(node, list):
        return [_read(item, tensors) for item in node]
    if not isinstance(node, dict):
        return node
    if not node:
        raise ValueError("a JSON object without a type key")
    tag, body = next(iter(node.items()))
    if tag == "dict":
        return {key: _read(value, tensors) for key, value in body.items()}
    if tag == "items":
        return dict(_read_pairs(body, tensors))
    if tag == "counter":
        return Counter(dict(_read_pairs(body, tensors)))
    if tag == "ordered":
        return _read_ordered(node, tensors)
    if tag == "tuple":
        return tuple(_read(item, tensors) for item in body)
    if tag == "tensor":
        return _read_tensor(tensors[body], node.get("as"))
    if tag == "bytes":
        return base64.b64decode(body, validate=True)
    if tag == "float":
        return float(body)
    if tag == "int":
        return int(body, 16)
    raise ValueError(f"unknown type key {tag!r}")


def _read_tensor(tensor: Tensor, stored_as: str | None) -> Tensor:
    if stored_as is None:
        return tensor
    if stored_as == _AS_FLOAT64:
        return torch.view_as_complex(tensor)
    if stored_as == _AS_UINT8:
        return tensor.view(torch.float8_e8m0fnu)
    raise ValueError(f"unknown dtype {stored_as!r}")


def _read_pairs(body: list[list[Node]], tensors: Mapping[str, Tensor]) -> list[tuple[Any, Any]]:
    return [(_read(key, tensors), _read(value, tensors)) for key, value in body]


def _read_ordered(node: dict[str, Node], tensors: Mapping[str, Tensor]) -> OrderedDict[Any, Any]:
    out: OrderedDict[Any, Any] = OrderedDict(_read_pairs(node["ordered"], tensors))
    if "metadata" in node:
        out._metadata = _read(node["metadata"], tensors)  # type: ignore[attr-defined]
    return out
