"""What other people's scripts do, and used to go wrong without a word."""

from __future__ import annotations

import io
import logging
import random

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, random_split

import echelon
from echelon.errors import ConfigError, DataError, GradientError, ModelError, WorkerError

WAIT = {"record": False, "round_timeout_s": 90}


def attempt(act):
    try:
        return act()
    except echelon.EchelonError as error:
        return error


class Heard(logging.Handler):
    """What Echelon warns of, as texts."""

    def __init__(self):
        super().__init__(logging.WARNING)
        self.texts = []
        logging.getLogger("echelon").addHandler(self)

    def emit(self, record):
        self.texts.append(record.getMessage())


def job(session, *, samples=24, batch=8, model=None, width=3, **options):
    torch.manual_seed(0)
    data = torch.randn(samples, width)
    loader = DataLoader(TensorDataset(data, data.sum(1, keepdim=True)), batch_size=batch, shuffle=True)
    model = model or nn.Linear(width, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    return session.prepare(model, optimizer, loader, **options)


def step(model, optimizer, x, y):
    optimizer.zero_grad()
    loss = nn.functional.mse_loss(model(x), y)
    loss.backward()
    optimizer.step()
    return loss


# Random numbers -----------------------------------------------------------------------------------


def random_draws(options):
    with echelon.join(**WAIT) as session:
        random.seed(1)
        np.random.seed(1)
        model, optimizer, loader = job(session, **options)
        first = (torch.rand(3).tolist(), np.random.rand(), random.random())
        torch.manual_seed(7)  # the script seeds again
        heard = Heard()
        for x, y in loader:
            step(model, optimizer, x, y)
        return first, torch.rand(3).tolist(), heard.texts


def test_each_worker_draws_random_numbers_of_its_own_and_the_leader_those_of_one_process(warm_pool):
    alone = random_draws({})
    workers = warm_pool.run(4, random_draws, {})
    assert workers[0][:2] == alone[:2]
    for stream in (0, 1, 2):
        assert len({str(first[stream]) for first, *_ in workers}) == 4
    assert len({str(again) for _, again, _ in workers}) == 4, "also after the script has seeded again"
    assert "seeds after prepare" in workers[0][2][0]
    assert warm_pool.run(4, random_draws, {}) == workers, "and reproducibly"


def test_workers_draw_the_same_random_numbers_if_asked_to(warm_pool):
    workers = warm_pool.run(2, random_draws, {"random": "same"})
    assert workers[0][:2] == workers[1][:2]


def split_after_prepare(seeded):
    with echelon.join(**WAIT) as session:
        job(session)
        whole = TensorDataset(torch.arange(20.0))
        generator = torch.Generator().manual_seed(1) if seeded else None
        part, _ = random_split(whole, [12, 8], generator=generator)
        return attempt(lambda: session.prepare(DataLoader(part, batch_size=4)))


def test_data_split_differently_on_each_worker_is_refused(warm_pool):
    for error in warm_pool.run(2, split_after_prepare, False):
        assert isinstance(error, DataError)
        assert "loader 1, which samples" in str(error)
    for loader in warm_pool.outcomes(2, split_after_prepare, True):
        assert not isinstance(loader, echelon.EchelonError)


# Weights and gradients that drift apart ---------------------------------------------------------------


def drifting(how):
    with echelon.join(**WAIT) as session:
        heard = Heard()
        layers = [nn.Linear(3, 4), nn.Linear(4, 1)] if how != "nan in a layer" else [nn.Linear(3, 1)]
        whole = nn.Sequential(*layers) if len(layers) > 1 else layers[0]
        model, optimizer, loader = job(session, model=whole)

        def train():
            for _ in session.epochs(2):
                for x, y in loader:
                    if how == "by hand":
                        grads = torch.autograd.grad(nn.functional.mse_loss(model(x), y), model.parameters())
                        for p, grad in zip(model.parameters(), grads, strict=True):
                            p.grad = grad
                            if session.step == 1:
                                session.all_reduce(p.grad, "mean")
                        optimizer.step()
                        continue
                    step(model, optimizer, x, y)
                    if how == "edited" and session.rank == 1:
                        with torch.no_grad():
                            model[1].bias.add_(1e-3)
                    if "nan" in how and session.rank == 1 and session.step == 2:
                        model.register_forward_pre_hook(lambda m, args: (args[0] * float("nan"),))

        return attempt(train), heard.texts


def test_weights_that_one_worker_edits_are_noticed_with_the_parameter_and_the_rank(warm_pool):
    for error, _ in warm_pool.run(3, drifting, "edited"):
        assert isinstance(error, ModelError)
        assert "drifted apart: parameter 1.bias differs on rank 1" in str(error)


def test_gradients_set_by_hand_must_be_the_same_on_all_workers(warm_pool):
    for error, _ in warm_pool.run(2, drifting, "by hand"):
        assert isinstance(error, ModelError)
        assert "gradient of parameter 0.weight was set without a backward pass" in str(error)
        assert "session.all_reduce(p.grad" in error.fix


@pytest.mark.parametrize("how", ["nan", "nan in a layer"])
def test_nan_is_told_by_the_worker_on_which_it_begins_and_ends_the_run_in_the_weights(warm_pool, how):
    (error, leader), (own, other) = warm_pool.run(2, drifting, how)
    assert any("rank 1" in text and "NaN or infinite" in text for text in other)
    assert not any("rank 0" in text for text in leader)
    assert isinstance(own, GradientError)
    assert own.ranks == (1,)
    assert "holds NaN" in str(own)
    assert "rank 1" in str(own)
    assert isinstance(error, WorkerError)
    assert 0 not in error.ranks


def skipping(rank_that_skips):
    with echelon.join(**WAIT) as session:
        model, optimizer, loader = job(session, samples=80)

        def train():
            for x, y in loader:
                optimizer.zero_grad()
                nn.functional.mse_loss(model(x), y).backward()
                if session.step != 4 or session.rank != rank_that_skips or session.step in skipped:
                    optimizer.step()
                else:
                    skipped.append(session.step)

        skipped = []
        return attempt(train), session.step


def test_a_worker_that_skips_an_optimizer_step_is_named_in_the_next_step(warm_pool):
    for rank, (error, step) in enumerate(warm_pool.run(3, skipping, 1)):
        assert isinstance(error, WorkerError)
        assert "different numbers of optimizer steps: rank 1 on" in str(error) or rank != 1
        assert step <= 6


class Numbered(torch.utils.data.Dataset):
    """Samples by index, which are other ones on some workers, or random on all."""

    def __init__(self, how, rank):
        self.how, self.shift = how, 0.5 if how == "differs" and rank == 1 else 0.0

    def __len__(self):
        return 20

    def __getitem__(self, index):
        noise = torch.rand(()) if self.how == "augmented" else 0.0
        if self.how == "random":
            noise = random.SystemRandom().random()
        return torch.full((3,), float(index)) + self.shift + noise, torch.zeros(1)


def with_own_data(how):
    with echelon.join(**WAIT) as session:
        heard = Heard()
        torch.manual_seed(3)
        model, data = nn.Linear(3, 1), Numbered(how, session.rank)
        before = torch.get_rng_state()
        session.prepare(model, torch.utils.data.DataLoader(data, batch_size=4), random="same")
        assert torch.equal(before, torch.get_rng_state())
        return heard.texts


@pytest.mark.parametrize(("how", "told"), [("same", 0), ("differs", 1), ("augmented", 0), ("random", 0)])
def test_samples_that_differ_between_workers_are_told_when_they_can_be_compared(warm_pool, how, told):
    leader, *_ = warm_pool.run(2, with_own_data, how)
    found = [text for text in leader if "sample 0 of loader 0 differs on rank 1" in text]
    assert len(found) == told


def replaced(how):
    with echelon.join(**WAIT) as session:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
        model, optimizer, loader = job(session, model=model)
        for x, y in loader:
            step(model, optimizer, x, y)
        if how == "layer":
            torch.manual_seed(session.rank)
            model[2] = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 1))
        else:
            state = {name: value + session.rank for name, value in model.state_dict().items()}
            model.load_state_dict(state, assign=True)
        optimizer = session.prepare(torch.optim.SGD(model.parameters(), lr=0.05))
        for _ in session.epochs(1):
            for x, y in loader:
                step(model, optimizer, x, y)
        return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


@pytest.mark.parametrize("how", ["layer", "state"])
def test_layers_that_come_after_prepare_are_synchronised_too(warm_pool, how):
    expected = replaced(how)
    for weights in warm_pool.run(2, replaced, how):
        assert (weights - expected).abs().max() < 1e-5


# Wrong calls of prepare ---------------------------------------------------------------------------


def wrongly_prepared(how):
    heard = Heard()
    with echelon.join(**WAIT) as session:
        torch.manual_seed(0)
        data = torch.randn(24, 3)
        loader = DataLoader(TensorDataset(data, data.sum(1, keepdim=True)), batch_size=8)
        model = nn.Linear(3, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        if how == "model left out":
            optimizer, loader = session.prepare(optimizer, loader)
            session.prepare(nn.Linear(2, 2))
        elif how == "not assigned":
            session.prepare(model, optimizer, loader)
        elif how == "loader left out":
            model, optimizer = session.prepare(model, optimizer)

        def train():
            for x, y in loader:
                step(model, optimizer, x, y)

        error = attempt(train)
    return error, heard.texts


@pytest.mark.parametrize(
    ("how", "kind", "told"),
    [
        ("model left out", ModelError, "belong to no prepared model"),
        ("not assigned", DataError, "iterates over the loader that it gave to prepare"),
    ],
)
def test_prepare_that_cannot_train_right_is_refused_at_the_first_step(warm_pool, how, kind, told):
    for error, _ in warm_pool.run(2, wrongly_prepared, how):
        assert isinstance(error, kind)
        assert told in str(error)


@pytest.mark.parametrize(
    ("how", "told"),
    [
        ("loader left out", "each of the 2 workers draws all 24 samples"),
        ("nothing prepared", "session.prepare was not called"),
    ],
)
def test_what_was_left_out_of_prepare_is_told_by_the_leader(warm_pool, how, told):
    (error, leader), (_, other) = warm_pool.run(2, wrongly_prepared, how)
    assert error is None
    assert [told in text for text in leader] == [True]
    assert other == []
    assert wrongly_prepared(how)[1] == [], "alone there is nothing to say"


# Evaluation ---------------------------------------------------------------------------------------


def evaluated(combines):
    heard = Heard()
    with echelon.join(**WAIT, shares=(3, 1, 1) if combines == "gather" else None) as session:
        model, optimizer, loader = job(session, samples=23)
        torch.manual_seed(0)
        data = torch.arange(33.0).reshape(11, 3)
        test_loader = session.prepare(DataLoader(TensorDataset(data, torch.arange(11)), batch_size=5))
        found = None
        for _ in session.epochs(1):
            for x, y in loader:
                step(model, optimizer, x, y)
            model.eval()
            with torch.no_grad():
                if combines == "gather":
                    found = [
                        session.gather_for_metrics({"score": model(x), "target": (y, len(y))})
                        for x, y in test_loader
                    ]
                elif combines == "mean":
                    found = [session.mean(x.mean()) for x, _ in test_loader]
                    found += [session.mean(2.0 * session.rank, weight=session.rank)]
                else:
                    found = [len(x) for x, _ in test_loader]
        return found, model(data).detach(), [text for text in heard.texts if "combined" in text]


def test_gathered_metrics_are_those_of_one_process_in_its_order(warm_pool):
    for found, scores, texts in warm_pool.run(3, evaluated, "gather"):
        assert texts == []
        assert torch.allclose(torch.cat([one["score"] for one in found]), scores)
        assert torch.cat([one["target"][0] for one in found]).tolist() == list(range(11))
        assert sum(int(one["target"][1].sum()) for one in found) == 11
        assert all(len(one["target"][1]) == 3 for one in found)


def test_mean_is_weighted_by_the_samples_of_each_worker(warm_pool):
    whole = torch.arange(33.0).reshape(11, 3)
    for found, _, texts in warm_pool.run(4, evaluated, "mean"):
        assert texts == []
        expected = [float(whole[:5].mean()), float(whole[5:].mean())]
        assert [float(one) for one in found[:-1]] == pytest.approx(expected)
        assert found[-1] == pytest.approx(2 * (1 + 4 + 9) / 6)


def test_evaluation_that_is_not_combined_is_told(warm_pool):
    (found, _, leader), (_, _, other) = warm_pool.run(2, evaluated, "nothing")
    assert sum(found) < 11
    assert ["was not combined" in text for text in leader] == [True]
    assert other == []


def leader_calls(fails):
    with echelon.join(**WAIT) as session:
        done = []

        def act(value, *, fails):
            done.append(value)
            if fails:
                raise ValueError("no disk")
            return value + 1

        try:
            result = session.on_leader(act, 4, fails=fails)
        except (ValueError, WorkerError) as error:
            result = error
        return result, done


def test_leader_acts_while_the_others_wait_and_its_failure_is_everybodys(warm_pool):
    assert warm_pool.run(2, leader_calls, False) == [(5, [4]), (None, [])]
    (own, _), (told, _) = warm_pool.run(2, leader_calls, True)
    assert isinstance(own, ValueError)
    assert isinstance(told, WorkerError)
    assert "act failed on the leader: ValueError: no disk" in str(told)


# Saving -------------------------------------------------------------------------------------------


def saves(rounds):
    with echelon.join(**WAIT) as session:
        loaded = []
        for number in range(rounds):
            torch.save({"rank": session.rank, "number": number, "big": torch.randn(200_000)}, "model.pt")
            loaded.append(torch.load("model.pt")["number"])
            session.barrier()
        torch.save(session.rank, f"own-{session.rank}.pt")
        session.barrier()
        last = torch.load("model.pt")["rank"]
        session.barrier()
    own = torch.save
    return loaded, last, own.__module__


def test_files_that_all_workers_save_are_whole_and_the_leaders(warm_pool):
    for loaded, last, module in warm_pool.run(4, saves, 12):
        assert loaded == list(range(12))
        assert last == 0
        assert module == "torch.serialization"


def pickled():
    with echelon.join(**WAIT) as session:
        model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
        model, optimizer, loader = job(session, model=model)
        for x, y in loader:
            step(model, optimizer, x, y)
        before = torch.get_rng_state()
        memory = io.BytesIO()
        torch.save(model, memory)
        same = torch.equal(before, torch.get_rng_state())
        memory.seek(0)
        with torch.serialization.safe_globals([nn.Sequential, nn.Linear, nn.BatchNorm1d]):
            loaded = torch.load(memory, weights_only=True)
        model.eval()
        loaded.eval()
        x = torch.ones(2, 3)
        return [type(m) for m in loaded], torch.equal(loaded(x), model(x)), same


def test_pickled_model_loads_with_torchs_safe_loader_as_plain_layers(warm_pool):
    for kinds, equal, same in warm_pool.run(2, pickled):
        assert kinds == [nn.Linear, nn.BatchNorm1d, nn.Linear]
        assert equal
        assert same, "pickling draws no random numbers"


# Closures -----------------------------------------------------------------------------------------


def line_search():
    with echelon.join(**WAIT) as session:
        torch.manual_seed(0)
        data = torch.randn(20, 3).double()
        loader = DataLoader(TensorDataset(data, data.sum(1, keepdim=True).sin()), batch_size=20)
        model = nn.Linear(3, 1).double()
        optimizer = torch.optim.LBFGS(model.parameters(), max_iter=6, line_search_fn="strong_wolfe")
        model, optimizer, loader = session.prepare(model, optimizer, loader)
        losses = []
        for x, y in list(loader) * 3:

            def closure():
                optimizer.zero_grad()
                loss = nn.functional.mse_loss(model(x), y)  # noqa: B023
                loss.backward()
                return loss

            losses.append(float(optimizer.step(closure).detach()))
        return losses, torch.cat([p.detach().reshape(-1) for p in model.parameters()])


def test_closure_returns_the_loss_of_all_workers(warm_pool):
    losses, weights = line_search()
    for found, mine in warm_pool.run(3, line_search):
        assert found == pytest.approx(losses, rel=1e-9)
        assert (mine - weights).abs().max() < 1e-9


# The loader ---------------------------------------------------------------------------------------


def unequal_passes():
    with echelon.join(**WAIT, timeout_s=60) as session:
        _, _, loader = job(session)
        before = len(list(loader))
        return before, attempt(lambda: session.prepare(loader) is loader)


def test_prepared_loader_is_a_data_loader_with_the_attributes_that_scripts_read(warm_pool):
    def own(loader):
        return [loader.num_workers, loader.collate_fn, loader.dataset, loader.pin_memory, loader.timeout]

    with echelon.join(record=False) as session:
        plain = DataLoader(TensorDataset(torch.arange(10)), batch_size=4)
        loader = session.prepare(plain)
        assert isinstance(loader, DataLoader)
        assert own(loader) == own(plain)
        assert loader.sampler is plain.sampler
        assert loader.batch_size == 4
        assert loader.multiprocessing_context is None
        assert [len(x) for (x,) in loader] == [4, 4, 2]
    assert warm_pool.run(2, unequal_passes) == [(3, True)] * 2


class Endless(DataLoader):
    def __iter__(self):
        while True:
            yield from super().__iter__()


def test_loader_with_an_iteration_of_its_own_is_refused():
    with (
        echelon.join(record=False) as session,
        pytest.raises(ConfigError, match="Endless has an __iter__ of its own"),
    ):
        session.prepare(Endless(TensorDataset(torch.arange(4)), batch_size=2))


def merged():
    heard = Heard()
    with echelon.join(**WAIT) as session:
        model, optimizer, loader = job(session, samples=17, batch=8)
        for _ in session.epochs(2):
            for x, y in loader:
                step(model, optimizer, x, y)
    return session.step, heard.texts


def test_merged_last_batch_is_told_once(warm_pool):
    (steps, leader), _ = warm_pool.run(2, merged)
    assert steps == 4
    assert ["the last 1 samples of each pass over loader 0 join the batch before" in t for t in leader] == [
        True
    ]


def own_updates(reads):
    heard = Heard()
    with echelon.join(**WAIT) as session:
        loader = DataLoader(TensorDataset(torch.ones(4, 2)), batch_size=2)
        weights = torch.zeros(2, requires_grad=True)
        for (x,) in loader if reads else [(torch.ones(2, 2),)]:
            (x * weights).sum().backward()
        session.barrier()
    return heard.texts


def test_script_without_optimizers_is_told_at_its_end_if_it_read_a_loader_of_its_own(warm_pool):
    leader, _ = warm_pool.run(2, own_updates, True)
    assert ["each of the 2 workers draws all 4 samples" in text for text in leader] == [True]
    assert warm_pool.run(2, own_updates, False) == [[], []]
