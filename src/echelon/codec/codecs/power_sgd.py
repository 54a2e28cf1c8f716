"""Power-SGD: a matrix as the product of two thin ones, by one step of power iteration (Vogels et al. 2019).

The gradient M_w of worker w, rows x cols (the first dimension, all others), takes two rounds of sums:

    P = sum of M_w Q;  P made orthonormal;  R = sum of M_w^T P;  the gradient is P R^T;  the next Q is R

The result is P P^T times the exact sum: its projection to `rank` directions, which improve from step to
step because Q is kept ("basis" in the state, equal on all workers; the first one is random). Feedback keeps
M_w - P (M_w^T P)^T on each worker: these residuals plus the gradient are the sum of the inputs.

P and the gradient are computed from totals by elementwise operations and sums in a fixed order, in float64
for P, so all workers get the same bits on any processor. Q's columns are scaled by powers of two, which
changes no direction and avoids overflow. A column without a direction (a matrix of lower rank, or zeros) is
left out of this step and is random in the next.

Vectors, and matrices that two thin ones would not make smaller, are sent unencoded.
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
_LEFT = "left"  # only between rounds: P, or the total of an unencoded parameter
_NOTHING = 1e-12  # a column whose norm shrinks below this part of itself has no direction of its own


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
            raise ConfigError(f"rank cannot be {self.rank}", where="rank", fix="give 1 or more, such as 2")

    def write(
        self, values: Tensor, state: State, context: CodecContext, rest: Tensor | None = None
    ) -> Tensor:
        """Both thin matrices of this worker alone."""
        import torch

        size = self._size(context, len(values))
        if size is None:
            payload = bytes_of(values)
            if rest is not None:
                rest.zero_()
            return payload
        matrix = values.view(size)
        left = _orthonormal(matrix @ self._basis(state, context, size[1]))
        right = matrix.T @ left
        state[BASIS] = self._next_basis(right, context)
        if rest is not None:
            product = torch.empty(size)
            _multiply(left, right, product)
            torch.sub(values, product.view(-1), out=rest)
        return bytes_of(torch.cat([left.flatten(), right.flatten()]))

    def read(self, payload: Tensor, out: Tensor, context: CodecContext, *, add: bool = False) -> None:
        """The product of the two matrices."""
        import torch

        size = self._size(context, len(out))
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
        """The norm of all values: a projection is no farther away than zero. No tighter bound is known."""
        import torch

        norm = float(torch.linalg.vector_norm(values, dtype=torch.float64)) * (1 + 1e-5)
        return torch.full(
            (len(values),), norm + torch.finfo(torch.float32).tiny, dtype=torch.float64
        ).float()

    def first(self, values: Tensor, state: State, context: CodecContext) -> Tensor:
        """M Q, or the unencoded values."""
        given = state[RESIDUAL].add_(values) if self.feedback else values
        size = self._size(context, len(values))
        if size is None:
            numbers = given.clone()
            if self.feedback:
                given.zero_()
            return numbers
        state[_GIVEN] = given
        return (given.view(size) @ self._basis(state, context, size[1])).flatten()

    def further(self, total: Tensor, state: State, context: CodecContext) -> Tensor:
        """M^T P, for the total P made orthonormal; nothing for an unencoded parameter."""
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

    def finish(self, total: Tensor, out: Tensor, state: State, context: CodecContext) -> None:
        """P R^T; R becomes the next basis."""
        left = state.pop(_LEFT)
        if left.dim() == 1:
            out.copy_(left)
            return
        right = total.view(-1, self.rank)
        _multiply(left, right, out.view(len(left), len(right)))
        state[BASIS] = self._next_basis(right, context)

    def _size(self, context: CodecContext, length: int) -> tuple[int, int] | None:
        """Rows and columns; None for a parameter that is sent unencoded."""
        if len(context.shape) < 2 or math.prod(context.shape) != length or not length:
            return None
        rows, cols = context.shape[0], length // context.shape[0]
        return (rows, cols) if self.rank * (rows + cols) < length else None

    def _basis(self, state: State, context: CodecContext, cols: int) -> Tensor:
        import torch

        if BASIS in state and state[BASIS].shape == (cols, self.rank):
            return state[BASIS]
        return torch.from_numpy(_random(context, cols, self.rank))

    def _next_basis(self, right: Tensor, context: CodecContext) -> Tensor:
        import torch

        basis: Floats = right.numpy().copy()
        most = np.abs(basis).max(axis=0)
        dead = ~np.isfinite(most) | (most == 0)
        basis = np.ldexp(basis, -np.frexp(np.where(dead, np.float32(1), most))[1])
        if dead.any():
            basis[:, dead] = _random(context, len(basis), self.rank)[:, dead]
        return torch.from_numpy(basis)


def _random(context: CodecContext, rows: int, columns: int) -> Floats:
    return context.stream(shared=True).standard_normal((rows, columns), dtype=np.float32)


def _orthonormal(matrix: Tensor) -> Tensor:
    """Orthonormal columns of the same span, by Gram-Schmidt; zeros for a linearly dependent column."""
    import torch

    columns = np.ascontiguousarray(matrix.numpy().T, np.float64)
    for number, column in enumerate(columns):
        before = math.sqrt(np.square(column).sum())
        if not math.isfinite(before):
            column[:] = 0
            continue
        for _ in range(2):  # twice, because the first pass leaves rounding errors
            for other in columns[:number]:
                column -= (other * column).sum() * other
        after = math.sqrt(np.square(column).sum())
        if after <= _NOTHING * before:
            column[:] = 0
        else:
            column /= after
    return torch.from_numpy(np.ascontiguousarray(columns.T, np.float32))


def _multiply(left: Tensor, right: Tensor, out: Tensor) -> None:
    """left times right^T, as elementwise products summed in the order of columns."""
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
