"""Compares codecs: the bytes each saves, its time, and its loss, from one training with each on one
machine.

For each seed all trainings have the same initial weights and the same samples in the same order; figures
are means over the seeds. In each step the gradients of P emulated workers are computed one after the other,
with one thread, and combined by the codec (`codec/reference.py`), followed by one step of SGD.

    bytes              are counted: what the busiest worker sends per step, on average
    coding, gradients  are measured: one worker's medians over the steps
    the wire           is predicted: those bytes at the link's rate, without latency
    a step             is the sum of gradient, coding and wire, without overlap

`smaller` compares with a ring of float32 numbers, 2 (P-1)/P of 4 bytes each.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from echelon.codec.codec import CODECS, Codec, StandIn
from echelon.codec.reference import ReferenceGroup, ring_bytes
from echelon.config.call import parse_call
from echelon.config.registry import options_of
from echelon.errors import ConfigError
from echelon.simulate.setting import Setting

# torch is imported where it is used, so that mistakes are reported without waiting for it.
if TYPE_CHECKING:
    from torch import Tensor, nn

    from echelon.simulate.learner import Problem

Progress = Callable[[str, int], None]  # the codec, and its number of steps so far
EXACT = "none"
# In the order of tables: exact, fewer bits, fewer elements, low rank. With these ratios each element is
# sent a few times in some hundred steps.
_USUAL = {
    EXACT: EXACT,
    "fp16": "fp16",
    "bf16": "bf16",
    "fixed": "fixed(bits=8)",
    "dynamic-fixed": "dynamic-fixed",
    "one-bit": "one-bit",
    "ternary": "ternary",
    "error-feedback": "error-feedback(fixed(bits=3))",
    "threshold": "threshold(value=0.001)",
    "top-k": "top-k(ratio=0.01)",
    "random-k": "random-k(ratio=0.1)",
    "sparse-binary": "sparse-binary(ratio=0.01)",
    "dgc": "dgc(ratio=0.01)",
    "chain": "chain(top-k(ratio=0.01), one-bit)",
    "power-sgd": "power-sgd(rank=2)",
}
_CURVE = 20  # evaluations per training, at most


@dataclass(frozen=True, slots=True, kw_only=True)
class Bench:
    """What is trained, by how many emulated workers; `batch` is per worker.

    Every codec is trained with `seeds` seeds, starting with `seed`. In the last fraction `decay` of the
    steps the learning rate falls linearly to 0. Losses are of `test_samples` fixed test samples (0: all).
    """

    model: str = "char-lstm(width=96, depth=1)"
    data: str = "text(path=python, context=32)"
    workers: int = 4
    steps: int = 200
    batch: int = 8
    lr: float = 0.5
    decay: float = 0.0
    momentum: float = 0.9
    seed: int = 0
    seeds: int = 1
    test_samples: int = 300
    link_bytes_per_s: float = 12.5e6

    def __post_init__(self) -> None:
        _require("workers", self.workers, self.workers >= 2, "at least 2: one worker sends nothing")
        for name in ("steps", "batch", "seeds"):
            _require(name, getattr(self, name), getattr(self, name) >= 1, "at least 1")
        for name in ("seed", "test_samples"):
            _require(name, getattr(self, name), getattr(self, name) >= 0, "at least 0")
        _require("lr", self.lr, 0 < self.lr < math.inf, "a number above 0")
        _require("decay", self.decay, 0 <= self.decay <= 1, "a fraction of the steps, 0 to 1")
        _require("momentum", self.momentum, 0 <= self.momentum < 1, "a number from 0 to below 1")
        _require("link", self.link_bytes_per_s, 0 < self.link_bytes_per_s < math.inf, "a rate above 0")

    def lr_at(self, step: int) -> float:
        """The learning rate of a step, counted from 1."""
        falling = self.decay * self.steps
        return self.lr * min(1.0, (self.steps - step + 1) / falling) if falling else self.lr


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """The evaluation of the weights after so many steps."""

    step: int
    loss: float
    accuracy: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """The training with one codec, or the mean of several; `losses` are the final ones, by seed.

    If a gradient was not finite, training stopped at step `broke_at`.
    """

    codec: str
    curve: tuple[Evaluation, ...]
    sent_bytes: float
    encode_s: float
    decode_s: float
    broke_at: int | None = None
    losses: tuple[float, ...] = ()

    @property
    def loss(self) -> float | None:
        """The final validation loss; None if training did not get there."""
        found = self.curve[-1].loss
        return found if self.broke_at is None and math.isfinite(found) else None

    @property
    def coding_s(self) -> float:
        """Seconds per step that a worker spends on encoding and decoding."""
        return self.encode_s + self.decode_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """All trainings, the exact one first; a gradient takes `compute_s` and has `gradient_bytes`."""

    bench: Bench
    trials: tuple[Trial, ...]
    compute_s: float
    gradient_bytes: int
    exact_bytes: int

    def smaller(self, trial: Trial) -> float:
        """How many times fewer bytes a worker sends than in a ring of float32; infinite if none."""
        return self.exact_bytes / trial.sent_bytes if trial.sent_bytes else math.inf

    def wire_s(self, trial: Trial) -> float:
        """The predicted time for sending the bytes of a step."""
        return trial.sent_bytes / self.bench.link_bytes_per_s

    def step_s(self, trial: Trial) -> float:
        """The predicted time of a step without overlap."""
        return self.compute_s + trial.coding_s + self.wire_s(trial)

    def worse(self, trial: Trial) -> float | None:
        """Its loss relative to the exact one's, minus 1; None if unknown."""
        exact = self.trials[0].loss
        return None if trial.loss is None or not exact else trial.loss / exact - 1

    def spread(self, trial: Trial) -> tuple[float, float] | None:
        """The smallest and largest such difference over the seeds, if there are several."""
        exact = self.trials[0].losses
        if self.bench.seeds == 1 or self.worse(trial) is None or not all(exact):
            return None
        found = [loss / of_exact - 1 for loss, of_exact in zip(trial.losses, exact, strict=True)]
        return min(found), max(found)


def usual_codecs() -> list[str]:
    """All registered codecs with options for a short training, except those that choose another codec."""
    own = [text for name, text in _USUAL.items() if name in CODECS.names()]
    more = [
        one.name
        for one in CODECS.describe()
        if one.name not in _USUAL
        and not one.problem
        and not any(option.required for option in one.options)
        and not issubclass(CODECS.get(one.name), StandIn)
    ]
    return own + more


def asked_codecs(texts: Sequence[str], momentum: float) -> dict[str, Codec]:
    """Codecs by their text; the exact one is always first.

    A codec that applies momentum itself gets `momentum`, unless its text gives another.
    """
    found: dict[str, Codec] = {EXACT: CODECS.build(EXACT, where="--codecs")}
    for text in texts:
        if text in found and text != EXACT:
            raise ConfigError(f"{text} is given twice", where="--codecs", fix="give it once")
        found[text] = _built(text, momentum)
    return found


def _built(text: str, momentum: float) -> Codec:
    call = parse_call(text)
    names = [option.name for option in options_of(CODECS.get(call.name, where="--codecs"))]
    given = {*names[: len(call.args)], *call.options}
    if "momentum" in names and "momentum" not in given:
        call = replace(call, options={**call.options, "momentum": momentum})
    codec = CODECS.build(call, where="--codecs")
    if isinstance(codec, StandIn):
        raise ConfigError(
            f"{text} only chooses another codec",
            where="--codecs",
            fix="name the codec that it would choose",
        )
    return codec


def compare_codecs(
    bench: Bench, codecs: Mapping[str, Codec], progress: Progress | None = None
) -> Comparison:
    """Train with each codec; the others are compared with the first."""
    from echelon.simulate.learner import Problem

    problem = Problem(Setting(model=bench.model, data=bench.data, test_samples=bench.test_samples))
    sizes = [
        p.numel() * p.element_size() for p in problem.build(bench.seed).parameters() if p.requires_grad
    ]
    compute_s: list[float] = []
    report = progress or (lambda text, step: None)
    trials = [
        _mean(
            [_train(bench, index, problem, text, codec, compute_s, report) for index in range(bench.seeds)]
        )
        for text, codec in codecs.items()
    ]
    return Comparison(
        bench=bench,
        trials=tuple(trials),
        compute_s=statistics.median(compute_s),
        gradient_bytes=sum(sizes),
        exact_bytes=sum(ring_bytes(size, bench.workers) for size in sizes),
    )


def _train(
    bench: Bench,
    index: int,
    problem: Problem,
    text: str,
    codec: Codec,
    compute_s: list[float],
    progress: Progress,
) -> Trial:
    """Train with one seed, the one with number `index`."""
    import torch

    from echelon.simulate.order import Order

    seed = bench.seed + index
    module = problem.build(seed)
    parameters = {name: p for name, p in module.named_parameters() if p.requires_grad}
    # If the codec applies momentum, the optimizer must not apply it again.
    momentum = 0.0 if codec.momentum else bench.momentum
    optimizer = torch.optim.SGD(parameters.values(), lr=bench.lr, momentum=momentum)
    order = Order(problem.samples, seed)
    together = ReferenceGroup(codec, bench.workers, now=time.perf_counter)
    took: list[tuple[int, float, float]] = []
    every = max(1, bench.steps // _CURVE)
    broke_at = None
    with _reproducible(seed):
        curve = [_evaluate(problem, module, 0)]
        for step in range(1, bench.steps + 1):
            torch.manual_seed(seed + step)  # the same dropout for all codecs, which may draw numbers too
            gradients = []
            for _ in range(bench.workers):
                batch = problem.batch(order.take(bench.batch))
                begun = time.perf_counter()
                gradients.append(_gradient(problem, module, parameters, batch, 1 / bench.workers))
                compute_s.append(time.perf_counter() - begun)
            if not all(bool(one.isfinite().all()) for mine in gradients for one in mine.values()):
                broke_at = step
                break
            for name, total in together.combine(gradients).items():
                parameters[name].grad = total
            for group in optimizer.param_groups:
                group["lr"] = bench.lr_at(step)
            optimizer.step()
            took.append((max(together.sent_bytes), together.encode_s, together.decode_s))
            if step % every == 0 or step == bench.steps:
                curve.append(_evaluate(problem, module, step))
            progress(text, index * bench.steps + step)
    sent_bytes, encode_s, decode_s = zip(*(took or [(0, 0.0, 0.0)]), strict=True)
    return Trial(
        codec=text,
        curve=tuple(curve),
        sent_bytes=statistics.fmean(sent_bytes),
        encode_s=statistics.median(encode_s),
        decode_s=statistics.median(decode_s),
        broke_at=broke_at,
    )


def _mean(trials: Sequence[Trial]) -> Trial:
    """The mean of trainings with the same codec; stopped if one of them stopped."""
    broken = [one.broke_at for one in trials if one.broke_at is not None]
    return Trial(
        codec=trials[0].codec,
        curve=tuple(
            Evaluation(
                step=seen[0].step,
                loss=statistics.fmean(one.loss for one in seen),
                accuracy=statistics.fmean(one.accuracy for one in seen),
            )
            for seen in zip(*(one.curve for one in trials), strict=False)
        ),
        sent_bytes=statistics.fmean(one.sent_bytes for one in trials),
        encode_s=statistics.median(one.encode_s for one in trials),
        decode_s=statistics.median(one.decode_s for one in trials),
        broke_at=min(broken, default=None),
        losses=tuple(one.curve[-1].loss for one in trials),
    )


def _gradient(
    problem: Problem,
    module: nn.Module,
    parameters: Mapping[str, nn.Parameter],
    batch: tuple[Tensor, Tensor],
    weight: float,
) -> dict[str, Tensor]:
    """A worker's gradient times its weight, by name."""
    import torch

    x, y = batch
    loss = problem.loss(module(x), y) * weight
    found = torch.autograd.grad(loss, list(parameters.values()), allow_unused=True, materialize_grads=True)
    return dict(zip(parameters, found, strict=True))


def _evaluate(problem: Problem, module: nn.Module, step: int) -> Evaluation:
    import torch

    from echelon.zoo.task import count_correct

    total, right, targets = 0.0, 0, 0
    module.eval()
    with torch.no_grad():
        for x, y in problem.evaluation("test"):
            logits = module(x)
            correct, count = count_correct(logits, y)
            total += float(problem.loss(logits, y)) * count
            right, targets = right + correct, targets + count
    module.train()
    return Evaluation(step=step, loss=total / targets, accuracy=right / targets)


@contextmanager
def _reproducible(seed: int) -> Iterator[None]:
    """One thread, because sums of several vary between runs, and random numbers of its own."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            yield
    finally:
        torch.set_num_threads(threads)


def _require(name: str, value: float, holds: bool, wanted: str) -> None:
    if not holds:
        raise ConfigError(
            f"{name.replace('_', ' ')} is {value:g}, but must be {wanted}",
            where="--" + name.replace("_", "-"),
            fix=f"give {wanted}",
        )


# Findings in sentences

_CLOSE = 0.01  # a loss at most this fraction above the exact one's is as good


def in_words(found: Comparison) -> list[str]:
    """The smallest codec that learns as well, the fastest at this link, and those that stopped early."""
    exact, *others = found.trials
    ended = [one for one in others if one.loss is not None]
    close = [one for one in ended if (worse := found.worse(one)) is not None and worse <= _CLOSE]
    sentences = []
    limit = f"{100 * _CLOSE:.0f} % above {exact.codec}'s"
    if close:
        best = max(close, key=found.smaller)
        sentences.append(
            f"Smallest codec whose loss is at most {limit}: {best.codec}. It sends "
            f"{show_times(found.smaller(best))} fewer bytes than float32; its loss is "
            f"{_relative(found.worse(best) or 0.0)} {exact.codec}'s."
        )
    else:
        sentences.append(f"No codec has a loss of at most {limit}.")
    if ended:
        sentences.append(_fastest(found, close or ended, among_close=bool(close)))
        sentences.append(_certainty(found))
    sentences += [
        f"{one.codec} stopped at step {one.broke_at}: a gradient was not finite."
        for one in found.trials
        if one.broke_at is not None
    ]
    return sentences


def _relative(worse: float) -> str:
    percent = round(100 * worse, 1)
    if not percent:
        return "equal to"
    return f"{abs(percent):.1f} % {'above' if percent > 0 else 'below'}"


def _certainty(found: Comparison) -> str:
    if found.bench.seeds == 1:
        return "Only one seed was trained, so differences of about 1 % may be chance; use --seeds."
    seeds = found.bench.seeds
    return f"Losses are means of {seeds} seeds; brackets have the smallest and the largest difference."


def _fastest(found: Comparison, trials: Sequence[Trial], *, among_close: bool) -> str:
    exact = found.trials[0]
    fast = min(trials, key=found.step_s)
    gain = found.step_s(exact) / found.step_s(fast)
    if gain <= 1:
        of_these = " of these" if among_close else ""
        return f"No codec{of_these} has a faster predicted step at this link than {exact.codec}."
    of_these = ", of these codecs" if among_close else ""
    times = f"{gain:.1f} times as fast as {exact.codec}"
    return f"Fastest predicted step at this link{of_these}: {fast.codec}, {times}."


def show_times(ratio: float) -> str:
    """A ratio for display: '31.8x'."""
    if not math.isfinite(ratio):
        return "-"
    return f"{ratio:,.{0 if ratio >= 100 else 1}f}x"
