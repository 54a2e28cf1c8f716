"""What does a codec save, and what does it cost in accuracy? One training with each, on one machine.

All trainings begin with the same weights and meet the same samples in the same order; with several seeds,
those of one seed do, and means are told. In each step the gradients of P emulated workers are computed one
after the other, with one thread, and combined as the codec does it (`codec/together.py`); then comes one
step of SGD. Of what is told,

    bytes              are counted: what the busiest worker sends in a step, on average
    coding, gradients  are measured: medians over the steps, of one worker
    the wire           is predicted: those bytes at the link's rate, without latency
    a step             is the sum of gradient, coding and wire: nothing overlaps

`smaller` compares with the bytes of float32 numbers that a ring adds up, 2 (P-1)/P of 4 bytes each.
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

# What needs torch is imported where it is used: mistakes are told without waiting for it.
if TYPE_CHECKING:
    from torch import Tensor, nn

    from echelon.simulate.learner import Problem

Progress = Callable[[str, int], None]  # the codec, and how many steps it has made
EXACT = "none"
# In the order of tables: exact, fewer bits, fewer elements, low rank. Ratios are such that in some hundred
# steps each element is sent a few times.
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
_CURVE = 20  # evaluations of a training, at most


@dataclass(frozen=True, slots=True, kw_only=True)
class Bench:
    """What is trained, by how many emulated workers; `batch` is that of each.

    Every codec is trained with so many `seeds`, from `seed` on. In the last part `decay` of the steps, the
    learning rate falls to 0 in a line. Losses are those of `test_samples` fixed samples of the test data; 0
    is all of them.
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
        _require("decay", self.decay, 0 <= self.decay <= 1, "a part of the steps, 0 to 1")
        _require("momentum", self.momentum, 0 <= self.momentum < 1, "a number from 0 to below 1")
        _require("link", self.link_bytes_per_s, 0 < self.link_bytes_per_s < math.inf, "a rate above 0")

    def lr_at(self, step: int) -> float:
        """The learning rate of a step, counted from 1."""
        falling = self.decay * self.steps
        return self.lr * min(1.0, (self.steps - step + 1) / falling) if falling else self.lr


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """How good the weights were after so many steps."""

    step: int
    loss: float
    accuracy: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """The training with one codec, or the mean of several; `losses` are those at the end, by seed.

    One that `broke_at` a step had no finite gradient there, and ended.
    """

    codec: str
    curve: tuple[Seen, ...]
    sent_bytes: float
    encode_s: float
    decode_s: float
    broke_at: int | None = None
    losses: tuple[float, ...] = ()

    @property
    def loss(self) -> float | None:
        """The validation loss at the end, if it got there."""
        found = self.curve[-1].loss
        return found if self.broke_at is None and math.isfinite(found) else None

    @property
    def coding_s(self) -> float:
        """What coding takes of a worker's step."""
        return self.encode_s + self.decode_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """All trainings, the exact one first; a gradient takes `compute_s`, and is `gradient_bytes` long."""

    bench: Bench
    trials: tuple[Trial, ...]
    compute_s: float
    gradient_bytes: int
    exact_bytes: int

    def smaller(self, trial: Trial) -> float:
        """How many times fewer bytes a worker sends than in a ring of float32; infinite if none at all."""
        return self.exact_bytes / trial.sent_bytes if trial.sent_bytes else math.inf

    def wire_s(self, trial: Trial) -> float:
        """How long the bytes of a step would take; predicted."""
        return trial.sent_bytes / self.bench.link_bytes_per_s

    def step_s(self, trial: Trial) -> float:
        """How long a step would take if nothing overlaps; predicted."""
        return self.compute_s + trial.coding_s + self.wire_s(trial)

    def worse(self, trial: Trial) -> float | None:
        """By which fraction its loss is above the exact one's."""
        exact = self.trials[0].loss
        return None if trial.loss is None or not exact else trial.loss / exact - 1

    def spread(self, trial: Trial) -> tuple[float, float] | None:
        """The least and the most of that among the seeds, if there are several."""
        exact = self.trials[0].losses
        if self.bench.seeds == 1 or self.worse(trial) is None or not all(exact):
            return None
        found = [loss / of_exact - 1 for loss, of_exact in zip(trial.losses, exact, strict=True)]
        return min(found), max(found)


def usual_codecs() -> list[str]:
    """All registered codecs, with options that suit a short training; not those that stand for others."""
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
    """Codecs by the text that asks for them, the exact one first whether it is asked for or not.

    One that applies momentum itself gets this one, unless its own is given.
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
            f"{text} stands for other codecs", where="--codecs", fix="name the codec that it would choose"
        )
    return codec


def compare_codecs(
    bench: Bench, codecs: Mapping[str, Codec], progress: Progress | None = None
) -> Comparison:
    """Train with each; the first is what the others are compared with."""
    from echelon.simulate.learner import Problem

    problem = Problem(Setting(model=bench.model, data=bench.data, test_samples=bench.test_samples))
    sizes = [
        p.numel() * p.element_size() for p in problem.build(bench.seed).parameters() if p.requires_grad
    ]
    compute_s: list[float] = []
    tell = progress or (lambda text, step: None)
    trials = [
        _mean([_train(bench, turn, problem, text, codec, compute_s, tell) for turn in range(bench.seeds)])
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
    turn: int,
    problem: Problem,
    text: str,
    codec: Codec,
    compute_s: list[float],
    progress: Progress,
) -> Trial:
    """Train with the seed of this turn."""
    import torch

    from echelon.simulate.order import Order

    seed = bench.seed + turn
    module = problem.build(seed)
    parameters = {name: p for name, p in module.named_parameters() if p.requires_grad}
    # A codec that has momentum of its own must find none in the optimizer: it would be applied twice.
    momentum = 0.0 if codec.momentum else bench.momentum
    optimizer = torch.optim.SGD(parameters.values(), lr=bench.lr, momentum=momentum)
    order = Order(problem.samples, seed)
    together = ReferenceGroup(codec, bench.workers, now=time.perf_counter)
    took: list[tuple[int, float, float]] = []
    every = max(1, bench.steps // _CURVE)
    broke_at = None
    with _alone(seed):
        curve = [_seen(problem, module, 0)]
        for step in range(1, bench.steps + 1):
            torch.manual_seed(seed + step)  # for dropout, whatever a codec has drawn meanwhile
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
                curve.append(_seen(problem, module, step))
            progress(text, turn * bench.steps + step)
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
    """Trainings with the same codec as one; broken if one of them is."""
    broken = [one.broke_at for one in trials if one.broke_at is not None]
    return Trial(
        codec=trials[0].codec,
        curve=tuple(
            Seen(
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


def _seen(problem: Problem, module: nn.Module, step: int) -> Seen:
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
    return Seen(step=step, loss=total / targets, accuracy=right / targets)


@contextmanager
def _alone(seed: int) -> Iterator[None]:
    """One thread, as sums of several differ from run to run; and random numbers that disturb nobody."""
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
            f"{name.replace('_', ' ')} is {value:g}",
            where="--" + name.replace("_", "-"),
            fix=f"give {wanted}",
        )


# Conclusions, as sentences

_CLOSE = 0.01  # a loss within this fraction of the exact one's is as good


def in_words(found: Comparison) -> list[str]:
    """Sentences: the smallest codec that learns as well, the fastest at this link, those that broke."""
    exact, *others = found.trials
    ended = [one for one in others if one.loss is not None]
    close = [one for one in ended if (worse := found.worse(one)) is not None and worse <= _CLOSE]
    said = []
    if close:
        best = max(close, key=found.smaller)
        said.append(
            f"Smallest codec whose loss is at most {100 * _CLOSE:.0f} % above {exact.codec}'s: "
            f"{best.codec}. It sends {show_times(found.smaller(best))} fewer bytes than float32; "
            f"its loss is {_above(found.worse(best) or 0.0)} {exact.codec}'s."
        )
    else:
        said.append(f"Every codec's loss is more than {100 * _CLOSE:.0f} % above {exact.codec}'s.")
    if ended:
        said.append(_quickest(found, close or ended, " with such a loss" if close else ""))
        said.append(_how_sure(found))
    said += [
        f"{one.codec} broke at step {one.broke_at}: a gradient was not finite."
        for one in found.trials
        if one.broke_at is not None
    ]
    return said


def _above(difference: float) -> str:
    return f"{100 * abs(difference):.1f} % {'above' if difference >= 0 else 'below'}"


def _how_sure(found: Comparison) -> str:
    if found.bench.seeds == 1:
        return (
            "Only one seed was trained; with another, differences change by about a percent. See --seeds."
        )
    seeds = found.bench.seeds
    return f"Losses are means of {seeds} seeds; in brackets, the least and the largest difference."


def _quickest(found: Comparison, trials: Sequence[Trial], among: str) -> str:
    exact = found.trials[0]
    quick = min(trials, key=found.step_s)
    gain = found.step_s(exact) / found.step_s(quick)
    if gain <= 1:
        return f"No codec{among} has a shorter predicted step at this link than {exact.codec}."
    return (
        f"Of the codecs{among}, {quick.codec} has the shortest predicted step at this link: "
        f"{gain:.1f} times as fast as {exact.codec}'s."
    )


def show_times(ratio: float) -> str:
    """A ratio for people: '31.8x'."""
    if not math.isfinite(ratio):
        return "-"
    return f"{ratio:,.{0 if ratio >= 100 else 1}f}x"
