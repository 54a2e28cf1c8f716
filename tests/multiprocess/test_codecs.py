"""Encoded gradients in real training are, to the bit, those of the single-process reference.

A model whose loss is the sum of its parameters times given numbers has these numbers as its gradients, so
the workers' results can be compared with `ReferenceGroup`, which knows no processes.
"""

from __future__ import annotations

import os
import signal
import socket
import threading
from collections.abc import Mapping

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import echelon
from echelon.codec.codec import CODECS, StandIn, owners, seed_of
from echelon.codec.reference import ReferenceGroup
from echelon.comm.engine import EngineGroup
from echelon.comm.meet.place import Place
from echelon.comm.meet.rendezvous import meet
from echelon.comm.open import open_group
from echelon.errors import ConfigError, EchelonError, GradientError, PeerLost, UnknownName
from echelon.observe.events import BucketReduced, Noted, StepEnded, read_events
from echelon.observe.run_folder import RunFolder
from echelon.plan.plan import Plan, PlanRequest, make_plan
from echelon.reduce.encoded import cost, route
from echelon.reduce.encoded import encoder as coding
from echelon.reduce.encoded.encoder import ModelEncoder
from echelon.reduce.reducer import Reducer
from warm import WorkerFailure

# Options that leave something out of tensors as small as these.
GATHERED = [
    "top-k(ratio=0.05)",
    "threshold(value=0.7)",
    "dgc(ratio=0.05, momentum=0.9, clip=4, warmup=3)",
    "dgc(ratio=0.02, momentum=0.5, nesterov=true)",
    "sparse-binary(ratio=0.05)",
    "chain(first=top-k(ratio=0.1), then=fp16)",
    "chain(first=dgc(ratio=0.1), then=one-bit)",
]
SCATTERED = [
    "fp16",
    "bf16",
    "fixed(bits=4)",
    "fixed(bits=6, range=2, rounding=stochastic)",
    "ternary",
    "one-bit",
    "one-bit(per=column)",
    "dynamic-fixed(bits=6)",
    "error-feedback(fixed(bits=2))",
    "error-feedback(ternary)",
]
SUMMED = ["none", "random-k(ratio=0.1)", "random-k(ratio=0.2, feedback=false)", "power-sgd(rank=2)"]
WAYS = ["top-k(ratio=0.05)", "fp16", "power-sgd(rank=1)"]  # one for each of gather, scatter and sum
TOP = WAYS[0]

SHAPES = {"matrix": (64, 50), "vector": (70,), "scalar": (1,), "sometimes": (40, 30), "never": (5,)}
USED = ("matrix", "vector", "scalar", "sometimes")
SITES = ((0, 1), (2, 3))


class Known(nn.Module):
    """Its loss is the sum of its parameters times given numbers, which are its gradients then."""

    def __init__(self):
        super().__init__()
        for name, shape in SHAPES.items():
            self.register_parameter(name, nn.Parameter(torch.ones(shape)))

    def forward(self, given):
        return sum((getattr(self, name) * value).sum() for name, value in given.items())


def numbers(rank, step, *, without=()):
    """A worker's gradients in a step: of different sizes, in 64ths; rank 1 never has all of them."""
    draw = torch.Generator().manual_seed(100 * rank + step)
    made = {}
    for power, (name, shape) in enumerate(SHAPES.items()):
        made[name] = (torch.randn(shape, generator=draw) * 2.0 ** (6 + power)).round() / 64
    left_out = {"never", *without, *(["sometimes"] if rank == 1 else [])}
    return {name: value for name, value in made.items() if name not in left_out}


def whole(given, weight):
    """Copies of the gradients of all parameters, zeros where there is none."""
    return {
        name: torch.mul(given[name], weight) if name in given else torch.zeros(shape)
        for name, shape in SHAPES.items()
    }


def combined(together, given, weights=None):
    """The reference's result for the gradients of all workers."""
    weights = weights or [1 / len(given)] * len(given)
    return together.combine([whole(mine, weight) for mine, weight in zip(given, weights, strict=True)])


def gradients(model):
    return {name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}


def assert_same_bits(found: Mapping[str, torch.Tensor | None], wanted: Mapping[str, torch.Tensor]):
    """A parameter that no worker used has no gradient, which counts as zeros."""
    for name, value in wanted.items():
        have = found[name] if found[name] is not None else torch.zeros(SHAPES[name])
        assert torch.equal(have, value), f"{name}: {(have - value).abs().max()} away"


def assert_all_same(found, other):
    """The same bits in all steps."""
    for one, another in zip(found, other, strict=True):
        assert one.keys() == another.keys()
        for name in one:
            assert one[name] is another[name] is None or torch.equal(one[name], another[name]), name


def join(codec, **options):
    return echelon.join(**{"record": False, "codec": codec, "round_timeout_s": 90, **options})


def attempt(act):
    try:
        return act()
    except EchelonError as error:
        return error


# The reference, to the bit -----------------------------------------------------------------------


def train_with_codecs(codecs, steps, transport="tcp"):
    """Gradients of some steps, by codec: each has a model of its own."""
    with join("none", transport=transport) as session:
        found = {}
        for codec in codecs:
            model = session.prepare(Known(), codec=codec)
            found[codec] = []
            for step in range(steps):
                model.zero_grad()
                model(numbers(session.rank, step)).backward()
                found[codec].append(gradients(model))
        return found


def references(codec, workers, steps):
    together = ReferenceGroup(CODECS.build(codec), workers)
    return [combined(together, [numbers(rank, step) for rank in range(workers)]) for step in range(steps)]


@pytest.fixture(scope="module")
def by_three(warm_pool):
    """The results of three workers, with all codecs."""
    return warm_pool.run(3, train_with_codecs, GATHERED + SCATTERED + SUMMED, 5)


@pytest.fixture(scope="module")
def by_two(warm_pool):
    """The results of two workers, with the summed codecs."""
    return warm_pool.run(2, train_with_codecs, SUMMED, 4)


def test_every_registered_codec_is_covered_by_this_file():
    run = {text: CODECS.build(text) for text in GATHERED + SCATTERED + SUMMED}
    known = {CODECS.get(name) for name in CODECS.names()}
    assert {type(codec) for codec in run.values()} == {
        kind for kind in known if not issubclass(kind, StandIn)
    }
    for way, texts in {"gather": GATHERED, "scatter": SCATTERED, "sum": SUMMED}.items():
        assert {run[text].travels for text in texts} == {way}


@pytest.mark.parametrize("codec", GATHERED + SCATTERED)
def test_gradients_of_three_workers_equal_the_reference_to_the_bit(by_three, codec):
    wanted = references(codec, 3, 5)
    for found in by_three:
        assert all(one["never"] is None for one in found[codec])
        for one, reference in zip(found[codec], wanted, strict=True):
            assert_same_bits(one, reference)


@pytest.mark.parametrize("codec", SUMMED)
def test_summed_codecs_of_two_workers_equal_the_reference_to_the_bit(by_two, codec):
    """Of more workers, a ring adds in another order than the reference."""
    wanted = references(codec, 2, 4)
    for found in by_two:
        for one, reference in zip(found[codec], wanted, strict=True):
            assert_same_bits(one, reference)


@pytest.mark.parametrize("codec", SUMMED)
def test_summed_codecs_of_three_workers_agree_and_equal_the_reference_within_rounding(by_three, codec):
    wanted = references(codec, 3, 5)
    first, *others = (found[codec] for found in by_three)
    for found in others:
        assert_all_same(found, first)
    for one, reference in zip(first, wanted, strict=True):
        for name in USED:
            torch.testing.assert_close(one[name], reference[name], rtol=1e-4, atol=1e-3)


def test_encoded_gradients_over_torch_distributed_equal_the_reference(warm_pool):
    for found in warm_pool.run(2, train_with_codecs, WAYS, 3, "c10d"):
        for codec in WAYS:
            for one, reference in zip(found[codec], references(codec, 2, 3), strict=True):
                assert_same_bits(one, reference)


# The record --------------------------------------------------------------------------------------


def recorded(codec):
    """Three steps; this worker's events, and the bytes that its all-to-alls and sums have sent."""
    messages, sums = [], []
    all_to_all, all_reduce = EngineGroup.all_to_all, EngineGroup.all_reduce

    def counted_all_to_all(group, *args, **options):
        messages.append(all_to_all(group, *args, **options))
        return messages[-1]

    def counted_sum(group, tensor, *args, **options):
        if threading.current_thread().name == "echelon-codec":
            sums.append(group.sent_bytes(tensor))
        return all_reduce(group, tensor, *args, **options)

    EngineGroup.all_to_all, EngineGroup.all_reduce = counted_all_to_all, counted_sum
    try:
        with join(codec, transport="tcp", record=True, name="bytes") as session:
            model = Known()
            model, optimizer = session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
            for step in range(3):
                optimizer.zero_grad()
                model(numbers(session.rank, step)).backward()
                optimizer.step()
    finally:
        EngineGroup.all_to_all, EngineGroup.all_reduce = all_to_all, all_reduce
    events = list(read_events(session.folder.events_of(session.rank)))
    counted = sum(one.sent_bytes for one in messages) + sum(sums)
    return counted, [event for event in events if isinstance(event, BucketReduced | StepEnded)]


@pytest.mark.parametrize("codec", [WAYS[0], "fixed(bits=6)", WAYS[2]])
def test_events_record_the_codec_and_the_sent_bytes(warm_pool, codec):
    dense = 4 * sum(torch.Size(shape).numel() for shape in SHAPES.values())
    for counted, events in warm_pool.run(3, recorded, codec):
        buckets = [event for event in events if isinstance(event, BucketReduced)]
        steps = [event for event in events if isinstance(event, StepEnded)]
        assert len(steps) == 3
        assert {event.how for event in buckets} == {CODECS.build(codec).name}
        assert {event.size_bytes for event in buckets} == {dense}
        assert sum(event.sent_bytes for event in buckets) == counted
        assert [event.sent_bytes for event in steps] == [event.sent_bytes for event in buckets]
        assert all(0 < event.sent_bytes < dense / 2 for event in buckets), "a ring sends 4/3 of it"
        for event in buckets:
            assert event.start < event.begun <= event.ended
            assert event.encode_s > 0


# Gradients that are not finite -------------------------------------------------------------------


def train_with_bad_gradients(cases):
    """For each case, some gradients of step 1 are not finite; returns errors and later gradients."""
    with join(None, transport="tcp") as session:
        return [_train_with_bad_gradient(session, *case) for case in cases]


def _train_with_bad_gradient(session, codec, where, overlap):
    model = Known()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    model, optimizer = session.prepare(model, optimizer, overlap=overlap, codec=codec)
    said, kept, found = [], [], []
    for step in range(4):
        optimizer.zero_grad()
        given = numbers(session.rank, step)
        for rank, name, value in where:
            if step == 1 and rank == session.rank:
                given[name].view(-1)[-1] = value
        before = {name: p.detach().clone() for name, p in model.named_parameters()}
        said.append(attempt(lambda given=given: _one_step(session, model, optimizer, given)))
        if step == 1:
            kept = [torch.equal(p, before[name]) for name, p in model.named_parameters()]
        else:
            found.append(gradients(model))
    return said, kept, found


def _one_step(session, model, optimizer, given):
    model(given).backward()
    optimizer.step()
    session._synchronizer.settle()


def assert_bad_gradient_rejected(outcomes, name, rank):
    for said, kept, found in outcomes:
        assert [error is None for error in said] == [True, False, True, True]
        assert type(said[1]) is GradientError
        assert said[1].ranks == (rank,)
        assert f"the gradient of {name} on rank {rank}" in said[1].message
        assert all(kept), "no weight has changed"
        assert_all_same(found, outcomes[0][2])
        assert all(value is None or value.isfinite().all() for one in found for value in one.values())


NAN, INFINITY = float("nan"), float("inf")
BAD = [  # (codec, where, overlap), and the parameter and rank that errors name
    *(((codec, [(1, "vector", NAN)], "backward"), "vector", 1) for codec in WAYS),
    (("random-k(ratio=0.1)", [(2, "scalar", -INFINITY)], "backward"), "scalar", 2),
    (("dynamic-fixed(bits=6)", [(1, "vector", NAN)], "backward"), "vector", 1),
    *(
        ((codec, [(2, "scalar", NAN), (1, "matrix", INFINITY)], "backward"), "matrix", 1)
        for codec in (TOP, "one-bit", "random-k")
    ),
    *(((codec, [(0, "matrix", NAN)], "step"), "matrix", 0) for codec in WAYS),
]


def test_all_workers_name_a_non_finite_gradient_and_training_continues(warm_pool):
    outcomes = warm_pool.run(3, train_with_bad_gradients, [case for case, _, _ in BAD])
    for at, (_, name, rank) in enumerate(BAD):
        assert_bad_gradient_rejected([outcome[at] for outcome in outcomes], name, rank)


# Uncommon uses -----------------------------------------------------------------------------------

FIRST, SECOND, THIRD = range(3)


def uncommon():
    """The gradients of all uses, by use, codec and options; each has a model of its own."""
    with join("none", transport="tcp") as session:
        return {
            (use, codec, *options): _used(session, USES[use], codec, dict([options] if options else []))
            for use, codec, *options in CASES
        }


def _used(session, use, codec, options):
    model = session.prepare(Known(), codec=codec, **options)

    def backward(step, **less):
        model(numbers(session.rank, step, **less)).backward()

    session.weigh(1.0)
    return use(session, model, backward)


def _twice(session, model, backward):
    """The second pass uses less than the first, and one worker less than the other."""
    backward(FIRST)
    first = gradients(model)
    backward(SECOND, without=["vector"] + ["scalar"] * session.rank)
    return first, gradients(model)


def _kept_zeros(session, model, backward):
    backward(FIRST)
    model.zero_grad(set_to_none=False)
    backward(SECOND)
    return gradients(model)


def _accumulated(session, model, backward):
    with session.accumulate():
        backward(FIRST)
        backward(SECOND)
    backward(THIRD)
    return gradients(model)


def _accumulated_on_top(session, model, backward):
    backward(FIRST)
    with session.accumulate():
        backward(SECOND, without=["vector"])
    backward(THIRD, without=["scalar"])
    return gradients(model)


def _given_up(session, model, backward):
    """Gradients are cleared after another backward pass was added to them."""
    backward(FIRST)
    with session.accumulate():
        backward(SECOND)
    torch.autograd.grad(model(numbers(session.rank, SECOND)), model.matrix)
    model.zero_grad()
    backward(THIRD, without=["vector"])
    return gradients(model)


def _clipped(session, model, backward):
    backward(FIRST)
    for p in model.parameters():
        if p.grad is not None:
            p.grad.mul_(0.25)
    backward(SECOND)
    return gradients(model)


def _weighed(session, model, backward):
    session.weigh([3.0, 1.0][session.rank])
    backward(FIRST)
    return gradients(model)


def _weighed_on_top(session, model, backward):
    """Worker weights change between accumulated backward passes."""
    backward(FIRST)
    with session.accumulate():
        backward(SECOND, without=["vector"])
    session.weigh([3.0, 1.0][session.rank])
    backward(THIRD)
    return gradients(model)


def _refrozen(session, model, backward):
    """Buckets change between accumulated backward passes."""
    backward(FIRST)
    model.scalar.requires_grad_(False)
    backward(SECOND, without=["scalar"] + ["vector"] * session.rank)
    return gradients(model)


def _plain(session, model, backward):
    backward(FIRST)
    return gradients(model)


USES = {
    "twice": _twice,
    "kept zeros": _kept_zeros,
    "accumulated": _accumulated,
    "accumulated on top": _accumulated_on_top,
    "given up": _given_up,
    "clipped": _clipped,
    "weighed": _weighed,
    "weighed on top": _weighed_on_top,
    "refrozen": _refrozen,
    "plain": _plain,
}
LATE, NOW, SUMS = ("overlap", "step"), ("overlap", "backward"), ("loss", "sum")
CASES = [
    *(
        (use, codec, *overlap)
        for use in ("twice", "accumulated", "accumulated on top")
        for codec in WAYS
        for overlap in (LATE, NOW)
    ),
    *((use, codec) for use in ("kept zeros", "weighed") for codec in WAYS),
    *(("plain", codec, *SUMS) for codec in WAYS),
    *((use, TOP) for use in ("given up", "clipped", "weighed on top", "refrozen")),
]


@pytest.fixture(scope="module")
def uses(warm_pool):
    """The results of both workers, by case."""
    one, other = warm_pool.run(2, uncommon)
    return {case: (one[case], other[case]) for case in one}


def pair(step, **less):
    return [numbers(rank, step, **less) for rank in range(2)]


def added(*parts):
    """Gradients of one worker added up."""
    names = {name for part in parts for name in part}
    return {name: sum(part[name] for part in parts if name in part) for name in names}


def plus(one, other):
    return {name: one[name] + other[name] for name in SHAPES}


each_way = pytest.mark.parametrize("codec", WAYS)
late_or_not = pytest.mark.parametrize("overlap", [NOW, LATE], ids=["now", "late"])


def assert_added(found, wanted):
    """Both workers have the same bits, and equal the wanted gradients within rounding."""
    one, other = found
    assert_all_same([one], [other])
    for name in USED:
        torch.testing.assert_close(one[name], wanted[name], rtol=1e-3, atol=1e-5)


@each_way
@late_or_not
def test_second_backward_pass_adds_to_reduced_gradients(uses, codec, overlap):
    together = ReferenceGroup(CODECS.build(codec), 2)
    first = combined(together, pair(FIRST))
    second = [numbers(rank, SECOND, without=["vector"] + ["scalar"] * rank) for rank in range(2)]
    both = plus(combined(together, second), first)
    found = uses["twice", codec, *overlap]
    for once, _ in found:
        assert_same_bits(once, first)
    assert_added([twice for _, twice in found], both)


@each_way
def test_gradients_zeroed_in_place_equal_gradients_set_to_none(uses, codec):
    together = ReferenceGroup(CODECS.build(codec), 2)
    combined(together, pair(FIRST))
    wanted = combined(together, pair(SECOND))
    for found in uses["kept zeros", codec]:
        assert_same_bits(found, wanted)


@each_way
@late_or_not
def test_accumulated_backward_passes_are_encoded_once(uses, codec, overlap):
    parts = [pair(step) for step in (FIRST, SECOND, THIRD)]
    together = ReferenceGroup(CODECS.build(codec), 2)
    wanted = combined(together, [added(*mine) for mine in zip(*parts, strict=True)])
    for found in uses["accumulated", codec, *overlap]:
        assert_same_bits(found, wanted)


@each_way
@late_or_not
def test_accumulated_backward_passes_are_added_to_reduced_gradients(uses, codec, overlap):
    together = ReferenceGroup(CODECS.build(codec), 2)
    first = combined(together, pair(FIRST))
    parts = pair(SECOND, without=["vector"]), pair(THIRD, without=["scalar"])
    wanted = plus(combined(together, [added(*mine) for mine in zip(*parts, strict=True)]), first)
    assert_added(uses["accumulated on top", codec, *overlap], wanted)


def test_cleared_gradients_do_not_return_after_another_backward_pass(uses):
    together = ReferenceGroup(CODECS.build(TOP), 2)
    combined(together, pair(FIRST))
    wanted = combined(together, pair(THIRD, without=["vector"]))
    for found in uses["given up", TOP]:
        assert_same_bits(found, wanted)


def test_clipped_gradients_stay_clipped_after_another_backward_pass(uses):
    together = ReferenceGroup(CODECS.build(TOP), 2)
    first = {name: value * 0.25 for name, value in combined(together, pair(FIRST)).items()}
    wanted = plus(combined(together, pair(SECOND)), first)
    for found in uses["clipped", TOP]:
        assert_same_bits(found, wanted)


def test_reduced_gradients_remain_when_buckets_change_before_another_backward_pass(uses):
    together = ReferenceGroup(CODECS.build(TOP), 2)
    first = combined(together, pair(FIRST))
    second = [
        whole(numbers(rank, SECOND, without=["scalar"] + ["vector"] * rank), 0.5) for rank in range(2)
    ]
    for mine in second:
        del mine["scalar"]
    wanted = plus(first, together.combine(second) | {"scalar": torch.zeros(1)})
    for found in uses["refrozen", TOP]:
        assert_same_bits(found, wanted)


@each_way
def test_gradients_are_scaled_by_the_workers_weight_before_encoding(uses, codec):
    wanted = combined(ReferenceGroup(CODECS.build(codec), 2), pair(FIRST), [0.75, 0.25])
    for found in uses["weighed", codec]:
        assert_same_bits(found, wanted)


def test_worker_weights_changed_between_backward_passes_do_not_rescale_reduced_gradients(uses):
    together = ReferenceGroup(CODECS.build(TOP), 2)
    first = combined(together, pair(FIRST))
    both = zip(pair(SECOND, without=["vector"]), pair(THIRD), [0.75, 0.25], strict=True)
    given = [added(whole(one, 0.5), whole(other, weight)) for one, other, weight in both]
    wanted = plus(combined(together, given, [1.0, 1.0]), first)
    assert_added(uses["weighed on top", TOP], wanted)


@each_way
def test_gradients_of_a_summed_loss_are_added_without_averaging(uses, codec):
    wanted = combined(ReferenceGroup(CODECS.build(codec), 2), pair(FIRST), [1.0, 1.0])
    for found in uses["plain", codec, *SUMS]:
        assert_same_bits(found, wanted)


def stepping():
    """Weights after some steps, by codec, without and with deferred steps."""
    with join("none", transport="tcp") as session:
        return {(codec, late): _steps(session, codec, late) for codec in WAYS for late in (NOW[1], LATE[1])}


def _steps(session, codec, overlap):
    torch.manual_seed(session.rank)
    model = nn.Sequential(nn.Linear(20, 60), nn.Tanh(), nn.Linear(60, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
    model, optimizer = session.prepare(model, optimizer, overlap=overlap, codec=codec)
    for _ in range(6):
        optimizer.zero_grad()
        model(torch.randn(8, 20)).square().mean().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        optimizer.step()
    return [p.detach().clone() for p in model.parameters()]


def test_deferred_steps_equal_immediate_steps_to_the_bit(warm_pool):
    outcomes = warm_pool.run(2, stepping)
    for weights in outcomes:
        for (codec, _), found in weights.items():
            now = outcomes[0][codec, NOW[1]]
            assert all(torch.equal(one, other) for one, other in zip(found, now, strict=True)), codec


# Checkpoints -------------------------------------------------------------------------------------


def states_of(session):
    return [coding.states.save() for coding in session._synchronizer._encoding._encoders if coding]


def stopping(codec, folder, steps, save_after, load=False):
    """Take steps and save after one, or resume; returns gradients of each step, states and weights."""
    with join(codec, transport="tcp", record=load, name="resume") as session:
        model = Known()
        model, optimizer = session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.5))
        if load:
            session.load(folder)
        begun, found, saved = states_of(session), [], []
        for step in range(session.step, steps):
            optimizer.zero_grad()
            model(numbers(session.rank, step)).backward()
            found.append(gradients(model))
            optimizer.step()
            if step + 1 == save_after:
                session.save(folder)
                saved = states_of(session)
    told = []
    if load:
        events = read_events(session.folder.events_of(session.rank))
        told = [event.text for event in events if isinstance(event, Noted)]
    weights = {name: p.detach().clone() for name, p in model.named_parameters()}
    return {"begun": begun, "saved": saved, "found": found, "weights": weights, "told": told}


STATEFUL = [
    "dgc(ratio=0.05, warmup=3)",
    "one-bit",
    "power-sgd(rank=1)",
    "dynamic-fixed(bits=6)",
    TOP,
]


def train_and_resume(folder, load):
    """Six steps, saved after three; or the last three of them. Gradients of the last three, and weights."""
    with join("none", transport="tcp") as session:
        models, optimizers = [], []
        for codec in STATEFUL:
            model = Known()
            optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
            session.prepare(model, optimizer, codec=codec)
            models.append(model)
            optimizers.append(optimizer)
        if load:
            session.load(folder)
        found = []
        for step in range(3 * load, 6):
            for model, optimizer in zip(models, optimizers, strict=True):
                optimizer.zero_grad()
                model(numbers(session.rank, step)).backward()
                optimizer.step()
            if step == 2:
                session.save(folder)
            if step > 2:
                found += [gradients(model) for model in models]
        return found + [{name: p.detach().clone() for name, p in m.named_parameters()} for m in models]


def test_resumed_run_equals_an_uninterrupted_run_to_the_bit(warm_pool, tmp_path):
    straight = warm_pool.run(2, train_and_resume, tmp_path, False)
    resumed = warm_pool.run(2, train_and_resume, tmp_path, True)
    for one, other in zip(straight, resumed, strict=True):
        assert len(one) == 4 * len(STATEFUL)
        assert_all_same(one, other)


def residuals(outcomes, when, key="residual"):
    """The sum of all workers' residuals, by parameter."""
    return {
        name: sum(outcome[when][0][name][key].double() for outcome in outcomes if name in outcome[when][0])
        for name in SHAPES
    }


@pytest.fixture(scope="module")
def saved(warm_pool, tmp_path_factory):
    """A checkpoint of three workers, and their residuals."""
    folder = tmp_path_factory.mktemp("saved")
    return folder, warm_pool.run(3, stopping, TOP, folder, 3, 3)


@pytest.mark.parametrize("workers", [2, 4])
def test_resumed_run_with_another_worker_count_keeps_all_residuals(warm_pool, saved, workers):
    folder, before = saved
    after = warm_pool.run(workers, stopping, TOP, folder, 4, 0, True)
    wanted, found = residuals(before, "saved"), residuals(after, "begun")
    assert set(wanted) == set(found) == set(SHAPES)
    for name in SHAPES:
        torch.testing.assert_close(found[name], wanted[name], rtol=1e-5, atol=1e-5)
    assert any(value.any() for value in wanted.values())
    for outcome in after:
        assert len(outcome["found"]) == 1


@pytest.mark.parametrize(("workers", "codec"), [(2, "one-bit"), (2, "none"), (1, TOP)])
def test_resumed_run_reports_residuals_that_another_codec_cannot_use(warm_pool, saved, workers, codec):
    folder, _ = saved
    first, *_ = warm_pool.run(workers, stopping, codec, folder, 4, 0, True)
    assert [text for text in first["told"] if "lost" in text] == [
        f"the checkpoint was written with codec {TOP}: its residuals are lost"
    ]
    assert len(first["found"]) == 1
    assert all(state == {} for state in first["begun"])


def test_residuals_are_kept_when_the_same_codec_is_spelled_differently(warm_pool, saved):
    folder, before = saved
    after = warm_pool.run(3, stopping, "top-k(0.05, feedback=true)", folder, 4, 0, True)
    for one, other in zip(before, after, strict=True):
        assert torch.equal(other["begun"][0]["matrix"]["residual"], one["saved"][0]["matrix"]["residual"])
        assert not any("lost" in text for text in other["told"])


def test_resumed_run_with_other_sites_moves_all_residuals_to_the_rails_that_send_them(warm_pool, tmp_path):
    """Two sites with one rail become two with two."""
    by_sites, three = f"between({TOP})", ((0, 1), (2,))
    before = at_sites(warm_pool, tmp_path / "a", by_sites, three, stopping, None, tmp_path, 3, 3)
    after = at_sites(warm_pool, tmp_path / "b", by_sites, SITES, stopping, None, tmp_path, 4, 0, True)
    wanted, found = residuals(before, "saved"), residuals(after, "begun")
    assert any(value.any() for value in wanted.values())
    for name in SHAPES:
        torch.testing.assert_close(found[name], wanted[name], rtol=1e-5, atol=1e-5)
    for site in SITES:
        for rail, rank in enumerate(site):
            for name, shape in SHAPES.items():
                length = torch.Size(shape).numel()
                residual = after[rank]["begun"][0][name]["residual"].clone()
                residual[slice(*owners(length, 2, seed_of(name))[rail])] = 0
                assert not residual.any(), "of other rails' pieces it has nothing"


# Between sites -----------------------------------------------------------------------------------


def at_sites(pool, folder, codec, sites, work, *args):
    """Run in warm workers whose plan has these groups."""
    workers = sum(len(site) for site in sites)
    folder = RunFolder(folder).with_subfolders()
    asked = PlanRequest(codec=codec, groups=sites, transport="tcp", round_timeout_s=90)
    folder.plan.write_text(make_plan("test", ["here"] * workers, asked, cores=1).to_toml())
    return pool.run(workers, work, *args, env={"ECHELON_RUN": str(folder.path)})


def by_plan(codecs, steps):
    """Gradients of some steps and states after them, by codec between sites."""
    with join(None, transport=None) as session:
        outcome = {}
        for codec in codecs:
            model = session.prepare(Known(), codec=f"between({codec})")
            found = []
            for step in range(steps):
                model.zero_grad()
                model(numbers(session.rank, step)).backward()
                found.append(gradients(model))
            outcome[codec] = found, states_of(session)[-1]
        return outcome


def between_reference(codec, sites, steps):
    """Each rail's parts of all parameters, by a reference of its own, of the sums of sites."""
    workers = sum(len(site) for site in sites)
    rails = min(len(site) for site in sites)
    together = [ReferenceGroup(CODECS.build(codec), len(sites)) for _ in range(rails)]
    out = []
    for step in range(steps):
        inside = [[whole(numbers(rank, step), 1 / workers) for rank in site] for site in sites]
        sums = [{name: sum(mine[name] for mine in site).view(-1) for name in SHAPES} for site in inside]
        found = {name: torch.zeros(torch.Size(shape).numel()) for name, shape in SHAPES.items()}
        for rail in range(rails):
            spans = {name: owners(len(found[name]), rails, seed_of(name))[rail] for name in SHAPES}
            spans = {name: span for name, span in spans.items() if span[0] < span[1]}
            parts = [{name: site[name][slice(*span)] for name, span in spans.items()} for site in sums]
            for name, total in together[rail].combine(parts).items():
                found[name][slice(*spans[name])] = total
        out.append({name: value.view(SHAPES[name]) for name, value in found.items()})
    return out


EXACT_BETWEEN = [TOP, "fp16", "dgc(ratio=0.05)"]
KEPT_BETWEEN = [TOP, "random-k(ratio=0.1)", "one-bit"]


@pytest.fixture(scope="module")
def at_two_sites(warm_pool, tmp_path_factory):
    """The results of four workers at two sites."""
    codecs = list(dict.fromkeys(EXACT_BETWEEN + KEPT_BETWEEN))
    return at_sites(warm_pool, tmp_path_factory.mktemp("sites"), "none", SITES, by_plan, codecs, 4)


@pytest.mark.parametrize("codec", EXACT_BETWEEN)
def test_encoded_sums_between_sites_equal_the_reference_to_the_bit(at_two_sites, codec):
    wanted = between_reference(codec, SITES, 4)
    for outcome in at_two_sites:
        for one, reference in zip(outcome[codec][0], wanted, strict=True):
            assert_same_bits(one, reference)


def assert_conserved(outcomes, steps):
    """All end with the same bits; decoded values plus residuals are the inputs."""
    first = outcomes[0][0]
    for found, _ in outcomes:
        assert_all_same(found, first)
    workers = len(outcomes)
    for name in USED:
        given = sum(
            whole(numbers(rank, step), 1 / workers)[name].double()
            for rank in range(workers)
            for step in range(steps)
        )
        read = sum(one[name].double() for one in first if one[name] is not None)
        left = sum(state[name]["residual"].double() for _, state in outcomes if name in state)
        torch.testing.assert_close(read + left.view(SHAPES[name]), given, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("codec", KEPT_BETWEEN)
def test_results_plus_residuals_between_sites_equal_the_inputs(at_two_sites, codec):
    assert_conserved([outcome[codec] for outcome in at_two_sites], 4)


def test_results_plus_residuals_equal_the_inputs_for_sites_of_three_and_one(warm_pool, tmp_path):
    outcomes = at_sites(warm_pool, tmp_path, "none", ((1, 0, 3), (2,)), by_plan, [TOP], 4)
    assert_conserved([outcome[TOP] for outcome in outcomes], 4)


class Silent:
    """Observes nothing."""

    def computing(self): ...
    def arrived(self): ...
    def bucket(self, times): ...
    def reduced(self, sent_bytes): ...


def in_threads(workers, act):
    """Run workers as threads with real connections; returns the result of each."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    outcomes = [None] * workers

    def work(rank):
        place = Place(rank=rank, world_size=workers, address="127.0.0.1", port=port)
        rendezvous = meet(place, node="here", host="here", pid=os.getpid(), timeout_s=90)
        group = open_group(
            rendezvous, place, transport="tcp", collective="auto", deadline_s=90, timeout_s=90
        )
        try:
            outcomes[rank] = act(group)
        finally:
            rendezvous.announce_departure("")
            group.close()
            rendezvous.linger()

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(workers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return outcomes


@pytest.mark.parametrize("codec", ["top-k(ratio=0.05)", "random-k(ratio=0.1)"])
def test_results_plus_residuals_equal_the_inputs_for_sites_of_three_and_two(codec):
    """There are two rails; the third worker of the larger site only sums and receives."""
    sites = ((0, 1, 2), (3, 4))

    def act(group):
        coding = ModelEncoder(
            CODECS.build(codec),
            route.by_site(group, sites),
            rank=group.rank,
            names=group.names,
        )
        model = Known()
        reducer = Reducer(
            list(model.named_parameters()), group.fork(), lambda: 1 / group.size, Silent(), encoder=coding
        )
        found = []
        for step in range(3):
            model.zero_grad()
            model(numbers(group.rank, step)).backward()
            found.append(gradients(model))
        reducer.detach()
        coding.close()
        coding.join()
        return found, coding.states.save()

    outcomes = in_threads(5, act)
    assert_conserved(outcomes, 3)
    assert outcomes[2][1] == {}, "it is no rail"


def test_all_sites_name_a_non_finite_gradient(warm_pool, tmp_path):
    codecs = [TOP, "fp16", "random-k(ratio=0.1)"]
    cases = [(f"between({codec})", [(2, "vector", INFINITY)], "backward") for codec in codecs]
    outcomes = at_sites(warm_pool, tmp_path, "none", SITES, train_with_bad_gradients, cases)
    for at in range(len(cases)):
        assert_bad_gradient_rejected([outcome[at] for outcome in outcomes], "vector", 2)


# Other buckets -----------------------------------------------------------------------------------


def thawing():
    """The matrix is frozen for two steps in the middle."""
    with join("top-k(ratio=0.05)", transport="tcp") as session:
        model = Known()
        loader = DataLoader(TensorDataset(torch.zeros(2)), batch_size=2)
        model, loader = session.prepare(model, loader)
        found = []
        for step in range(6):
            model.matrix.requires_grad_(step not in (2, 3))
            for _ in loader:
                model.zero_grad()
                model(numbers(session.rank, step)).backward()
            found.append(gradients(model))
        return found


def test_a_frozen_layers_residual_is_sent_when_it_is_unfrozen(warm_pool):
    together = ReferenceGroup(CODECS.build("top-k(ratio=0.05)"), 2)
    wanted = []
    for step in range(6):
        given = [whole(mine, 0.5) for mine in pair(step)]
        if step in (2, 3):
            given = [{name: value for name, value in mine.items() if name != "matrix"} for mine in given]
        wanted.append(together.combine(given))
    for found in warm_pool.run(2, thawing):
        assert found[2]["matrix"] is None
        for one, reference in zip(found, wanted, strict=True):
            assert_same_bits(one, reference)


def in_small_buckets(what, *args):
    """Run a function with a bucket for nearly every parameter; returns its result and the bucket count."""
    least, coding.LEAST_BYTES = coding.LEAST_BYTES, 1
    make, made = ModelEncoder.bucket, []

    def bucket(self, parameters):
        made.append(parameters)
        return make(self, parameters)

    ModelEncoder.bucket = bucket
    try:
        return globals()[what](*args), len(made)
    finally:
        coding.LEAST_BYTES, ModelEncoder.bucket = least, make


def test_results_do_not_depend_on_bucket_sizes(warm_pool, by_three):
    codecs = GATHERED + SCATTERED
    for found, buckets in warm_pool.run(3, in_small_buckets, "train_with_codecs", codecs, 5):
        assert buckets >= 3 * len(codecs)
        for codec in codecs:
            assert_all_same(found[codec], by_three[0][codec])


def test_non_finite_gradient_in_one_bucket_rejects_all_buckets_of_the_step(warm_pool):
    bad = [one for one in BAD if one[0][2] == "backward" and len(one[0][1]) == 1]
    outcomes = warm_pool.run(3, in_small_buckets, "train_with_bad_gradients", [case for case, _, _ in bad])
    for at, (_, name, rank) in enumerate(bad):
        assert_bad_gradient_rejected([found[at] for found, _ in outcomes], name, rank)


class Mixed(nn.Module):
    """Has parameters that cannot be encoded: of other types, or without elements."""

    def __init__(self):
        super().__init__()
        self.short = nn.Parameter(torch.ones(8, dtype=torch.bfloat16))
        self.single = nn.Parameter(torch.ones(300))
        self.long = nn.Parameter(torch.ones(300, dtype=torch.float64))
        self.empty = nn.Parameter(torch.ones(0, 3))

    def forward(self, number):
        return sum(
            (p.double().flatten() * number * torch.arange(p.numel())).sum() for p in self.parameters()
        )


def mixed():
    with join("top-k(ratio=0.01)") as session:
        model = session.prepare(Mixed())
        model(session.rank + 1.0).backward()
        vectors = session.prepare(nn.Linear(3, 1), codec="power-sgd")  # too small for factors
        vectors(torch.full((1, 3), session.rank + 1.0)).sum().backward()
        return {**gradients(model), "vectors": vectors.weight.grad.clone()}


def test_parameters_that_cannot_be_encoded_are_reduced_unencoded(warm_pool):
    for found in warm_pool.run(2, mixed):
        assert found["long"].equal(1.5 * torch.arange(300, dtype=torch.float64))
        assert found["short"].equal((1.5 * torch.arange(8)).bfloat16())
        assert found["empty"].shape == (0, 3)
        assert found["single"].nonzero().flatten().tolist() == [297, 298, 299]
        assert found["vectors"].tolist() == [[1.5] * 3]


# Alone -------------------------------------------------------------------------------------------


def alone(codec, momentum=0.0, nesterov=False):
    with join(codec) as session:
        model = Known()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=momentum, nesterov=nesterov)
        model, optimizer = session.prepare(model, optimizer)
        found = []
        for step in range(4):
            optimizer.zero_grad()
            model(numbers(0, step)).backward()
            found.append(gradients(model))
            optimizer.step()
        return found, [p.detach().clone() for p in model.parameters()]


@pytest.mark.parametrize("nesterov", [False, True])
def test_dgc_on_a_single_worker_equals_momentum_sgd_to_the_bit(nesterov):
    _, plain = alone("none", 0.75, nesterov)
    _, by_codec = alone(f"dgc(ratio=1, momentum=0.75, nesterov={str(nesterov).lower()})")
    assert all(torch.equal(one, other) for one, other in zip(plain, by_codec, strict=True))


@pytest.mark.parametrize("codec", ["top-k", "one-bit", "power-sgd", "between(top-k)", "auto"])
def test_codecs_without_momentum_change_nothing_on_a_single_worker(codec):
    found, weights = alone(codec)
    for step, one in enumerate(found):
        assert_same_bits(one, whole(numbers(0, step), 1.0))
    assert len(weights) == len(SHAPES)


# Refused options ---------------------------------------------------------------------------------


def refused(codec, options, prepared):
    """The error of a script; connected workers stay connected after it."""

    def act():
        with join(codec, **options) as session:
            model = Known()
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=prepared.pop("momentum", 0.0))
            error = attempt(lambda: session.prepare(model, optimizer, **prepared))
            session.barrier()
            return error

    return attempt(act)


def test_unknown_codec_is_refused_with_the_nearest_name():
    for error in (refused("topk", {}, {}), refused("none", {}, {"codec": "topk"})):
        assert type(error) is UnknownName
        assert "top-k" in str(error)


@pytest.mark.parametrize(
    ("codec", "said"),
    [
        ("top-k(ratio=0)", "ratio is 0"),
        ("top-k(ratio=1.5)", "ratio is 1.5"),
        ("dgc(ratio=-1)", "ratio is -1"),
        ("fixed(bits=17)", "17 bits"),
        ("fixed(bits=0)", "0 bits"),
        ("dynamic-fixed(bits=1)", "1 bits"),
        ("between(auto)", "cannot be used inside between"),
        ("between(power-sgd)", "writes whole parameters"),
        ("error-feedback(top-k)", "has feedback already"),
    ],
)
def test_invalid_codec_options_are_refused(codec, said):
    for error in (refused(codec, {}, {}), refused("none", {}, {"codec": codec})):
        assert type(error) is ConfigError
        assert said in error.message
        assert error.fix


@pytest.mark.parametrize(
    ("codec", "prepared", "said"),
    [
        ("dgc", {"momentum": 0.9}, "momentum would be applied twice: 0.9 in codec dgc, 0.9 in SGD"),
        ("chain(first=dgc)", {"momentum": 0.5}, "momentum would be applied twice"),
        ("between(dgc)", {"momentum": 0.9}, "momentum would be applied twice"),
        ("dgc", {"factors": "always"}, "a gradient is sent either as factors or by codec dgc, not both"),
    ],
)
def test_conflicting_options_are_refused_on_a_single_worker(codec, prepared, said):
    for error in (refused(codec, {}, dict(prepared)), refused("none", {}, {"codec": codec, **prepared})):
        assert type(error) is ConfigError
        assert said in error.message
        assert error.fix


@pytest.mark.parametrize(
    ("codec", "options", "prepared", "said"),
    [
        (
            TOP,
            {},
            {"factors": "always"},
            "a gradient is sent either as factors or by codec top-k, not both",
        ),
        (f"between({TOP})", {}, {}, "codec between(...) needs two sites or more"),
        (TOP, {"sync": "local"}, {}, "codec top-k writes gradients, and sync local averages weights"),
    ],
)
def test_conflicting_options_are_refused_on_all_workers(warm_pool, codec, options, prepared, said):
    for error in warm_pool.run(2, refused, codec, options, prepared):
        assert type(error) is ConfigError
        assert said in error.message
        assert error.fix


def test_codec_between_sites_is_refused_on_torch_distributed(warm_pool, tmp_path):
    outcomes = at_sites(
        warm_pool, tmp_path, f"between({TOP})", ((0,), (1,)), refused, None, {"transport": "c10d"}, {}
    )
    for error in outcomes:
        assert type(error) is ConfigError
        assert "not on torch.distributed" in error.message


# Killed workers, and codec auto on one machine ---------------------------------------------------


def killed(codec, who):
    """One worker is killed when it has begun an exchange of the second round."""
    all_to_all = EngineGroup.all_to_all
    begun = []

    def send_and_die(group, *args, **options):
        begun.append(all_to_all(group, *args, **options))
        if len(begun) == deadly:
            os.kill(os.getpid(), signal.SIGKILL)
        return begun[-1]

    with join(codec, transport="tcp", round_timeout_s=90) as session:
        deadly = 2 if session.rank == who else 0
        model = session.prepare(Known())
        if deadly:
            EngineGroup.all_to_all = send_and_die
        try:
            return attempt(lambda: [model(numbers(session.rank, step)).backward() for step in range(5)])
        finally:
            EngineGroup.all_to_all = all_to_all


def test_survivors_name_a_worker_killed_during_an_encoded_all_to_all(warm_pool):
    who = 1
    outcomes = warm_pool.outcomes(3, killed, "one-bit", who)
    dead = outcomes.pop(who)
    assert isinstance(dead, WorkerFailure)
    assert dead.how == "died"
    for error in outcomes:
        assert type(error) is PeerLost
        assert error.ranks == (who,)


def automatic():
    def never(codec):
        raise AssertionError("nothing is measured")

    measure, cost.measure = cost.measure, never
    try:
        with join("auto", record=True, name="auto") as session:
            model = session.prepare(Known())
            model(numbers(session.rank, 0)).backward()
            found = gradients(model)
        plan = Plan.read(session.folder.plan)
        return found, plan.reasons.get("codec", "")
    finally:
        cost.measure = measure


def test_auto_chooses_none_on_one_machine_without_measuring(warm_pool):
    wanted = combined(ReferenceGroup(CODECS.build("none"), 2), pair(0))
    for found, reason in warm_pool.run(2, automatic):
        assert_same_bits(found, wanted)
        assert reason == "none: no links between machines were measured"
