"""One catalogue of all that a source's tasks wrote, or the error that names the first wrong row. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from echelon.data.chunk import Catalogue
from echelon.data.columns import pad_fix
from echelon.data.write import RowProblem, WrittenPart, disagreement
from echelon.errors import DataError


def collect(parts: Sequence[WrittenPart], folder: str) -> Catalogue:
    """The catalogue of the parts, which are in the order of the table's rows."""
    before = 0
    first: WrittenPart | None = None
    for part in parts:
        if part.problem is not None:
            raise _error(part.problem, before)
        if not part.chunks:
            continue
        first = first or part
        wrong = disagreement(first.shapes, first.tensors, part.shapes, part.tensors)
        if wrong is not None:
            raise _error(RowProblem(column=wrong[0], row=0, what=wrong[1], fix=pad_fix()), before)
        before += part.rows
    if first is None:
        raise DataError(
            "the data has no rows", where="loader_of", fix="check what was read, and its filters"
        )
    return Catalogue(
        folder=folder,
        form=first.form,
        tensors=first.tensors,
        chunks=tuple(chunk for part in parts for chunk in part.chunks),
    )


def _error(problem: RowProblem, before: int) -> DataError:
    row = before + problem.row
    if problem.column:
        return DataError(
            f"column {problem.column!r} {problem.what}",
            where=f"loader_of, column {problem.column!r}, row {row}",
            fix=problem.fix,
        )
    return DataError(problem.what, where=f"loader_of, from row {row} on", fix=problem.fix)
