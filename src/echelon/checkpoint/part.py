"""One worker's part of a checkpoint: its tensors, copied into memory in the layout of their file.

The file is a safetensors file: the length of the header, the header as JSON, the tensors. It is laid out
here, and not by the safetensors library, so that tensors are copied once, into memory that the next
checkpoint uses again, and so that the file is hashed while it is written.

    part = Part.of(tensors, memory)     sizes and places; nothing is copied yet
    part.copy(names)                    copy these tensors, in any thread and order
    part.write(path)                    write and hash the file, and force it to disk
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
import xxhash
from torch import Tensor

Bytes = npt.NDArray[np.uint8]
_CHUNK_BYTES = 1 << 22
_ALIGN_BYTES = 8

_NAMES = {
    torch.bool: "BOOL",
    torch.uint8: "U8",
    torch.uint16: "U16",
    torch.uint32: "U32",
    torch.uint64: "U64",
    torch.int8: "I8",
    torch.int16: "I16",
    torch.int32: "I32",
    torch.int64: "I64",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float32: "F32",
    torch.float64: "F64",
    torch.complex64: "C64",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e4m3fnuz: "F8_E4M3FNUZ",
    torch.float8_e5m2: "F8_E5M2",
    torch.float8_e5m2fnuz: "F8_E5M2FNUZ",
}


class Changed(Exception):
    """A tensor was changed while it was copied; the text is its name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PartFacts:
    """A file that is on disk: its size, and its checksum."""

    file: str
    size_bytes: int
    xxh3: str


class PartMemory:
    """Memory for a part, which is used again: touching new memory takes longer than copying."""

    def __init__(self) -> None:
        self._memory: Bytes = np.empty(0, dtype=np.uint8)

    def take(self, size_bytes: int) -> Bytes:
        """So many bytes, with any values."""
        if self._memory.size < size_bytes:
            self._memory = np.empty(size_bytes, dtype=np.uint8)
        return self._memory[:size_bytes]


class Part:
    """The tensors of one file, and the memory that they are copied into."""

    def __init__(self, tensors: Mapping[str, Tensor], places: Mapping[str, int], memory: Bytes) -> None:
        self._tensors = tensors
        self._places = places
        self._memory = memory

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor], memory: PartMemory) -> Part:
        """A part of these tensors, whose values are not copied yet."""
        places: dict[str, int] = {}
        fields: dict[str, object] = {}
        at = 0
        # Large elements first: then every tensor is aligned to its elements.
        for name in sorted(tensors, key=lambda name: -tensors[name].element_size()):
            tensor = tensors[name]
            places[name], end = at, at + tensor.numel() * tensor.element_size()
            shape = list(tensor.shape)
            fields[name] = {"dtype": _NAMES[tensor.dtype], "shape": shape, "data_offsets": [at, end]}
            at = end
        header = json.dumps(fields, separators=(",", ":")).encode()
        header += b" " * (-len(header) % _ALIGN_BYTES)
        begin = 8 + len(header)
        whole = memory.take(begin + at)
        whole[:8] = np.frombuffer(len(header).to_bytes(8, "little"), dtype=np.uint8)
        whole[8:begin] = np.frombuffer(header, dtype=np.uint8)
        return cls(tensors, {name: begin + place for name, place in places.items()}, whole)

    @property
    def size_bytes(self) -> int:
        """The size of the file."""
        return int(self._memory.size)

    def versions(self, names: Iterable[str]) -> dict[str, int]:
        """A number for each tensor that grows whenever torch changes it in place."""
        return {name: _version(self._tensors[name]) for name in names}

    def copy(self, names: Iterable[str], versions: Mapping[str, int] | None = None) -> None:
        """Copy these tensors' values. Raises Changed if one has no longer the version that it had."""
        for name in names:
            tensor = self._tensors[name]
            begin = self._places[name]
            source = _bytes_of(tensor)
            np.copyto(self._memory[begin : begin + source.size], source)  # without Python's lock
            if versions is not None and _version(tensor) != versions[name]:
                raise Changed(name)

    def write(self, path: Path) -> PartFacts:
        """Write the file and force it to disk; raises OSError."""
        digest = xxhash.xxh3_64()
        view: memoryview = self._memory.data
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        try:
            for start in range(0, len(view), _CHUNK_BYTES):
                chunk = view[start : start + _CHUNK_BYTES]
                digest.update(chunk)
                while chunk:
                    chunk = chunk[os.write(handle, chunk) :]
            os.fsync(handle)
        finally:
            os.close(handle)
        return PartFacts(file=path.name, size_bytes=len(view), xxh3=digest.hexdigest())


def hash_of(file: Path) -> str:
    """The checksum of a file."""
    digest = xxhash.xxh3_64()
    with file.open("rb", buffering=0) as stream:
        while chunk := stream.read(_CHUNK_BYTES):
            digest.update(chunk)
    return str(digest.hexdigest())


def divided(sizes: Mapping[str, int], parts: int) -> list[list[str]]:
    """Names in as many parts, of about equal bytes; the same everywhere for the same sizes."""
    out: list[list[str]] = [[] for _ in range(parts)]
    filled = [0] * parts
    for name in sorted(sizes, key=lambda name: (-sizes[name], name)):
        least = filled.index(min(filled))
        out[least].append(name)
        filled[least] += sizes[name]
    return out


def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else int(tensor._version)


def _bytes_of(tensor: Tensor) -> Bytes:
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy() if flat.numel() else np.empty(0, dtype=np.uint8)
