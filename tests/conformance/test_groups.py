"""Every transport against the contract of a group. Many checks go into each call of the warm pool."""

from __future__ import annotations

import hashlib
import random
import threading

import pytest
import torch

import echelon
from echelon.comm.alone import SoloGroup
from echelon.errors import ConfigError
from wires import values

DTYPES = [
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int32,
    torch.int64,
    torch.uint8,
]
MOVED = [*DTYPES, torch.bool, torch.complex64, torch.int16]
COMBINED = {"sum": torch.sum, "max": torch.amax, "min": torch.amin}
LENGTHS = [0, 1, 2, 1000]
LARGE = 1_500_000
CPU = torch.device("cpu")

every_transport = pytest.mark.parametrize("transport", ["shm", "tcp", "c10d"])
sizes = pytest.mark.parametrize("size", [2, 4])


class member:  # noqa: N801 - reads as what it gives
    """A worker's group, for the time of a call."""

    def __init__(self, transport):
        self._session = echelon.join(record=False, transport=transport, round_timeout_s=90, timeout_s=90)

    def __enter__(self):
        self._session.__enter__()
        return self._session, self._session._group

    def __exit__(self, *story):
        self._session.__exit__(*story)


def noise(rank, length, dtype=torch.float32):
    """Numbers whose sum depends on the order in which they are added."""
    made = torch.randn(length, generator=torch.Generator().manual_seed(rank))
    return (made * 10.0**rank).to(dtype)


def reductions(transport):
    out = {}
    with member(transport) as (_, group):
        out["rank"] = (group.rank, group.size)
        for dtype in DTYPES:
            for op in COMBINED:
                for length in LENGTHS:
                    tensor = values(group.rank, length, dtype)
                    result = group.all_reduce(tensor, op).wait()
                    out[dtype, op, length, "plain"] = tensor
                    out[dtype, op, length, "same"] = result.data_ptr() == tensor.data_ptr()
                    buffer = group.buffer(length, dtype, CPU)
                    out[dtype, op, length, "new"] = bool(buffer.any())
                    buffer.copy_(values(group.rank, length, dtype))
                    group.all_reduce(buffer, op).wait()
                    out[dtype, op, length, "buffer"] = buffer.clone()
                    group.release(buffer)
                    buffer.copy_(values(group.rank, length, dtype))
                    group.all_reduce(buffer, op).wait()
                    out[dtype, op, length, "released"] = buffer.clone()
    return out


def others(transport):
    out = {}
    with member(transport) as (session, group):
        rank, size = group.rank, group.size
        out["gathered"] = [group.all_gather(values(rank, 3, dtype)) for dtype in MOVED]
        out["gathered 0-dim"] = group.all_gather(torch.tensor(float(rank)))
        out["gathered empty"] = group.all_gather(torch.zeros(0, 3))
        out["gathered turned"] = group.all_gather((torch.arange(6.0).view(2, 3) + rank).t())
        out["gathered large"] = [bool((p == r).all()) for r, p in enumerate(group.all_gather(_full(rank)))]
        out["gathered bytes"] = group.all_gather_bytes(b"x" * (rank * 5))
        told = []
        for source in range(size):
            for dtype in MOVED:
                tensor = values(rank, 4, dtype)
                group.broadcast(tensor, source)
                told.append(torch.equal(tensor, values(source, 4, dtype)))
            large = _full(rank)
            group.broadcast(large, source)
            told.append(bool((large == source).all()))
            told.append(group.broadcast_bytes(f"from {rank}".encode(), source) == f"from {source}".encode())
        group.broadcast(torch.zeros(0), size - 1)
        out["told"] = told
        for _ in range(20):
            group.barrier()
        matrix = torch.arange(6.0).view(2, 3) * (rank + 1)
        session.all_reduce(matrix.t())
        column = torch.ones(3, 2)
        session.all_reduce(column[:, 1])
        out["turned"], out["column"] = matrix, column
        weight = torch.ones(3, requires_grad=True)
        group.all_reduce(weight).wait()
        out["leaf"] = weight.detach()
        broken = torch.ones(5)
        broken[rank] = float("nan")
        out["nan"] = group.all_reduce(broken).wait()
    return out


def _full(rank):
    return torch.full((LARGE // 4,), float(rank))


def at_once(transport):
    """Several operations in flight on several forks, waited for in another order than started."""
    out = {}
    with member(transport) as (_, group):
        rank = group.rank
        held = [group.buffer(1000, torch.float32, CPU) for _ in range(3)]
        tensors = [*held, *(torch.empty(n) for n in (10, 30_000, LARGE))]
        for turn in range(3):
            for n, tensor in enumerate(tensors):
                tensor.fill_(rank + n + turn)
            begun = [group.all_reduce(tensor, priority=-n) for n, tensor in enumerate(tensors)]
            group.barrier()
            order = range(len(begun)) if (rank + turn) % 2 else reversed(range(len(begun)))
            for n in order:
                begun[n].wait()
                out[turn, n] = (tensors[n].unique().tolist(), begun[n].done())
        one, other = group.fork(), group.fork()
        pair = [one, other] if rank % 2 else [other, one]
        parts = {fork: torch.full((50_000,), float(rank + 1)) for fork in pair}
        begun = [fork.all_reduce(parts[fork], "max" if fork is one else "min") for fork in pair]
        main = torch.full((50_000,), float(rank))
        group.all_reduce(main).wait()
        for pending in begun:
            pending.wait()
        out["forks"] = (parts[one][0].item(), parts[other][0].item(), main[0].item())
        one.close()
        out["after a fork"] = [g.all_reduce(torch.ones(3)).wait().tolist() for g in (other, group)]
        grown = group.fork().buffer(LARGE, torch.float32, CPU)
        grown.copy_(noise(rank, LARGE))
    return out


def exactly(transport):
    """The bits of sums that depend on the order of adding."""
    out = []
    with member(transport) as (_, group):
        for dtype in (torch.float32, torch.float64, torch.bfloat16):
            for length in (7, 5000, LARGE):
                plain = noise(group.rank, length, dtype)
                group.all_reduce(plain).wait()
                buffer = group.buffer(length, dtype, CPU)
                buffer.copy_(noise(group.rank, length, dtype))
                group.all_reduce(buffer).wait()
                out += [hashlib.sha256(t.view(torch.uint8).numpy()).hexdigest() for t in (plain, buffer)]
    return out


def kinds(transport):
    with member(transport) as (_, group):
        buffer = group.buffer(10, torch.float32, CPU)
        team = getattr(group, "_team", None)
        return type(group).__name__, team is not None and team.holds(buffer)


def message(sender, receiver, length):
    """Bytes unique to this pair."""
    made = random.Random(f"{sender} {receiver}").randbytes(length)
    return torch.frombuffer(bytearray(made), dtype=torch.uint8) if length else torch.empty(0).byte()


def arrived(group, parts, length_of):
    """Whether all messages to this member have arrived, with its own in place."""
    rank = group.rank
    expected = [message(r, rank, length_of(r, rank)) for r in range(group.size)]
    return len(parts) == group.size and all(map(torch.equal, parts, expected))


def outgoing(group, length_of):
    rank = group.rank
    return [message(rank, r, length_of(rank, r)) for r in range(group.size)]


LENGTHS_OF = {
    "nothing": lambda sender, receiver: 0,
    "a byte": lambda sender, receiver: 1,
    "different": lambda sender, receiver: 10 * sender + receiver,
    "some": lambda sender, receiver: 0 if (sender + receiver) % 2 else 1000,
    "large": lambda sender, receiver: 1_300_000 + sender if receiver else 3,
}


def all_to_alls(transport):
    out = {}
    with member(transport) as (_, group):
        rank = group.rank
        for name, length_of in LENGTHS_OF.items():
            given = outgoing(group, length_of)
            messages = group.all_to_all(given)
            parts = messages.received.wait()
            done = messages.received.done()
            out[name] = (arrived(group, parts, length_of), parts[rank] is given[rank], done)
            messages.delivered.wait()
            at_least = sum(part.numel() for r, part in enumerate(given) if r != rank)
            out[name, "counted"] = at_least <= messages.sent_bytes
        same = message(rank, 99, 5000 + rank)
        parts = group.all_to_all([same] * group.size, priority=3).received.wait()
        out["same"] = [torch.equal(part, message(r, 99, 5000 + r)) for r, part in enumerate(parts)]
        told = [threading.Semaphore(0), 0]

        def tell():
            told[1] += 1
            told[0].release()

        messages = group.all_to_all(outgoing(group, LENGTHS_OF["different"]))
        received = messages.received
        out["can"] = received.add_done_callback(tell)
        if not out["can"]:
            received.wait()
            tell()
        out["told"] = (told[0].acquire(timeout=90), received.done())
        messages.delivered.wait()
        out["times"] = told[1]
    return out


def all_to_alls_and_reductions(transport):
    """All-to-alls and reductions in flight at once, on several forks, used in another order than begun."""
    out = []
    with member(transport) as (_, group):
        fork, rank = group.fork(), group.rank
        length_of = LENGTHS_OF["large"]
        for turn in range(3):
            held = group.buffer(30_000, torch.float32, CPU)
            held.fill_(rank)
            tensors = [held, torch.full((400_000,), float(rank)), torch.full((7,), float(rank))]
            begun = [group.all_reduce(tensors[0])]
            mine = group.all_to_all(outgoing(group, length_of))
            begun += [group.all_reduce(tensors[1]), fork.all_reduce(tensors[2])]
            theirs = fork.all_to_all(outgoing(fork, LENGTHS_OF["some"]), priority=-1)
            for messages, lengths in [(mine, length_of), (theirs, LENGTHS_OF["some"])][
                :: 1 - 2 * (turn % 2)
            ]:
                out.append(arrived(group, messages.received.wait(), lengths))
            for pending in begun if rank % 2 else reversed(begun):
                pending.wait()
            out += [tensor.unique().tolist() == [sum(range(group.size))] for tensor in tensors]
    return out


def told_of_reductions(transport):
    """A callback finds the result; a future without callbacks is waited for."""
    out = []
    with member(transport) as (_, group):
        for length in (10, LARGE):
            for begin in (
                group.all_reduce,
                lambda tensor: group.all_gather_unequal(tensor, _split(group.size, tensor.numel())),
                lambda tensor: group.reduce_scatter(tensor, _split(group.size, tensor.numel())),
            ):
                told = threading.Semaphore(0)
                pending = begin(torch.ones(length))
                can = pending.add_done_callback(told.release)
                out.append((can, told.acquire(timeout=90) and pending.done() if can else None))
                pending.wait()
                out.append(told.acquire(blocking=False))
    return out


def _split(size, length):
    return [length // size] * (size - 1) + [length - length // size * (size - 1)]


def leaving(transport):
    """Rank 0 has all its messages long before the others."""
    with member(transport) as (_, group):
        lengths = lambda sender, receiver: 0 if sender else 20_000_000  # noqa: E731
        parts = group.all_to_all(outgoing(group, lengths)).received.wait()
    return arrived(group, parts, lengths)


def messages_of_subgroups(transport):
    out = []
    with member(transport) as (_, group):
        for members in ([0, 2], [3, 1, 2], [1]):
            some = group.subgroup(members)
            if some is not None:
                length_of = LENGTHS_OF["different"]
                out.append(
                    arrived(some, some.all_to_all(outgoing(some, length_of)).received.wait(), length_of)
                )
            out.append(
                arrived(
                    group, group.all_to_all(outgoing(group, length_of_all)).received.wait(), length_of_all
                )
            )
    return out


def length_of_all(sender, receiver):
    return 100 * sender + receiver


def odd_messages(transport):
    said = []
    with member(transport) as (_, group):
        good = torch.zeros(3, dtype=torch.uint8)
        for given in ([good], [good, torch.zeros(3)], [good, good.view(1, 3)]):
            with pytest.raises(ConfigError) as caught:
                group.all_to_all(given)
            said.append(caught.value.message)
        spread = torch.arange(20, dtype=torch.uint8)[::2]
        said.append([part.tolist() for part in group.all_to_all([spread] * 2).received.wait()])
    return said


@every_transport
@sizes
def test_messages_of_any_length_arrive_at_every_member(warm_pool, transport, size):
    for out in warm_pool.run(size, all_to_alls, transport):
        for name in LENGTHS_OF:
            assert out[name] == (True, True, True), name
            assert out[name, "counted"], name
        assert out["same"] == [True] * size
        assert out["told"] == (True, True)
        assert out["times"] == 1, "a refused callback is never called"
        assert out["can"] or transport == "shm"


@every_transport
def test_concurrent_all_to_alls_and_reductions_stay_separate(warm_pool, transport):
    for out in warm_pool.run(3, all_to_alls_and_reductions, transport):
        assert out == [True] * 15


@every_transport
def test_a_callback_runs_once_or_is_refused(warm_pool, transport):
    for out in warm_pool.run(2, told_of_reductions, transport):
        for (can, found), again in zip(out[::2], out[1::2], strict=True):
            assert found in ((True,) if can else (None,))
            assert not again
        if transport == "tcp":
            assert all(can for can, _ in out[::2]), "the loop's thread carries them out"


@every_transport
def test_member_can_leave_as_soon_as_it_has_its_messages(warm_pool, transport):
    assert warm_pool.run(3, leaving, transport) == [True] * 3


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_a_subgroup_exchanges_messages(warm_pool, transport):
    for rank, out in enumerate(warm_pool.run(4, messages_of_subgroups, transport)):
        assert out == [True] * (3 + [1, 2, 2, 1][rank])


@every_transport
def test_a_wrong_message_is_refused_before_anything_is_sent(warm_pool, transport):
    for said in warm_pool.run(2, odd_messages, transport):
        assert said == [
            "1 messages for 2 members",
            "the message for rank 1 is of shape [3] and type float32 on cpu",
            "the message for rank 1 is of shape [1, 3] and type uint8 on cpu",
            [list(range(0, 20, 2))] * 2,
        ]


def test_all_to_all_of_a_single_member_completes_at_once():
    own = torch.ones(3, dtype=torch.uint8)
    messages, told = SoloGroup().all_to_all([own]), []
    assert messages.received.done()
    assert messages.received.add_done_callback(lambda: told.append(1))
    assert told == [1]
    assert messages.received.wait()[0] is own
    assert messages.sent_bytes == 0
    messages.delivered.wait()
    with pytest.raises(ConfigError, match="2 messages for 1 members"):
        SoloGroup().all_to_all([own, own])


@every_transport
@sizes
def test_reductions_of_every_type_are_right_in_place_on_every_member(warm_pool, transport, size):
    for rank, out in enumerate(warm_pool.run(size, reductions, transport)):
        assert out["rank"] == (rank, size)
        for dtype in DTYPES:
            for op, combine in COMBINED.items():
                for length in LENGTHS:
                    inputs = torch.stack([values(r, length, dtype) for r in range(size)])
                    expected = combine(inputs.to(torch.float64), 0).to(dtype)
                    case = (dtype, op, length)
                    for what in ("plain", "buffer", "released"):
                        assert torch.equal(out[*case, what], expected), (*case, what)
                    assert out[*case, "same"], case
                    assert not out[*case, "new"], case


@every_transport
@sizes
def test_gathers_broadcasts_and_unusual_tensors_are_right_on_every_member(warm_pool, transport, size):
    total = size * (size + 1) / 2
    for out in warm_pool.run(size, others, transport):
        for dtype, parts in zip(MOVED, out["gathered"], strict=True):
            assert [part.dtype for part in parts] == [dtype] * size
            assert all(torch.equal(part, values(r, 3, dtype)) for r, part in enumerate(parts))
        assert [part.shape for part in out["gathered 0-dim"]] == [()] * size
        assert [part.item() for part in out["gathered 0-dim"]] == list(range(size))
        assert [part.shape for part in out["gathered empty"]] == [(0, 3)] * size
        for r, part in enumerate(out["gathered turned"]):
            assert torch.equal(part, (torch.arange(6.0).view(2, 3) + r).t())
        assert out["gathered large"] == [True] * size
        assert out["gathered bytes"] == [b"x" * (r * 5) for r in range(size)]
        assert all(out["told"])
        assert torch.equal(out["turned"], torch.arange(6.0).view(2, 3) * total)
        assert out["column"].tolist() == [[1, size]] * 3
        assert out["leaf"].tolist() == [size] * 3
        assert out["nan"].isnan().tolist() == [n < size for n in range(5)]
        assert out["nan"][size:].tolist() == [size] * (5 - size)


@every_transport
@sizes
def test_concurrent_operations_and_forks_stay_separate(warm_pool, transport, size):
    for out in warm_pool.run(size, at_once, transport):
        for turn in range(3):
            for n in range(6):
                assert out[turn, n] == ([sum(r + n + turn for r in range(size))], True)
        assert out["forks"] == (size, 1, sum(range(size)))
        assert out["after a fork"] == [[size] * 3] * 2


@every_transport
def test_every_member_ends_with_identical_bits(warm_pool, transport):
    first, *rest = warm_pool.run(4, exactly, transport)
    for other in rest:
        assert other == first


@pytest.mark.parametrize(
    ("transport", "expected"),
    [
        ("shm", ("EngineGroup", True)),
        ("auto", ("EngineGroup", True)),
        ("tcp", ("EngineGroup", False)),
        ("c10d", ("C10dGroup", False)),
    ],
)
def test_requested_transport_is_used(warm_pool, transport, expected):
    assert warm_pool.run(2, kinds, transport) == [expected] * 2
