"""Codec states by parameter: residuals, momentum, scales, and the number of rounds.

States belong to parameter names, so that buckets may change. A checkpoint holds the states of every worker.
For another number of workers, residuals are redistributed: they are sums of gradients that were never sent,
so only their sum over all workers matters, and each new worker takes an equal part of it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from echelon.codec.codec import Codec, State, owners, seed_of
from echelon.codec.reference import part_of

Saved = dict[str, dict[str, Tensor]]
_STEPS = "steps"


class States:
    """One worker's codec states for one model."""

    def __init__(self, codec: Codec) -> None:
        self._codec = codec
        self._states: dict[str, State] = {}
        self._steps: dict[str, int] = {}
        self._kept: dict[str, State] = {}
        self._kept_steps: dict[str, int] = {}

    def keep(self) -> None:
        """Remember all states: a round begins that may be void, because a worker is lost."""
        before, self._kept = self._kept, {}
        for name, state in self._states.items():
            rooms = before.get(name, {})
            self._kept[name] = {key: _copied(value, rooms.get(key)) for key, value in state.items()}
        self._kept_steps = dict(self._steps)

    def go_back(self) -> None:
        """The round is void: all states are what they were before it."""
        self._states = {
            name: {key: value.clone() for key, value in state.items()} for name, state in self._kept.items()
        }
        self._steps = dict(self._kept_steps)

    def of(self, name: str, length: int) -> State:
        """A parameter's state; a new one if it has none."""
        state = self._states.get(name)
        if state is None:
            state = self._states[name] = self._codec.begin(length)
        return state

    def slice(self, name: str, length: int, start: int, stop: int) -> State:
        """A range's state: views of the tensors that are as long as the parameter, the rest unchanged."""
        state = self.of(name, length)
        return state if start == 0 and stop == length else part_of(state, length, start, stop)

    def step(self, name: str) -> int:
        """How many rounds a parameter has had."""
        return self._steps.get(name, 0)

    def count(self, name: str) -> None:
        """Count a round of a parameter."""
        self._steps[name] = self.step(name) + 1

    def saturated(self) -> dict[str, int]:
        """How many values of each parameter have been too large for the codec."""
        found = {
            name: int(state["saturated"]) for name, state in self._states.items() if "saturated" in state
        }
        return {name: count for name, count in found.items() if count}

    def left_over(self) -> float:
        """The norm of all residuals."""
        residuals = [
            value for state in self._states.values() for key, value in state.items() if key in _UNSENT
        ]
        return (
            float(torch.stack([torch.linalg.vector_norm(part) for part in residuals]).norm())
            if residuals
            else 0.0
        )

    def save(self) -> Saved:
        """Copies of all states, for a checkpoint."""
        saved = {name: {key: value.clone() for key, value in s.items()} for name, s in self._states.items()}
        for name, steps in self._steps.items():
            saved.setdefault(name, {})[_STEPS] = torch.tensor(steps)
        return saved

    def shared(self) -> Saved:
        """The states with residuals of zero: those of a worker that comes new to the others."""
        return {
            name: {key: torch.zeros_like(value) if key in _RESIDUALS else value for key, value in s.items()}
            for name, s in self.save().items()
        }

    def load(self, saved: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Replace all states by saved ones."""
        self._states.clear()
        self._steps.clear()
        for name, state in saved.items():
            self._states[name] = {key: value.clone() for key, value in state.items() if key != _STEPS}
            if not self._states[name]:
                del self._states[name]
            if _STEPS in state:
                self._steps[name] = int(state[_STEPS])


def _copied(value: Tensor, room: Tensor | None) -> Tensor:
    if room is None or room.shape != value.shape or room.dtype != value.dtype:
        return value.clone()
    return room.copy_(value)


_UNSENT = {"residual", "gathered"}
_RESIDUALS = {"residual", "velocity", "gathered"}  # summed over workers; all else is the same on each


def handed_over(saved: Sequence[Saved], workers: int) -> list[Saved]:
    """States for another number of workers: residuals are divided into equal parts."""
    if len(saved) == workers:
        return list(saved)
    part = {
        name: {key: value / workers if key in _RESIDUALS else value for key, value in state.items()}
        for name, state in _all_of(saved).items()
    }
    return [part for _ in range(workers)]


def for_rail(saved: Sequence[Saved], sites: int, rails: int, rail: int) -> Saved:
    """States for a rail: for its own ranges the site's equal part of the residuals; zero for all others,
    which it would never send.
    """
    mine: Saved = {}
    for name, state in _all_of(saved).items():
        mine[name] = {key: value for key, value in state.items() if key not in _RESIDUALS}
        for key in _RESIDUALS & state.keys():
            start, stop = owners(len(state[key]), rails, seed_of(name))[rail]
            mine[name][key] = torch.zeros_like(state[key])
            mine[name][key][start:stop] = state[key][start:stop] / sites
    return mine


def _all_of(saved: Sequence[Saved]) -> Saved:
    """The states of all workers together: residuals are summed."""
    names = {name: None for one in saved for name in one}
    return {name: _whole([one[name] for one in saved if name in one]) for name in names}


def _whole(states: Sequence[Mapping[str, Any]]) -> dict[str, Tensor]:
    keys = {key: None for state in states for key in state}
    whole = {}
    for key in keys:
        values = [state[key] for state in states if key in state]
        whole[key] = torch.stack(values).sum(0) if key in _RESIDUALS else values[0]
    return whole
