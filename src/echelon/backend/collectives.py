"""Each collective of torch.distributed, in terms of what a group of workers offers.

Every function is an operation for `order.py`: it begins operations of the group and yields their futures.
Tensors may be non-contiguous, empty and of any type; bytes are moved, and only reductions compute. Members
that gather know each other's lengths, so that blocks may differ in size.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from echelon.backend.order import Part, Steps
from echelon.backend.reduction import Reduction
from echelon.backend.staging import Staging
from echelon.comm.future import Future
from echelon.comm.group import Group, blocks
from echelon.errors import ConfigError

Lists = Sequence[Sequence[Tensor]]


def all_reduce(
    group: Group, tensors: Sequence[Tensor], reduction: Reduction, staging: Staging | None = None
) -> Steps:
    """Combine tensors over all members, in place; several of one type together."""
    for tensor in tensors:
        reduction.check(tensor)
    if staging is not None and _owns(tensors[0].detach(), tensors):
        flat = _flat(tensors[0])
        op = reduction.engine_op(flat.dtype)
        assert op is not None  # only these are staged
        buffer = staging.buffer(flat.numel(), flat.dtype)
        yield group.all_reduce_through(buffer, reduction.prepared(flat), op)
        reduction.finished(flat)
        return list(tensors)
    if staging is not None:
        flat = staging.buffer(sum(tensor.numel() for tensor in tensors), tensors[0].dtype)
        for part, tensor in zip(blocks(flat, [one.numel() for one in tensors]), tensors, strict=True):
            part.view(tensor.shape).copy_(tensor.detach())
    else:
        flat = _joined(tensors)
    result = yield from _combine(group, flat, reduction)
    _spread(result, tensors)
    return list(tensors)


def all_reduce_sparse(group: Group, tensor: Tensor, reduction: Reduction) -> Steps:
    """Sum sparse tensors: everybody gets all entries, and adds them up."""
    if reduction.engine_op(tensor.dtype) != "sum":
        raise ConfigError("sparse tensors can only be summed", where="all_reduce", fix="use SUM or AVG")
    own = tensor.coalesce()
    counts = [own.sparse_dim(), own._nnz()]
    known = torch.zeros(group.size, 2, dtype=torch.int64)
    known[group.rank] = torch.tensor(counts)
    yield group.all_gather_unequal(known.view(-1), [2] * group.size)
    entries = [int(row[1]) for row in known]
    width = own.values()[:1].numel() if own._nnz() else int(torch.tensor(own.shape[counts[0] :]).prod())
    places = torch.zeros(sum(entries), counts[0], dtype=torch.int64)
    values = torch.zeros(sum(entries), width, dtype=tensor.dtype)
    start = sum(entries[: group.rank])
    places[start : start + counts[1]] = own.indices().t()
    values[start : start + counts[1]] = own.values().reshape(counts[1], width)
    yield group.all_gather_unequal(places.view(-1), [count * counts[0] for count in entries])
    yield group.all_gather_unequal(values.view(-1), [count * width for count in entries])
    values = reduction.finished(values).view(-1, *own.shape[counts[0] :])
    total = torch.sparse_coo_tensor(places.t(), values, own.shape, check_invariants=False).coalesce()
    tensor.copy_(total)
    return [tensor]


def reduce(group: Group, tensors: Sequence[Tensor], root: int, reduction: Reduction) -> Steps:
    """Combine tensors over all members; only the root gets the result."""
    for tensor in tensors:
        reduction.check(tensor)
    flat = _joined(tensors)
    own = flat.clone() if _owns(flat, tensors) else flat  # only the root's tensor changes
    op = reduction.engine_op(flat.dtype)
    if op is None or not flat.numel():
        result = yield from _combine(group, own, reduction)
    else:
        lengths = [flat.numel() if rank == root else 0 for rank in range(group.size)]
        yield group.reduce_scatter(reduction.prepared(own), lengths, op)
        result = reduction.finished(own) if group.rank == root else own
    if group.rank == root:
        _spread(result, tensors)
    return list(tensors)


def broadcast(group: Group, tensors: Sequence[Tensor], root: int) -> Steps:
    """Copy the root's values to all members."""
    yield Future.completed(None)  # the group's broadcast waits by itself
    for tensor in tensors:
        flat = _flat(tensor)
        group.broadcast(flat, root)
        if group.rank != root:
            _spread(flat, [tensor])
    return list(tensors)


def all_gather(group: Group, outputs: Lists, inputs: Sequence[Tensor]) -> Steps:
    """Everybody gets the tensors of all members: `outputs[i][r]` is member r's `inputs[i]`."""
    rooms = []
    for out, own in zip(outputs, inputs, strict=True):
        lengths = [part.numel() for part in out]
        room = own.new_empty(sum(lengths))
        blocks(room, lengths)[group.rank].copy_(own.detach().reshape(-1))
        rooms.append((room, lengths, out))
    yield _together([group.all_gather_unequal(_bytes(room), _scaled(room, n)) for room, n, _ in rooms])
    for room, _, out in rooms:
        _spread(room, out)
    return [part for out in outputs for part in out]


def all_gather_single(group: Group, outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> Steps:
    """Everybody gets the tensors of all members, one after the other in one tensor; in place."""
    futures, rooms = [], []
    for out, own in zip(outputs, inputs, strict=True):
        if out.numel() != group.size * own.numel():
            raise ValueError(
                f"the output has {out.numel()} elements; {group.size} members give {own.numel()} each"
            )
        room = _flat(out)
        mine = blocks(room, [own.numel()] * group.size)[group.rank]
        if mine.data_ptr() != own.data_ptr() or not own.is_contiguous():
            mine.copy_(own.detach().reshape(-1))
        rooms.append(room)
        futures.append(group.all_gather_unequal(_bytes(room), _scaled(room, [own.numel()] * group.size)))
    yield _together(futures)
    for room, out in zip(rooms, outputs, strict=True):
        _spread(room, [out])
    return list(outputs)


def gather(group: Group, outputs: Sequence[Tensor], own: Tensor, root: int) -> Steps:
    """The root gets the tensors of all members; `outputs` is empty on the others."""
    received = yield from _exchange(
        group, [own if rank == root else own.new_empty(0) for rank in range(group.size)]
    )
    if group.rank == root:
        _fill(outputs, received)
    return list(outputs)


def scatter(group: Group, output: Tensor, inputs: Sequence[Tensor], root: int) -> Steps:
    """Member r gets the root's `inputs[r]`; `inputs` is empty on the others."""
    nothing = output.new_empty(0)
    received = yield from _exchange(group, inputs if group.rank == root else [nothing] * group.size)
    _fill([output], [received[root]])
    return [output]


def reduce_scatter(group: Group, outputs: Sequence[Tensor], inputs: Lists, reduction: Reduction) -> Steps:
    """Combine the members' lists of tensors; member r gets the r-th."""
    for out, parts in zip(outputs, inputs, strict=True):
        lengths = [part.numel() for part in parts]
        room = torch.cat([part.detach().reshape(-1) for part in parts])
        result = yield from _combine_blocks(group, room, lengths, reduction)
        _spread(result, [out])
    return list(outputs)


def reduce_scatter_single(
    group: Group, outputs: Sequence[Tensor], inputs: Sequence[Tensor], reduction: Reduction
) -> Steps:
    """Combine tensors of equal blocks; member r gets the r-th block."""
    for out, own in zip(outputs, inputs, strict=True):
        if own.numel() != group.size * out.numel():
            raise ValueError(
                f"the input has {own.numel()} elements; {group.size} members get {out.numel()} each"
            )
        lengths = [out.numel()] * group.size
        room = own.detach().reshape(-1)
        result = yield from _combine_blocks(group, room.clone(), lengths, reduction)
        _spread(result, [out])
    return list(outputs)


def all_to_all(group: Group, outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> Steps:
    """Member r gets `inputs[r]`; `outputs[r]` comes from member r."""
    received = yield from _exchange(group, inputs)
    _fill(outputs, received)
    return list(outputs)


def all_to_all_single(
    group: Group, output: Tensor, own: Tensor, output_splits: Sequence[int], input_splits: Sequence[int]
) -> Steps:
    """The same with rows of one tensor; no splits: equal parts."""
    room = _flat(output)
    parts = blocks(own.detach().contiguous(), _rows(own, input_splits, group.size, "input"))
    places = blocks(room, _rows(output, output_splits, group.size, "output"))
    received = yield from _exchange(group, parts)
    _fill(places, received)
    _spread(room, [output])
    return [output]


def barrier(group: Group) -> Steps:
    """Done when all members have called it."""
    yield group.all_reduce(torch.zeros(1))
    return []


# Parts -------------------------------------------------------------------------------------------


def _combine(group: Group, flat: Tensor, reduction: Reduction) -> Part[Tensor]:
    """Combine a flat tensor, in place or not; returns where the result is."""
    if not flat.numel():
        return flat
    op = reduction.engine_op(flat.dtype)
    if op is not None:
        yield group.all_reduce(reduction.prepared(flat), op)
        return reduction.finished(flat)
    lengths = [stop - start for start, stop in _pieces(flat.numel(), group.size)]
    own = yield from _combine_blocks(group, flat, lengths, reduction)
    room = torch.empty_like(flat)
    blocks(room, lengths)[group.rank].copy_(own)
    yield group.all_gather_unequal(_bytes(room), _scaled(room, lengths))
    return room


def _combine_blocks(
    group: Group, room: Tensor, lengths: Sequence[int], reduction: Reduction
) -> Part[Tensor]:
    """Combine a flat tensor that may be overwritten; returns this member's block of the result."""
    reduction.check(room)
    op = reduction.engine_op(room.dtype)
    if op is not None:
        if room.numel():
            yield group.reduce_scatter(reduction.prepared(room), lengths, op)
        return reduction.finished(blocks(room, lengths)[group.rank])
    received = yield from _exchange(group, blocks(room, lengths))
    parts = [_typed(part, room.dtype) for part in received]
    return reduction.folded(parts) if parts[0].numel() else parts[0]


def _exchange(group: Group, outgoing: Sequence[Tensor]) -> Part[list[Tensor]]:
    """Send each member its tensor; returns theirs as bytes."""
    if len(outgoing) != group.size:
        raise ValueError(f"{len(outgoing)} tensors for {group.size} members")
    messages = group.all_to_all([_bytes(_flat(part)) for part in outgoing])
    yield messages.received
    if not messages.delivered.done():  # the caller may change its tensors afterwards
        yield messages.delivered
    found: list[Tensor] = messages.received.wait()
    return found


def _fill(outputs: Sequence[Tensor], received: Sequence[Tensor]) -> None:
    for source, (out, part) in enumerate(zip(outputs, received, strict=True)):
        values = _typed(part, out.dtype)
        if values.numel() != out.numel():
            raise ValueError(
                f"member {source} sent {values.numel()} elements where {out.numel()} were expected"
            )
        out.detach().copy_(values.view(out.shape))


def _joined(tensors: Sequence[Tensor]) -> Tensor:
    """A flat tensor of all: that of the caller if there is one which is contiguous."""
    if len(tensors) == 1:
        return _flat(tensors[0])
    return torch.cat([tensor.detach().reshape(-1) for tensor in tensors])


def _spread(flat: Tensor, tensors: Sequence[Tensor]) -> None:
    """Copy a flat tensor back to where `_joined` took it from, unless it is the same memory."""
    if not _owns(flat, tensors):
        for part, tensor in zip(blocks(flat, [one.numel() for one in tensors]), tensors, strict=True):
            tensor.detach().copy_(part.view(tensor.shape))


def _owns(flat: Tensor, tensors: Sequence[Tensor]) -> bool:
    return len(tensors) == 1 and tensors[0].data_ptr() == flat.data_ptr() and tensors[0].is_contiguous()


def _flat(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().view(-1)


def _bytes(flat: Tensor) -> Tensor:
    return flat.view(torch.uint8)


def _typed(raw: Tensor, dtype: torch.dtype) -> Tensor:
    """Bytes as numbers; they may begin anywhere in memory."""
    if raw.dtype == dtype:
        return raw
    if raw.storage_offset() % dtype.itemsize or raw.data_ptr() % dtype.itemsize:
        raw = raw.clone()
    return raw.view(dtype)


def _scaled(flat: Tensor, lengths: Sequence[int]) -> list[int]:
    return [length * flat.element_size() for length in lengths]


def _together(futures: list[Future[Tensor]]) -> Future[Tensor]:
    return futures[0] if len(futures) == 1 else Future.all(futures, torch.empty(0))


def _pieces(length: int, count: int) -> list[tuple[int, int]]:
    return list(
        pairwise(
            accumulate(
                (length * (at + 1) // count - length * at // count for at in range(count)), initial=0
            )
        )
    )


def _rows(tensor: Tensor, splits: Sequence[int], size: int, what: str) -> list[int]:
    """The lengths of the parts of a tensor that is cut along its first dimension."""
    rows = tensor.shape[0] if tensor.dim() else 0
    width = tensor.numel() // rows if rows else 0
    if not splits:
        if rows % size:
            raise ValueError(f"{rows} rows of the {what} tensor cannot be cut into {size} equal parts")
        splits = [rows // size] * size
    if len(splits) != size or sum(splits) != rows:
        raise ValueError(f"split sizes {list(splits)} do not fit {rows} rows of the {what} tensor")
    return [count * width for count in splits]
