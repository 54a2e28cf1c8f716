"""What does a model cost on this worker? Forward and backward by batch size, gradients by layer, memory.

Passes of several sizes are timed in turns. A pass is repeated until it has taken several periods of a CPU
quota: a shorter time could be a burst that the quota has not stopped yet. The cost of s samples,
fixed_s + s * per_sample_s, is fitted to the medians, with relative errors. When a gradient is ready is read
on the CPU clock of the training thread, which stands still while others have the core.

Profiling changes nothing: weights, buffers, gradients, the optimizer's states and random numbers are
restored. Call it before the model is prepared, else workers would wait for each other.
"""

from __future__ import annotations

import copy
import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from statistics import median

import numpy as np
import psutil  # type: ignore[import-untyped]
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from echelon.errors import ModelError
from echelon.plan.job import ComputeCost, JobProfile, Layer
from echelon.train import batchnorm, linear

LossOf = Callable[[int], Callable[[], Tensor]]
Pass = Callable[[], None]

_LONG_S = 0.08  # four periods of a lab's quota
_ROUNDS = 5
_READY_PASSES = 4
_FEWEST_PASSES = 4  # of a size, within the limit


def profile_model(
    name: str,
    model: nn.Module,
    loss_of: LossOf,
    optimizer: Optimizer | None,
    *,
    batch: int,
    sizes: Sequence[int] = (),
    limit_s: float = 2.0,
) -> JobProfile:
    """Measure the job. `loss_of(n)` gives a function that runs a forward pass on n samples.

    `sizes` are the shares to time, by default up to `batch`. Sizes that do not fit `limit_s` are left out,
    but two are always timed, and each at least once.
    """
    resident_bytes = psutil.Process().memory_info().rss
    with _unchanged(model, optimizer):
        model.train()
        sizes = sorted({max(1, size) for size in sizes} or _default_sizes(batch))
        passes = _affordable(sizes, lambda size: _pass_of(model, loss_of(size)), limit_s)
        largest = max(passes)
        seconds = _timed(passes, limit_s)
        layers = _layers(model, passes[largest], largest)
        fixed_bytes, sample_bytes = _activations(model, passes)
        cost = _cost(seconds, _apply_s(optimizer, limit_s / 10))
        state_bytes = _state_bytes(optimizer)
    gradient_bytes = sum(layer.size_bytes for layer in layers)
    weight_bytes = sum(_bytes(tensor) for tensor in (*model.parameters(), *model.buffers()))
    base_bytes = max(resident_bytes, weight_bytes) + 2 * gradient_bytes + state_bytes + fixed_bytes
    return JobProfile(
        name=name,
        batch=batch,
        cost=cost,
        layers=layers,
        base_bytes=float(base_bytes),  # gradients count twice: also where they are reduced
        sample_bytes=sample_bytes,
        exchanges=2 * len(batchnorm.layers(model)),
    )


def _default_sizes(batch: int) -> set[int]:
    """At least three, and no single sample: batch normalisation refuses it."""
    parts = {max(2, batch // part) for part in (8, 4, 2, 1)}
    return parts if len(parts) >= 3 else {2, 3, 4} | parts


def _pass_of(model: nn.Module, closure: Callable[[], Tensor]) -> Pass:
    """Forward and backward, as in a loop that clears gradients."""

    def run() -> None:
        model.zero_grad()
        loss = closure()
        if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.requires_grad:
            raise ModelError(
                "the forward pass to profile did not return a loss with a gradient",
                where="profile_model, loss_of",
                fix="let loss_of(n)() return one number that depends on the model's parameters",
            )
        loss.backward()

    return run


def _affordable(sizes: Sequence[int], pass_of: Callable[[int], Pass], limit_s: float) -> dict[int, Pass]:
    """Warm up with each size, the smallest first; without the sizes that would take too long."""
    kept: dict[int, Pass] = {}
    took_s = 0.0
    for size in sizes if len(sizes) > 1 else (*sizes, 2 * sizes[0]):  # a line needs two points
        if len(kept) >= 2 and took_s * size / max(kept) * _FEWEST_PASSES > limit_s:
            break
        kept[size] = pass_of(size)
        kept[size]()
        begun = time.perf_counter()
        kept[size]()
        took_s = time.perf_counter() - begun
    return kept


def _timed(passes: dict[int, Pass], limit_s: float) -> dict[int, float]:
    """Seconds of a pass of each size: the median of rounds."""
    round_s = min(_LONG_S, limit_s / (len(passes) * _ROUNDS))
    found: dict[int, list[float]] = {size: [] for size in passes}
    begun = time.perf_counter()
    for at in range(_ROUNDS):
        if at and time.perf_counter() - begun > limit_s:
            break
        for size, run in passes.items():
            found[size].append(_mean_s(run, round_s))
    return {size: median(seconds) for size, seconds in found.items()}


def _mean_s(action: Callable[[], object], least_s: float) -> float:
    """The mean seconds of an action that is repeated for so long."""
    begun = time.perf_counter()
    count = 0
    while True:
        action()
        count += 1
        took_s = time.perf_counter() - begun
        if took_s >= least_s:
            return took_s / count


def _apply_s(optimizer: Optimizer | None, limit_s: float) -> float:
    """Seconds of an update with the gradients of the last pass."""
    if optimizer is None:
        return 0.0
    optimizer.step()  # creates its states
    return median(_mean_s(optimizer.step, limit_s / _ROUNDS) for _ in range(_ROUNDS))


def _cost(seconds: dict[int, float], apply_s: float) -> ComputeCost:
    """The line with the least relative errors; neither part is negative."""
    sizes = np.array(list(seconds), dtype=float)
    times = np.array(list(seconds.values()))
    scaled = np.stack([1 / times, sizes / times], axis=1)
    (fixed_s, per_sample_s), *_ = np.linalg.lstsq(scaled, np.ones(len(times)), rcond=None)
    if per_sample_s <= 0:
        fixed_s, per_sample_s = float(np.mean(times)), 0.0
    elif fixed_s < 0:
        rates = sizes / times
        fixed_s, per_sample_s = 0.0, float(rates.sum() / (rates * rates).sum())
    return ComputeCost(fixed_s=float(fixed_s), per_sample_s=float(per_sample_s), apply_s=apply_s)


def _layers(model: nn.Module, run: Pass, size: int) -> tuple[Layer, ...]:
    """Every parameter that is trained, in the model's order, each as a layer: so buckets hold them."""
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    shapes = {
        f"{name}.weight".lstrip("."): layer.weight.shape for name, layer in linear.eligible(model).items()
    }
    with _rows(model, size) as rows:
        ready = _ready_at([p for _, p in named], run)
    return tuple(
        Layer(
            name=name,
            size_bytes=_bytes(p),
            ready_at=ready.get(id(p), 1.0),
            factors=(int(shapes[name][0]), int(shapes[name][1])) if name in shapes else (0, 0),
            rows=rows.get(name, 1),
        )
        for name, p in named
    )


def _ready_at(parameters: Sequence[nn.Parameter], run: Pass) -> dict[int, float]:
    """When each gradient is ready, as a fraction of the pass; by the parameter's id."""
    marks: dict[int, float] = {}

    def mark(p: Tensor) -> None:
        marks[id(p)] = time.thread_time()

    found: dict[int, list[float]] = {}
    handles = [p.register_post_accumulate_grad_hook(mark) for p in parameters]
    try:
        for _ in range(_READY_PASSES):
            marks.clear()
            begun = time.thread_time()
            run()
            took_s = max(time.thread_time() - begun, 1e-9)
            for key, at in marks.items():
                found.setdefault(key, []).append((at - begun) / took_s)
    finally:
        for handle in handles:
            handle.remove()
    return {key: min(1.0, max(0.0, median(values))) for key, values in found.items()}


@contextmanager
def _rows(model: nn.Module, size: int) -> Iterator[dict[str, int]]:
    """While it is entered: the rows per sample of each linear layer's weight."""
    rows: dict[str, int] = {}
    handles = []
    for name, layer in linear.eligible(model).items():

        def count(_layer: nn.Module, _inputs: object, out: Tensor, name: str = name) -> None:
            rows[f"{name}.weight".lstrip(".")] = max(1, out.numel() // out.shape[-1] // size)

        handles.append(layer.register_forward_hook(count))
    try:
        yield rows
    finally:
        for handle in handles:
            handle.remove()


def _activations(model: nn.Module, passes: dict[int, Pass]) -> tuple[float, float]:
    """Bytes that forward keeps for backward: the fixed part, and for each sample."""
    few, many = min(passes), max(passes)
    least, most = (_kept_bytes(model, passes[size]) for size in (few, many))
    sample_bytes = max(0.0, (most - least) / (many - few))
    return max(0.0, least - few * sample_bytes), sample_bytes


def _kept_bytes(model: nn.Module, run: Pass) -> int:
    own = {tensor.untyped_storage().data_ptr() for tensor in (*model.parameters(), *model.buffers())}
    kept: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        run()
    return sum(kept.values())


def _state_bytes(optimizer: Optimizer | None) -> int:
    if optimizer is None:
        return 0
    return sum(
        _bytes(value)
        for state in optimizer.state.values()
        for value in (state.values() if isinstance(state, dict) else ())
        if isinstance(value, Tensor)
    )


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


@contextmanager
def _unchanged(model: nn.Module, optimizer: Optimizer | None) -> Iterator[None]:
    """Restores the model, its gradients, the optimizer and all random numbers."""
    tensors = [*model.parameters(), *model.buffers()]
    values = [tensor.detach().clone() for tensor in tensors]
    gradients = [p.grad for p in model.parameters()]
    modes = [(module, module.training) for module in model.modules()]
    state = copy.deepcopy(optimizer.state_dict()) if optimizer is not None else {}
    numbers = torch.get_rng_state(), random.getstate(), np.random.get_state()
    for p in model.parameters():
        p.grad = None
    try:
        yield
    finally:
        with torch.no_grad():
            for tensor, value in zip(tensors, values, strict=True):
                tensor.copy_(value)
        for p, gradient in zip(model.parameters(), gradients, strict=True):
            p.grad = gradient
        for module, training in modes:
            module.training = training
        if optimizer is not None:
            optimizer.state.clear()
            optimizer.load_state_dict(state)
        torch.set_rng_state(numbers[0])
        random.setstate(numbers[1])
        np.random.set_state(numbers[2])
