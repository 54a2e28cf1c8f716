"""Pushes and pulls through a codec: residuals are sent later, and workers end with the right weights."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn
from torch.utils.data import DataLoader

import echelon
from echelon.checkpoint import store as checkpoint
from echelon.errors import ConfigError, GradientError
from echelon.observe.events import ServerEnded, read_events
from echelon.server import encoding
from echelon.server.channel import ServerChannel
from echelon.server.layout import cut_pieces, split
from echelon.server.protocol import PushPiece
from plain import examples, seed_weights
from served import ServedRun, take_part
from warm import WorkerFailure

FEATURES = 400


def work(name, *args):
    return take_part(globals()[name], *args)


def network(session):
    """Large enough for its bytes to count, and for its first weight to be split between servers."""
    seed_weights(session)
    return nn.Sequential(nn.Linear(FEATURES, 100), nn.Tanh(), nn.Linear(100, 3))


def flat(tensors):
    return torch.cat([tensor.detach().reshape(-1).clone() for tensor in tensors])


# Training ----------------------------------------------------------------------------------------


def trained(options, epochs=6):
    """Losses by epoch, final weights, pushed bytes, whether each pull was coded, and pulled bytes."""
    with echelon.join(record=False) as session:
        model = network(session)
        data = examples(60, features=FEATURES, dtype=torch.float32)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        loader = DataLoader(data, batch_size=12, shuffle=True)
        model, optimizer, loader = session.prepare(model, optimizer, loader, **options)
        losses, (client,), came, pulled = [], session._synchronizer._clients, [], []
        receive = client.weights.receive

        def noted(sender, message, payload):
            came.append(message.coded)
            pulled.append(len(payload))
            receive(sender, message, payload)

        client.weights.receive = noted
        for _ in session.epochs(epochs):
            for x, y in loader:
                optimizer.zero_grad()
                F.cross_entropy(model(x), y).backward()
                optimizer.step()
            x, y = data.tensors
            with torch.no_grad():
                losses.append(float(F.cross_entropy(model(x), y)))
        return losses, flat(model.parameters()), client.pushes.sent_bytes, came, sum(pulled)


# Codec, policy, options, how much smaller a push is, and whether weights that a worker is handed in the
# course of a pass come coded: not if it has taken steps of its own.
TRAINED = {
    "top-k": ("top-k(ratio=0.05)", "async", {}, 15, {True}),
    "one-bit": ("one-bit", "backup(0)", {}, 25, {True}),
    "fp16, late": ("fp16", "async", {"overlap": "step"}, 1.9, {True}),
    "alone at times": ("top-k(ratio=0.05)", "percentage(0.5)", {}, 0, {False, True}),
    "summed": ("one-bit", "downpour(2, 2)", {}, 0, {False}),
}


@pytest.mark.parametrize("how", TRAINED)
def test_workers_learn_with_fewer_bytes_and_end_with_exactly_the_servers_weights(warm_pool, tmp_path, how):
    codec, sync, options, smaller, handed = TRAINED[how]
    run = ServedRun(tmp_path, workers=2, servers=1, sync=sync, codec=codec, seed=1)
    outcomes, (kept,) = run.run(warm_pool, work, "trained", options)
    (weights,) = (weights for weights in kept.weights.values())
    length, hand_outs = weights.numel(), sum(len(outcome[3]) for outcome in outcomes)
    for losses, own, sent_bytes, came, _ in outcomes:
        assert losses[-1] < 0.5 * losses[0]
        assert sorted(own.tolist()) == sorted(weights.tolist()), (
            "the server's weights, in the shard's order"
        )
        assert sent_bytes * smaller < 4 * length
        assert came[:1] + came[-1:] == [False, False], "whole weights when a pass begins and ends"
        for _ in range(12):
            came.remove(False)
        assert set(came) == handed
    assert torch.equal(outcomes[0][1], outcomes[1][1])
    assert kept.waiting == 0
    report = server_report(run)
    assert report.codec == codec
    assert report.pulled_bytes == sum(outcome[4] for outcome in outcomes)
    assert report.dense_pulled_bytes == 4 * length * hand_outs
    assert report.dense_pushed_bytes == 4 * length * report.pushes
    assert report.pushed_bytes * smaller < report.dense_pushed_bytes


def server_report(run):
    """The report of the first server."""
    (report,) = (e for e in read_events(run.folder.events_of(run.workers)) if isinstance(e, ServerEnded))
    return report


def stepped(codec, strength):
    """One worker takes steps, the other rests. Returns its weights and those computed by hand."""
    with echelon.join(record=False) as session:
        model = nn.Linear(FEATURES, 60)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
        model, optimizer = session.prepare(model, optimizer)
        if session.rank:
            session.pause()
            return []
        (client,) = session._synchronizer._clients
        lengths = [p.numel() for p in model.parameters()]
        (shard,) = split(lengths, 1, item_bytes=4)
        (piece,) = cut_pieces([shard], item_bytes=4)
        codecs = encoding.open_codec(codec, torch.float32, 0, [p.shape for p in model.parameters()])
        out = encoding.PushEncoder(codecs, [piece], 0)
        weights = flat(reversed(list(model.parameters())))  # in the shard's order
        velocity, shadows = torch.zeros_like(weights), encoding.Shadows(codecs, weights, 1)
        found = []
        for step in range(8):
            optimizer.zero_grad()
            (model(torch.randn(4, FEATURES)) * torch.randn(4, 60)).sum().backward()
            gradient = flat(p.grad for p in reversed(list(model.parameters())))
            optimizer.step()
            payload = memoryview(bytearray(out.write(0, gradient, ()).numpy().tobytes()))
            out.finish()
            encoding.read_push(codecs, payload, piece, gradient, 0, "this worker")
            gradient += strength * gradient * gradient * (weights - shadows.of(0))
            velocity = 0.9 * velocity + gradient
            weights = weights - 0.01 * velocity
            shadows.change(0, piece, weights, step + 1)
            if step == 3:
                client.pull()
                shadows.of(0).copy_(weights)
            found.append((flat(reversed(list(model.parameters()))), shadows.of(0).clone()))
        client.pull()
        return [*found, (flat(reversed(list(model.parameters()))), weights)]


@pytest.mark.parametrize("sync", ["async", "delay-compensated(strength=0.5)"])
@pytest.mark.parametrize("codec", ["top-k(ratio=0.05)", "one-bit"])
def test_a_workers_weights_equal_those_computed_by_hand(warm_pool, tmp_path, codec, sync):
    """A gradient is corrected by the weights that the worker had, not by the server's."""
    run = ServedRun(tmp_path, workers=2, servers=1, sync=sync, codec=codec)
    (found, _), _ = run.run(warm_pool, work, "stepped", codec, 0.0 if sync == "async" else 0.5)
    assert len(found) == 9
    for own, expected in found:
        torch.testing.assert_close(own, expected, rtol=1e-5, atol=1e-6)
    nearly, exactly = (own for own, _ in found[-2:])
    assert float((nearly - exactly).abs().max()) > 0.01, "the last change left something out"


@pytest.mark.parametrize("sync", ["backup(0)", "delay-compensated"])
def test_replicas_equal_their_originals_to_the_bit(warm_pool, tmp_path, sync):
    run = ServedRun(tmp_path, workers=2, servers=2, replicas=1, sync=sync, codec="one-bit", seed=1)
    outcomes, (one, other) = run.run(warm_pool, work, "trained", {}, 2)
    for shard in (0, 1):
        assert one.weights[0, shard].numel() > FEATURES
        assert torch.equal(one.weights[0, shard], other.weights[0, shard])
    assert torch.equal(outcomes[0][1], outcomes[1][1])


def in_groups():
    with echelon.join(record=False) as session:
        model = network(session)
        data = examples(60, features=FEATURES, dtype=torch.float32)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        loader = DataLoader(data, batch_size=12, shuffle=True)
        model, optimizer, loader = session.prepare(model, optimizer, loader)
        stop = record_pushes()
        for _ in session.epochs(4):
            for x, y in loader:
                optimizer.zero_grad()
                F.cross_entropy(model(x), y).backward()
                optimizer.step()
        x, y = data.tensors
        with torch.no_grad():
            return float(F.cross_entropy(model(x), y)), flat(model.parameters()), stop()


def test_the_first_member_pushes_coded_gradients_for_its_group(warm_pool, tmp_path):
    sync = 'levels(full, "async")'
    groups = ((0, 1), (2, 3))
    codec = "between(one-bit)"
    run = ServedRun(tmp_path, workers=4, servers=1, sync=sync, codec=codec, groups=groups)
    outcomes, _ = run.run(warm_pool, work, "in_groups")
    for rank, (loss, weights, sent) in enumerate(outcomes):
        assert loss < 0.5
        assert torch.equal(weights, outcomes[0][1])
        assert bool(sent) == (rank in (0, 2))
        assert all(coded and size * 20 < 4 * weights.numel() for coded, size in sent)


# Sent bytes --------------------------------------------------------------------------------------


def record_pushes():
    """Record all pushed pieces from now on; the returned function stops that, and returns them."""
    sent = []
    send = ServerChannel.send

    def noted(self, server, message, *payload):
        if isinstance(message, PushPiece):
            sent.append((message.coded, len(payload[0])))
        send(self, server, message, *payload)

    ServerChannel.send = noted

    def stop():
        ServerChannel.send = send
        return sent

    return stop


def pushed(clips, spoils):
    """Ten steps with given gradients; returns their sum, the residuals, the change and the pushes."""
    with echelon.join(record=False) as session:
        model = nn.Linear(FEATURES, 60)
        nn.init.zeros_(model.weight)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        model, optimizer = session.prepare(model, optimizer)
        stop = record_pushes()
        given = torch.zeros(FEATURES * 60 + 60, dtype=torch.float64)
        begun = flat(model.parameters()).double()
        draw = torch.Generator().manual_seed(session.rank)
        for step in range(10):
            optimizer.zero_grad()
            x = torch.randn(4, FEATURES, generator=draw)
            loss = (
                model(x) * torch.randn(4, 60, generator=draw)
            ).sum()  # gradients do not depend on the weights
            (loss * torch.inf if spoils and step == 2 else loss).backward()
            if spoils and step == 2:
                for p in model.parameters():
                    p.grad.nan_to_num_(posinf=1.0, neginf=-1.0)  # the script corrects it
            if spoils and step == 4:
                continue  # sent early, but the step is skipped
            if spoils and step == 7:
                model.weight.grad.fill_(torch.nan)
                with pytest.raises(
                    GradientError, match=rf"parameter weight .* step 6 of rank {session.rank}"
                ):
                    optimizer.step()
                continue
            if clips and step % 2:
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            given += flat(p.grad for p in model.parameters())
            optimizer.step()
        sent = stop()
        tables = session._synchronizer.residuals().get("tables", {})
        residuals = [
            tables[f"0/{place}"]["residual"] if tables else torch.zeros(p.numel())
            for place, p in enumerate(model.parameters())
        ]
        session._synchronizer._clients[0].pull()
        moved = begun - flat(model.parameters()).double()
        session.barrier()  # all workers load together
        session._synchronizer.loaded()
        assert session._synchronizer.residuals() == {}, "a load forgets the residuals"
        session.pause()
        return given, torch.cat(residuals).double(), moved, sent


@pytest.mark.parametrize(
    ("codec", "clips", "spoils"),
    [("top-k(ratio=0.01)", False, False), ("one-bit", True, False), ("top-k(ratio=0.05)", True, True)],
)
def test_the_change_of_the_weights_plus_the_residuals_is_the_sum_of_gradients(
    warm_pool, tmp_path, codec, clips, spoils
):
    """Also with gradients that were sent too early, and with steps that were skipped."""
    run = ServedRun(tmp_path, workers=2, servers=1, sync="backup(0)", codec=codec)
    outcomes, (kept,) = run.run(warm_pool, work, "pushed", clips, spoils)
    given = sum(outcome[0] for outcome in outcomes) / 2
    residuals = sum(outcome[1] for outcome in outcomes) / 2
    for _, _, moved, sent in outcomes:
        torch.testing.assert_close(moved + residuals, given, rtol=1e-4, atol=1e-3)
        assert {coded for coded, _ in sent} == {True}
    assert float(residuals.norm()) > 0
    assert kept.waiting == 0


def test_a_server_does_not_report_a_codec_that_wrote_nothing(warm_pool, tmp_path):
    sync = "elastic-averaging(asynchronous=true)"  # it pushes weights
    run = ServedRun(tmp_path, workers=2, servers=1, sync=sync, codec="one-bit")
    run.run(warm_pool, work, "trained", {}, 1)
    report = server_report(run)
    assert (report.codec, report.pushed_bytes) == ("none", report.dense_pushed_bytes)
    assert 0 < report.pulled_bytes == report.dense_pulled_bytes


@pytest.mark.parametrize("transport", ["auto", "tcp"])
def test_without_a_codec_gradients_are_written_to_shared_memory_or_sent_as_they_are(
    warm_pool, tmp_path, transport
):
    run = ServedRun(tmp_path, workers=2, servers=1, sync="backup(0)", codec="none", transport=transport)
    outcomes, _ = run.run(warm_pool, work, "pushed", False, False)
    for _, residuals, _, sent in outcomes:
        assert sent == [(False, 4 * (FEATURES * 60 + 60))] * 10 * (transport == "tcp")
        assert not residuals.any()
    report = server_report(run)
    assert (report.codec, report.pushed_bytes) == ("none", report.dense_pushed_bytes)
    assert 0 < report.pulled_bytes == report.dense_pulled_bytes


# Non-finite gradients ----------------------------------------------------------------------------


def spoiled():
    """All gradients are ones, but two of the first worker hold NaN; it skips these and goes on."""
    with echelon.join(record=False) as session:
        model = nn.Linear(50, 4)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.125)
        model, optimizer = session.prepare(model, optimizer)
        begun = flat(model.parameters())
        for step in range(10):
            optimizer.zero_grad()
            model(torch.ones(1, 50)).sum().backward()
            if session.rank == 0 and step in (3, 6):
                model.weight.grad[1, 7] = torch.nan
                before = flat(model.parameters())
                with pytest.raises(
                    GradientError, match=r"gradient of parameter weight .* in step \d of rank 0"
                ) as caught:
                    optimizer.step()
                assert caught.value.ranks == (0,)
                assert torch.equal(flat(model.parameters()), before)
                continue
            optimizer.step()
        session.pause()
        session.barrier()
        session._synchronizer._clients[0].pull()
        return begun - flat(model.parameters())


@pytest.mark.parametrize("sync", ["async", "downpour(2, 2)", "downpour(1, 3)", "percentage(0.5)"])
def test_non_finite_gradient_is_refused_and_the_script_may_continue(warm_pool, tmp_path, sync):
    """Neither the server nor the worker's own weights or sums get it."""
    run = ServedRun(tmp_path, workers=2, servers=1, sync=sync, codec="fp16")
    outcomes, (kept,) = run.run(warm_pool, work, "spoiled")
    for moved in outcomes:
        torch.testing.assert_close(moved, torch.full_like(moved, moved[0]), rtol=1e-3, atol=1e-3)
        assert float(moved[0]) > 0.125 * 4
    if "downpour" in sync:  # the other eight steps are complete
        torch.testing.assert_close(outcomes[0], torch.full_like(outcomes[0], 0.125 * 18), rtol=1e-3, atol=0)
    assert kept.waiting == 0


def overflowing(sync):
    """Finite gradients whose sum or step overflows float32."""
    with echelon.join(record=False) as session:
        model = nn.Linear(50, 4)
        large = sync.startswith("percentage")
        optimizer = torch.optim.SGD(model.parameters(), lr=10.0 if large else 1e-38)
        model, optimizer = session.prepare(model, optimizer)
        for step in range(3):
            optimizer.zero_grad()
            model(torch.ones(1, 50)).sum().backward()
            if session.rank == 0 and step:
                for p in model.parameters():
                    p.grad.fill_(3e38)
            optimizer.step()
        what = "change" if large else "sum of gradients"
        if session.rank == 0:
            with pytest.raises(GradientError, match=f"the {what} of parameter weight"):
                session.pause()
        session.barrier()
        session._synchronizer._clients[0].pull()
        session.pause()
        return flat(model.parameters())


@pytest.mark.parametrize("sync", ["downpour(4, 4)", "percentage(shares=[0.1, 1.0])"])
def test_overflowing_sum_or_weight_change_is_not_merged(warm_pool, tmp_path, sync):
    run = ServedRun(tmp_path, workers=2, servers=1, sync=sync, codec="fp16")
    outcomes, _ = run.run(warm_pool, work, "overflowing", sync)
    assert all(bool(weights.isfinite().all()) for weights in outcomes)


def spoiled_in_a_group():
    with echelon.join(record=False) as session:
        model = nn.Linear(50, 4)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.125)
        model, optimizer = session.prepare(model, optimizer)
        model(torch.full((1, 50), torch.nan if session.rank == 3 else 1.0)).sum().backward()
        optimizer.step()
        session.pause()


def test_a_bad_gradient_of_a_group_names_all_its_members(warm_pool, tmp_path):
    groups = ((0, 1), (2, 3))
    sync = 'levels(full, "async")'
    run = ServedRun(tmp_path, workers=4, servers=1, sync=sync, codec="one-bit", groups=groups)
    with pytest.raises(WorkerFailure) as caught:
        run.run(warm_pool, work, "spoiled_in_a_group")
    error = caught.value.outcomes[2].error
    assert isinstance(error, GradientError)
    assert error.ranks == (2, 3)
    assert "of the group of ranks 2, 3" in error.message


# Saving and loading ------------------------------------------------------------------------------


def saving(upto, save_at, folder):
    """Five steps an epoch, without shuffling, so that workers draw the same data in every run."""
    with echelon.join(record=False) as session:
        model = network(session)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        data = examples(60, features=FEATURES, dtype=torch.float32)
        loader = DataLoader(data, batch_size=12, shuffle=False)
        model, optimizer, loader = session.prepare(model, optimizer, loader)
        session.load(folder, required=False)
        for _ in session.epochs(4):
            for x, y in loader:
                optimizer.zero_grad()
                F.cross_entropy(model(x), y).backward()
                optimizer.step()
                if session.step == save_at:
                    session.save(folder)
                if session.step == upto:
                    break
            if session.step == upto:
                break
        return flat(model.parameters())


def test_run_resumed_after_an_epoch_equals_an_uninterrupted_run(warm_pool, tmp_path):
    """All workers have the server's weights between epochs, so only residuals could differ."""
    ended = {}
    for part, upto, save_at, where in (
        ("whole", 20, 0, "none"),
        ("first", 10, 10, "saved"),
        ("second", 20, 0, "saved"),
    ):
        run = ServedRun(
            tmp_path / part, workers=2, servers=2, sync="backup(0)", seed=4, codec="top-k(ratio=0.05)"
        )
        ended[part] = run.run(warm_pool, work, "saving", upto, save_at, str(tmp_path / where))[0]
    for one, other in zip(ended["whole"], ended["second"], strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-7)
    saved = checkpoint.read_newest(tmp_path / "saved", lambda state: None)
    codecs = [worker["codec"] for worker in saved.workers]
    assert [one["codec"] for one in codecs] == ["top-k(ratio=0.05)"] * 2
    assert all(float(one["tables"]["0/0"]["residual"].norm()) > 0 for one in codecs)


def test_save_during_an_epoch_does_not_change_training(warm_pool, tmp_path):
    ended = []
    for part, save_at in (("saving", 8), ("not", 0)):
        run = ServedRun(
            tmp_path / part, workers=2, servers=1, sync="backup(0)", seed=4, codec="top-k(ratio=0.05)"
        )
        ended.append(run.run(warm_pool, work, "saving", 15, save_at, str(tmp_path / part / "saved"))[0])
    for one, other in zip(*ended, strict=True):
        assert torch.equal(one, other)


def resuming(folder):
    """The residuals after a load; then five steps and a save."""
    with echelon.join(record=False) as session:
        model = network(session)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        loader = DataLoader(examples(60, features=FEATURES, dtype=torch.float32), batch_size=12)
        model, optimizer, loader = session.prepare(model, optimizer, loader)
        session.load(folder, required=False)
        residuals = session._synchronizer.residuals().get("tables", {})
        for x, y in loader:
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
        session.save(folder)
        return {name: state["residual"] for name, state in residuals.items()}


def residuals_in_all(states):
    return {name: sum(one[name].double() for one in states if name in one) for name in ("0/0", "0/3")}


def test_residuals_of_workers_are_loaded_by_the_first_members_of_groups(warm_pool, tmp_path):
    """Four workers, then two groups, then two other groups; the codec is spelled in two ways."""
    runs = (
        ("backup(0)", (), "top-k(ratio=0.05)", []),
        ('levels(full, "backup(0)")', ((0, 1), (2, 3)), "top-k(0.05)", [0, 2]),
        ('levels(full, "backup(0)")', ((0, 2), (1, 3)), "top-k(ratio=0.05)", [0, 1]),
    )
    saved = []
    for number, (sync, groups, codec, leaders) in enumerate(runs):
        run = ServedRun(
            tmp_path / str(number), workers=4, servers=1, sync=sync, groups=groups, codec=codec, seed=4
        )
        outcomes, _ = run.run(warm_pool, work, "resuming", str(tmp_path / "saved"))
        assert [rank for rank, residuals in enumerate(outcomes) if residuals] == leaders
        if saved:
            now, before = residuals_in_all(outcomes), residuals_in_all(saved)
            for name, residual in before.items():
                assert float(residual.norm()) > 0
                torch.testing.assert_close(now[name], residual, rtol=1e-5, atol=1e-6)
        found = checkpoint.read_newest(tmp_path / "saved", lambda state: None)
        codecs = [worker["codec"] for worker in found.workers]
        tables = [one.get("tables", {}) for one in codecs]
        saved = [{name: state["residual"] for name, state in one.items()} for one in tables]


def misplaced():
    """Load residuals of a model whose two parameters are in the other order."""
    with echelon.join(record=False) as session:
        model = nn.Linear(4, 2)
        model, _ = session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        shapes = {"0/0": (2,), "0/1": (2, 4)}
        tables = {
            name: {"residual": torch.ones(shape).reshape(-1), "shape": torch.tensor(shape)}
            for name, shape in shapes.items()
        }
        session._synchronizer.restore_residuals([{"codec": "top-k", "tables": tables}] * 2)
        return session._synchronizer.residuals(), session._plan.reasons.get("codec residuals")


def test_residuals_of_parameters_at_other_positions_are_dropped_and_reported(warm_pool, tmp_path):
    run = ServedRun(tmp_path, workers=2, servers=1, sync="async", codec="top-k")
    outcomes, _ = run.run(warm_pool, work, "misplaced")
    assert [residuals for residuals, _ in outcomes] == [{}, {}]
    assert "2 parameters in other places" in outcomes[0][1]


# Invalid options ---------------------------------------------------------------------------------


def prepare():
    with echelon.join(record=False) as session:
        model = nn.Linear(3, 2)
        session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))


def test_momentum_in_both_the_codec_and_the_optimizer_is_refused(warm_pool, tmp_path):
    run = ServedRun(tmp_path, workers=2, servers=1, sync="async", codec="dgc")
    with pytest.raises(WorkerFailure) as caught:
        run.run(warm_pool, work, "prepare")
    workers = caught.value.outcomes[:2]
    assert all(isinstance(one.error, ConfigError) for one in workers)
    assert all("applied twice" in one.error.message for one in workers)
