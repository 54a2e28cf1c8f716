"""Power-SGD: a matrix as the product of two thin ones, by one step of power iteration (Vogels et al. 2019).

A gradient M_w of worker w, rows x cols (the first dimension, all others), in two rounds of sums:

    P = sum of M_w Q;  P made orthonormal;  R = sum of M_w^T P;  the gradient is P R^T;  the next Q is R

So it is P P^T times the exact sum: its projection to `rank` directions, which get better from step to step
as Q is kept ("basis" in the state, the same on all workers; the first one is random). Feedback keeps
M_w - P (M_w^T P)^T on each worker: all of them and the gradient are the sum of what was given.

P and the gradient are computed from totals by operations on single elements, and sums in a fixed order, in
float64 for P: so all workers get the same bits, whatever their processors. Q's columns are scaled by powers
of two, which changes no direction and keeps gradients of any size from overflowing. A column without a
direction (a matrix of lower rank, or zeros) is left out of this step and random in the next.

Vectors, and matrices that two thin ones would not make smaller, travel as they are.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from echelon.codec.codec import RESIDUAL, CodecContext, State, Summed
from echelon.codec.sparse import BLOCK, Floats, bytes_of, numbers_of
from echelon.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor

BASIS = "basis"
_GIVEN = "given"  # only between rounds: the values to project
_LEFT = "left"  # only between rounds: P, or the total of what travels as it is
_NOTHING = 1e-12  # what is left of a column, next to what it was, if it has no direction of its own


@dataclass(frozen=True, slots=True, kw_only=True)
class PowerSgd(Summed):
    """Sends each weight matrix as a product of two matrices of `rank` columns, which can be summed."""

    name: ClassVar[str] = "power-sgd"
    whole: ClassVar[bool] = True
    rounds: ClassVar[int] = 2
    rank: int = 2
    feedback: bool = True

    def __post_init__(self) -> None:
        if self.rank < 1:
            raise ConfigError(
                f"a matrix of rank {self.rank} is nothing", where="rank", fix="give 1 or more, such as 2"
            )

    def write(self, values: Tensor, state: State, turn: CodecContext, rest: Tensor | None = None) -> Tensor:
        """Both thin matrices of one worker alone."""
        import torch

        size = self._size(turn, len(values))
        if size is None:
            payload = bytes_of(values)
            if rest is not None:
                rest.zero_()
            return payload
        matrix = values.view(size)
        left = _orthonormal(matrix @ self._basis(state, turn, size[1]))
        right = matrix.T @ left
        state[BASIS] = self._next_basis(right, turn)
        if rest is not None:
            product = torch.empty(size)
            _multiply(left, right, product)
            torch.sub(values, product.view(-1), out=rest)
        return bytes_of(torch.cat([left.flatten(), right.flatten()]))

    def read(self, payload: Tensor, out: Tensor, turn: CodecContext, *, add: bool = False) -> None:
        """Their product."""
        import torch

        size = self._size(turn, len(out))
        values = numbers_of(payload, len(out) if size is None else sum(size) * self.rank)
        if size is not None:
            cut = size[0] * self.rank
            product = torch.empty(size)
            _multiply(values[:cut].view(-1, self.rank), values[cut:].view(-1, self.rank), product)
            values = product.view(-1)
        if add:
            out += values
        else:
            out.copy_(values)

    def bound(self, values: Tensor) -> Tensor:
        """The norm of all: a projection is no farther away than zero is. No more is known."""
        import torch

        norm = float(torch.linalg.vector_norm(values, dtype=torch.float64)) * (1 + 1e-5)
        return torch.full(
            (len(values),), norm + torch.finfo(torch.float32).tiny, dtype=torch.float64
        ).float()

    def first(self, values: Tensor, state: State, turn: CodecContext) -> Tensor:
        """M Q, or the values as they are."""
        given = state[RESIDUAL].add_(values) if self.feedback else values
        size = self._size(turn, len(values))
        if size is None:
            numbers = given.clone()
            if self.feedback:
                given.zero_()
            return numbers
        state[_GIVEN] = given
        return (given.view(size) @ self._basis(state, turn, size[1])).flatten()

    def further(self, total: Tensor, state: State, turn: CodecContext) -> Tensor:
        """M^T P, for the total P made orthonormal; nothing, if all has been summed."""
        given = state.pop(_GIVEN, None)
        if given is None:
            state[_LEFT] = total.clone()
            return total.new_empty(0)
        left = _orthonormal(total.view(-1, self.rank))
        matrix = given.view(len(left), -1)
        right = matrix.T @ left
        if self.feedback:
            matrix.addmm_(left, right.T, alpha=-1)
        state[_LEFT] = left
        return right.flatten()

    def finish(self, total: Tensor, out: Tensor, state: State, turn: CodecContext) -> None:
        """P R^T; R is the next basis."""
        left = state.pop(_LEFT)
        if left.dim() == 1:
            out.copy_(left)
            return
        right = total.view(-1, self.rank)
        _multiply(left, right, out.view(len(left), len(right)))
        state[BASIS] = self._next_basis(right, turn)

    def _size(self, turn: CodecContext, length: int) -> tuple[int, int] | None:
        """Rows and columns; None for what travels as it is."""
        if len(turn.shape) < 2 or math.prod(turn.shape) != length or not length:
            return None
        rows, cols = turn.shape[0], length // turn.shape[0]
        return (rows, cols) if self.rank * (rows + cols) < length else None

    def _basis(self, state: State, turn: CodecContext, cols: int) -> Tensor:
        import torch

        if BASIS in state and state[BASIS].shape == (cols, self.rank):
            return state[BASIS]
        return torch.from_numpy(_random(turn, cols, self.rank))

    def _next_basis(self, right: Tensor, turn: CodecContext) -> Tensor:
        import torch

        basis: Floats = right.numpy().copy()
        most = np.abs(basis).max(axis=0)
        dead = ~np.isfinite(most) | (most == 0)
        basis = np.ldexp(basis, -np.frexp(np.where(dead, np.float32(1), most))[1])
        if dead.any():
            basis[:, dead] = _random(turn, len(basis), self.rank)[:, dead]
        return torch.from_numpy(basis)


def _random(turn: CodecContext, rows: int, columns: int) -> Floats:
    return turn.stream(shared=True).standard_normal((rows, columns), dtype=np.float32)


def _orthonormal(matrix: Tensor) -> Tensor:
    """Orthonormal columns of the same span, by Gram-Schmidt; zeros for a column that adds nothing to it."""
    import torch

    columns = np.ascontiguousarray(matrix.numpy().T, np.float64)
    for number, column in enumerate(columns):
        before = math.sqrt(np.square(column).sum())
        if not math.isfinite(before):
            column[:] = 0
            continue
        for _ in range(2):  # twice, for once leaves rounding errors of the first subtraction
            for other in columns[:number]:
                column -= (other * column).sum() * other
        after = math.sqrt(np.square(column).sum())
        if after <= _NOTHING * before:
            column[:] = 0
        else:
            column /= after
    return torch.from_numpy(np.ascontiguousarray(columns.T, np.float32))


def _multiply(left: Tensor, right: Tensor, out: Tensor) -> None:
    """left times right^T, as sums of products of single elements, in the order of columns."""
    sides: Floats = left.numpy()
    rows: Floats = np.ascontiguousarray(right.numpy().T)
    target: Floats = out.numpy()
    step = max(1, BLOCK // max(1, target.shape[1]))
    scratch = np.empty((min(step, len(target)), target.shape[1]), np.float32)
    with np.errstate(over="ignore", invalid="ignore"):
        for start in range(0, len(target), step):
            part = target[start : start + step]
            product = scratch[: len(part)]
            np.multiply(sides[start : start + step, :1], rows[0], out=part)
            for number in range(1, len(rows)):
                np.multiply(sides[start : start + step, number : number + 1], rows[number], out=product)
                np.add(part, product, out=part)
