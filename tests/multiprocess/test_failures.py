"""When a worker fails, leaves, stops or never joins, the others name it and the reason."""

from __future__ import annotations

import contextlib
import os
import socket

import pytest
import torch
from torch import nn

import echelon
from echelon.errors import ConfigError, JoinTimeout, ModelError, PeerLost, RoundTimeout
from warm import WorkerFailure, wait_for

TRANSPORTS = ["auto", "c10d"]
ROUND_S = 8
kept = []


def train(session, steps, before_step):
    model = nn.Linear(3, 1)
    model, optimizer = session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for step in range(steps):
        before_step(step)
        optimizer.zero_grad()
        model(torch.ones(2, 3)).mean().backward()
        optimizer.step()
    return session.step


def raise_on(who, transport):
    with echelon.join(record=False, transport=transport, round_timeout_s=90) as session:

        def before_step(step):
            if step == 3 and session.rank == who:
                raise ValueError("sample 17 is broken\nand this is the long story")

        return train(session, 6, before_step)


def leave_early(who, transport):
    with echelon.join(record=False, transport=transport, round_timeout_s=90) as session:
        kept[:] = [session]  # as a script's own variable would be, when its loop is over
        return train(session, 3 if session.rank == who else 6, lambda step: None)


def stop_arriving(who, transport):
    """The straggler continues, and the others leave, only after all others have raised their error."""
    with echelon.join(record=False, transport=transport, round_timeout_s=ROUND_S) as session:

        def before_step(step):
            if step == 3 and session.rank == who:
                wait_for(session.world_size)

        try:
            return train(session, 6, before_step)
        except RoundTimeout:
            wait_for(session.world_size)
            raise


def die_after(who):
    """The leader reports its error and exits, and its store ends with it."""
    try:
        raise_on(who, "auto")
    except ValueError:
        os._exit(1)


def join_unless(missing, timeout_s):
    if int(os.environ["RANK"]) in missing:
        return None
    with echelon.join(record=False, timeout_s=timeout_s) as session:
        return session.rank


def join_with(options):
    with echelon.join(**{"record": False, "timeout_s": 90, **options}) as session:
        return session.world_size


def unreduced():
    """Steps that would apply gradients that the other workers do not have."""
    with echelon.join(record=False, round_timeout_s=90) as session:
        model = nn.Linear(3, 1)
        other = nn.Linear(3, 1)
        optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, other)]
        model, other, *optimizers = session.prepare(model, other, *optimizers)
        before = model.weight.detach().clone()
        said = []
        with session.accumulate():
            model(torch.ones(2, 3)).mean().backward()
            said.append(refusal(optimizers[0].step))
        said.append(refusal(optimizers[0].step))
        untouched = torch.equal(model.weight, before)
        other(torch.ones(2, 3)).mean().backward()
        optimizers[1].step()  # of another model, whose gradients are there
        model(torch.ones(2, 3)).mean().backward()
        optimizers[0].step()
        return said, untouched, session.step


class Fails(torch.autograd.Function):
    """Raises in its backward pass."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        raise ValueError("in the middle of backward")


def unfinished():
    """Step during a backward pass, and after a failed one."""
    with echelon.join(record=False, round_timeout_s=90) as session:
        model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1))
        model, optimizer = session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        said = []
        hook = model[0].weight.register_post_accumulate_grad_hook(
            lambda _: said.append(refusal(optimizer.step))
        )
        model(torch.ones(2, 3)).mean().backward()
        hook.remove()
        optimizer.step()
        with contextlib.suppress(ValueError):
            model[1](Fails.apply(model[0](torch.ones(2, 3)))).mean().backward()
        model(torch.ones(2, 3)).mean().backward()
        said.append(refusal(optimizer.step))
        return said


def refusal(act):
    try:
        act()
    except ModelError as error:
        return error
    return None


def of(outcome):
    """The error that a worker raised."""
    assert isinstance(outcome, WorkerFailure), outcome
    assert outcome.how == "raised", outcome
    return outcome.error


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("who", [0, 1], ids=["leader", "other"])
def test_all_others_name_a_worker_that_raises_and_its_reason(warm_pool, who, transport):
    outcomes = warm_pool.outcomes(3, raise_on, who, transport)
    assert isinstance(of(outcomes.pop(who)), ValueError)
    for error in map(of, outcomes):
        assert type(error) is PeerLost
        assert error.ranks == (who,)
        assert f"rank {who} on " in error.message
        assert "ValueError: sample 17 is broken" in error.message


def test_others_learn_why_the_leader_failed_before_its_process_exits(warm_pool):
    _, *others = warm_pool.outcomes(3, die_after, 0)
    for error in map(of, others):
        assert type(error) is PeerLost
        assert "ValueError: sample 17 is broken" in error.message


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("who", [0, 2], ids=["leader", "other"])
def test_a_worker_that_ends_its_loop_early_is_named(warm_pool, who, transport):
    outcomes = warm_pool.outcomes(3, leave_early, who, transport)
    assert outcomes.pop(who) == 3
    for error in map(of, outcomes):
        assert type(error) is PeerLost
        assert error.ranks == (who,)
        assert "ended while the others were still training" in error.message


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_others_name_a_worker_that_stops_arriving_at_the_deadline(warm_pool, transport):
    outcomes = warm_pool.outcomes(3, stop_arriving, 1, transport)
    for rank in (0, 2):
        error = of(outcomes[rank])
        assert type(error) is RoundTimeout
        assert error.ranks == (1,)
        assert "rank 1 on " in error.message
        assert f"did not arrive within {ROUND_S} s" in error.message
    said = "it finds the others gone, or hears that they gave up on it"
    assert isinstance(of(outcomes[1]), PeerLost | RoundTimeout), said


def test_workers_that_never_join_are_named(warm_pool):
    outcomes = warm_pool.outcomes(4, join_unless, (1, 3), ROUND_S)
    for rank in (0, 2):
        error = of(outcomes[rank])
        assert type(error) is JoinTimeout
        assert error.ranks == (1, 3)
        assert "ranks 1, 3 of 4 " in error.message
    assert f"did not join within {ROUND_S} s" in of(outcomes[0]).message


def test_leader_that_never_joins_is_named(warm_pool):
    outcomes = warm_pool.outcomes(2, join_unless, (0,), 2)
    error = of(outcomes[1])
    assert type(error) is JoinTimeout
    assert error.ranks == (0,)
    assert "no leader answered at 127.0.0.1:" in error.message


def test_a_port_in_use_is_named(warm_pool):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        outcomes = warm_pool.outcomes(2, join_with, {"timeout_s": 2}, env={"MASTER_PORT": str(port)})
    error = of(outcomes[0])
    assert type(error) is ConfigError
    assert f"port {port} is in use" in error.message
    assert type(of(outcomes[1])) is JoinTimeout


def test_incomplete_environment_variables_are_refused(warm_pool):
    error = of(warm_pool.outcomes(1, join_with, {}, env={"MASTER_PORT": "", "WORLD_SIZE": "2"})[0])
    assert type(error) is ConfigError
    assert "MASTER_PORT is not" in error.message


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"shares": (1, 2, 3)}, "3 shares for 2 workers"),
        ({"shares": (1, 0)}, "rank 1 has a share of 0"),
        ({"transport": "pigeon"}, "unknown transport 'pigeon'"),
    ],
    ids=["count", "zero", "transport"],
)
def test_invalid_join_options_are_refused_on_all_workers(warm_pool, options, told):
    for error in map(of, warm_pool.outcomes(2, join_with, options)):
        assert isinstance(error, ConfigError)
        assert told in error.message


def test_step_during_or_after_a_failed_backward_pass_is_refused(warm_pool):
    for said in warm_pool.run(2, unfinished):
        assert len(said) == 2
        for error in said:
            assert "gradients that the other workers do not have" in error.message


def test_step_on_unreduced_gradients_is_refused(warm_pool):
    for said, untouched, steps in warm_pool.run(2, unreduced):
        for error in said:
            assert "gradients that the other workers do not have" in error.message
            assert "leave accumulate()" in error.fix
        assert untouched
        assert steps == 1, "two optimizers, one step"
