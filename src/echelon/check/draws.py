"""Random tensors are the same alone and on workers: recorded alone, drawn again by each worker.

A worker finds the draw that was made alone at the same place in the script, in the same step. It sets the
generator to the state that it had there, draws the tensor of the whole batch, and takes its own rows. So it
does not matter what a rank has drawn before. What cannot be found, or cut, is noted.

Operations are seen below autograd, where dropout, attention and torch's own recurrent layers draw as well.
Only the thread that runs the script is watched.
"""

from __future__ import annotations

import os
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO, Protocol

import msgspec
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from echelon.check.cuts import BatchPart, cut_of
from echelon.check.notes import UnalignedDraw
from echelon.check.recipes import Recipe, is_random, recipe_of

_OWN = (f"{Path(torch.__file__).parent}{os.sep}", f"{Path(__file__).parents[1]}{os.sep}", "<frozen ")
_MOST = 100_000  # draws that are recorded; each takes five kilobytes
_PICKS = ("randint", "randperm", "multinomial", "random_")
_HALVES = (torch.float16, torch.bfloat16)


class DrawNote(msgspec.Struct, frozen=True, kw_only=True):
    """One draw, made alone. `at` and `length` say where the generator's state is."""

    segment: int
    operation: str
    place: str
    shape: tuple[int, ...]
    at: int
    length: int


class DrawRecord:
    """Writes the draws of a script that runs alone."""

    def __init__(self, folder: Path) -> None:
        self._notes = (folder / "draws.jsonl").open("wb")
        self._states = (folder / "states.bin").open("wb")
        self._count = 0

    def add(self, segment: int, operation: str, place: str, shape: tuple[int, ...], state: Tensor) -> None:
        """Note a draw, and the state of its generator before it."""
        self._count += 1
        if self._count > _MOST:
            return
        data = bytes(state.numpy())
        note = DrawNote(
            segment=segment,
            operation=operation,
            place=place,
            shape=shape,
            at=self._states.tell(),
            length=len(data),
        )
        self._states.write(data)
        self._notes.write(msgspec.json.encode(note) + b"\n")

    def close(self) -> None:
        """Write what is left."""
        self._notes.close()
        self._states.close()


class RecordedDraws:
    """Finds the draws that were made alone."""

    def __init__(self, folder: Path) -> None:
        self._by_place: dict[tuple[int, str, str], list[DrawNote]] = defaultdict(list)
        with (folder / "draws.jsonl").open("rb") as lines:
            for line in lines:
                note = msgspec.json.decode(line, type=DrawNote)
                self._by_place[note.segment, note.operation, note.place].append(note)
        self._taken: dict[tuple[int, str, str], int] = defaultdict(int)
        self._states: BinaryIO = (folder / "states.bin").open("rb")

    def next(self, segment: int, operation: str, place: str) -> DrawNote | None:
        """The next draw of this segment and place; None if there were no more alone."""
        key = segment, operation, place
        index = self._taken[key]
        self._taken[key] += 1
        made = self._by_place.get(key, ())
        return made[index] if index < len(made) else None

    def state(self, note: DrawNote) -> Tensor:
        """The generator's state before a draw."""
        self._states.seek(note.at)
        return torch.frombuffer(bytearray(self._states.read(note.length)), dtype=torch.uint8)

    def fewer(self, segment: int) -> list[tuple[str, str, int, int]]:
        """Place, operation and both counts where this worker drew in a segment, but less often."""
        return [
            (place, operation, taken, len(self._by_place[segment, operation, place]))
            for (then, operation, place), taken in self._taken.items()
            if then == segment and taken < len(self._by_place.get((segment, operation, place), ()))
        ]

    def close(self) -> None:
        """Close the file of states."""
        self._states.close()


class PartsOfBatches(Protocol):
    """Knows this worker's parts of the batches that were handed out last."""

    def parts(self) -> Sequence[BatchPart]:
        """The newest first."""


class AlignedDraws(TorchDispatchMode):
    """Watches all of torch's operations in this thread, and makes random ones the same everywhere.

    segment  how many optimizer steps the script has taken
    picks    whether integers were drawn, with which a script may choose its samples
    active   whether draws are watched: from the first `prepare` on, before which all workers draw the same
    """

    supports_higher_order_operators = True

    def __init__(
        self,
        target: DrawRecord | RecordedDraws,
        batches: PartsOfBatches,
        *,
        rank: int,
        workers: int,
        alternate: bool = False,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.segment = 0
        self.active = False
        self.half = self.picks = False
        self._target = target
        self._batches = batches
        self._rank = rank
        self._workers = workers
        self._alternate = alternate
        self.guessed: dict[str, None] = {}
        self._process = os.getpid()
        self._unaligned: dict[tuple[str, str], UnalignedDraw] = {}
        self._random: dict[Any, bool] = {}

    @property
    def unaligned(self) -> list[UnalignedDraw]:
        """The draws that could not be aligned, the first of each place."""
        return list(self._unaligned.values())

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Let everything draw as it is."""
        before, self.active = self.active, False
        try:
            yield
        finally:
            self.active = before

    def next_segment(self) -> None:
        """The optimizer has stepped."""
        if isinstance(self._target, RecordedDraws):
            for place, operation, mine, alone in self._target.fewer(self.segment):
                why = f"one alone draws {alone} times there in a step, rank {self._rank} {mine} times"
                self._note(place, operation, why)
        self.segment += 1

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if not self.active or os.getpid() != self._process:  # a loader's process is a fork of this one
            return func(*args, **kwargs)
        if func not in self._random:
            self._random[func] = is_random(func)
        if not self._random[func]:
            result = func(*args, **kwargs)
            if not self.half and isinstance(result, Tensor) and result.dtype in _HALVES:
                self.half = True
            return result
        generator = kwargs.get("generator") or _default_generator(args, kwargs)
        if generator is None:
            return func(*args, **kwargs)
        return self._draw(func, args, kwargs, generator)

    def _draw(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], generator: torch.Generator
    ) -> Any:
        place, recipe = place_in_script(), recipe_of(func)
        operation = str(func)
        self.picks |= operation.removeprefix("aten.").partition(".")[0] in _PICKS
        if isinstance(self._target, DrawRecord):
            state = generator.get_state()
            result, shape = _as_it_is(func, args, kwargs, recipe)
            self._target.add(self.segment, operation, place, shape, state)
            return result
        note = self._target.next(self.segment, operation, place)
        if note is None:
            self._note(place, operation, "one alone does not draw there in the same step")
            return _as_it_is(func, args, kwargs, recipe)[0]
        generator.set_state(self._target.state(note))
        return self._again(func, args, kwargs, recipe, note)

    def _again(
        self,
        func: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        recipe: Recipe | None,
        note: DrawNote,
    ) -> Any:
        """Draw what was drawn alone, and take this worker's rows of it."""
        own = recipe.shape(func, args) if recipe is not None else None
        if recipe is None or own == note.shape:
            result, shape = _as_it_is(func, args, kwargs, recipe)
            if shape != note.shape:
                self._note(
                    note.place, note.operation, f"a draw of {_sizes(note.shape)} cannot be shared out"
                )
            return result
        assert own is not None
        parts = self._batches.parts()
        cut = cut_of(
            note.shape, own, parts, rank=self._rank, workers=self._workers, alternate=self._alternate
        )
        if cut is None:
            sizes = f"{_sizes(note.shape)} alone and {_sizes(own)} on rank {self._rank}"
            self._note(note.place, note.operation, f"{sizes} are no parts of a batch")
            return _as_it_is(func, args, kwargs, recipe)[0]

        if cut.guessed:
            self.guessed[note.place] = None

        def rows(tensor: Tensor) -> Tensor:
            along = torch.arange(cut.start, cut.stop, cut.every, device=tensor.device)
            return tensor.index_select(cut.axis, along)

        return recipe.draw(func, args, kwargs, note.shape, rows)

    def _note(self, place: str, operation: str, why: str) -> None:
        what = operation.removeprefix("aten.").partition(".")[0]
        draw = UnalignedDraw(step=self.segment, place=place, what=what, why=why)
        self._unaligned.setdefault((place, what), draw)


def _as_it_is(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], recipe: Recipe | None
) -> tuple[Any, tuple[int, ...]]:
    """Draw without a cut; returns the result, and the shape that was drawn."""
    if recipe is None:
        result = func(*args, **kwargs)
        first = result[0] if isinstance(result, (tuple, list)) else result
        return result, tuple(first.shape) if isinstance(first, Tensor) else ()
    shape = recipe.shape(func, args)
    return recipe.draw(func, args, kwargs, shape, lambda drawn: drawn), shape


def _default_generator(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Generator | None:
    device = next((argument.device for argument in args if isinstance(argument, Tensor)), None)
    device = torch.device(kwargs.get("device") or device or "cpu")
    if device.type == "cpu":
        return torch.default_generator
    if device.type == "cuda":
        return torch.cuda.default_generators[device.index or 0]
    return None


def called_by_echelon() -> bool:
    """Whether the caller of the function that asks was called by Echelon's own code."""
    return sys._getframe(2).f_code.co_filename.startswith(_OWN[1])


def place_in_script() -> str:
    """File and line of the innermost frame that is neither torch's nor Echelon's."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_OWN):
        frame = frame.f_back
    file = frame.f_code.co_filename
    with suppress(ValueError, OSError):
        file = str(Path(file).relative_to(Path.cwd()))
    return f"{file}:{frame.f_lineno}"


def _sizes(shape: tuple[int, ...]) -> str:
    return " x ".join(map(str, shape)) or "one number"
