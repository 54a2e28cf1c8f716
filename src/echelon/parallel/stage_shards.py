"""One stage of a pipeline whose optimizer states, gradients or parameters are divided among its workers.

The workers that have the same stage, one in each replica, divide its trained parameters into slices, as
`shards.py` does with a whole model. What differs is when things happen: a stage adds up the gradients of a
batch's micro-batches before they are summed over workers.

    level 1  gradients stay whole while backward passes of several calls add up (accumulation)
    level 2  they are summed, slice by slice, when a call's last micro-batch is done
    level 3  parameters are slices, but while a layer computes with them (`gathered_layers.py`)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from echelon.comm.group import Group
from echelon.parallel.shards import ShardedParameter, sharded_parameter
from echelon.parallel.slice_sums import SliceSums, SumsUnderWay, packed
from echelon.parallel.split import Gradients
from echelon.parallel.value_gather import ValueGather

_MOST_FLIGHTS = 2  # buckets at once: each has memory of its own


@dataclass(frozen=True, slots=True, kw_only=True)
class StageDivision:
    """How a stage is divided.

    divides  the workers that divide it; `weights` are their parts
    across   the workers with the same slices, if there are several sets
    """

    level: int
    divides: Group
    across: Group | None
    weights: Sequence[float]


class StageShards:
    """This worker's slices of the trained `parameters` of its stage."""

    def __init__(self, parameters: Sequence[nn.Parameter], division: StageDivision) -> None:
        divides, across, level = division.divides, division.across, division.level
        self.level = level
        self.group = divides
        self.counts = across is None or across.rank == 0  # each slice counts once in a norm
        self._sums = SliceSums(divides.fork(), across)
        self.values = ValueGather(divides.fork(), self._gathers_bytes)
        self.parameters = [
            sharded_parameter(p, division.weights, divides.rank, apart=level == 3) for p in parameters
        ]
        self._of = {id(one.parameter): one for one in self.parameters}
        self._places = {id(one): at for at, one in enumerate(self.parameters)}
        self._buckets = packed(self.parameters[::-1])
        self._lent: list[ShardedParameter] = []
        if level == 3:
            self.give_back(self.parameters)

    def of(self, parameter: Tensor) -> ShardedParameter | None:
        """The slices of a parameter, if it is one of these."""
        return self._of.get(id(parameter))

    def agreed_micro(self, count: int, rows: int) -> int:
        """The number of micro-batches of a call, the same for all: with level 3 layers gather together."""
        told = self.group.all_gather(torch.tensor([count, rows]))
        return min(max(int(one[0]) for one in told), *(int(one[1]) for one in told))

    # Gradients -------------------------------------------------------------------------------------

    def sum(self, gradients: Gradients) -> None:
        """Sum a call's gradients, which are given by parameter, and add them to those that are kept."""
        flights: list[SumsUnderWay] = []
        for members in self._buckets:
            given = [gradients[self._places[id(one)]] for one in members]
            flights.append(self._sums.begin(members, given, 1.0))
            for one in members:
                gradients[self._places[id(one)]] = None
            if len(flights) > _MOST_FLIGHTS:
                self._sums.land(flights.pop(0))
        for flight in flights:
            self._sums.land(flight)

    def show_slices(self) -> None:
        """Parameters and their gradients are this worker's slices, for the optimizer's step."""
        for one in self.parameters:
            one.show_slice()
            fresh, one.kept = one.kept, None
            if fresh is not None:
                p = one.parameter
                p.grad = fresh if p.grad is None else p.grad.add_(fresh)

    def taken_bytes(self) -> int:
        """What this worker has sent since this was asked before."""
        sent_bytes, self._sums.sent_bytes = self._sums.sent_bytes, 0
        return sent_bytes

    def _gathers_bytes(self, size_bytes: int) -> None:
        self._sums.sent_bytes += size_bytes

    # Values ----------------------------------------------------------------------------------------

    def show_whole(self) -> None:
        """Before a call: all parameters have all their values, unless layers gather them."""
        if self.level < 3:
            for one in self.parameters:
                one.show_whole()

    @torch.no_grad()
    def stepped(self, updated: Sequence[Tensor]) -> None:
        """An optimizer has updated these parameters' slices: the workers get all values again."""
        if self.level == 3:
            return
        ours = [self._of[id(p)] for p in updated if id(p) in self._of]
        ours = [one for one in ours if one.cut]
        for flight in self.values.begin(ours):
            self.values.land(flight)
        for one in ours:
            one.show_whole()

    def fill(self, wanted: Sequence[ShardedParameter]) -> None:
        """Make room for the whole values of these, gather them, and show them."""
        for one in wanted:
            resize(one, one.length)
        for flight in self.values.begin(wanted):
            self.values.land(flight)
        for one in wanted:
            one.show_whole()

    def give_back(self, parameters: Sequence[ShardedParameter]) -> None:
        """These are slices again, and their whole values take no memory."""
        for one in parameters:
            if not one.cut:
                one.show_slice()
                resize(one, 0)

    # State -----------------------------------------------------------------------------------------

    @property
    def lends(self) -> bool:
        """Whether parameters are shown whole that are slices otherwise."""
        return bool(self._lent)

    @torch.no_grad()
    def lend(self, *, values: bool = True) -> None:
        """Show whole parameters, until `take_back`; with level 3 in memory that others may keep.

        With `values` all workers call this.
        """
        cut = [one for one in self.parameters if one.cut]
        self._lent += cut
        if self.level < 3:
            for one in cut:
                one.show_whole()
            return
        if values:
            self.fill(cut)
        for one in cut:
            room = one.whole.clone() if values else torch.empty(one.length, dtype=one.mine.dtype)
            one.parameter.data = room.view(one.shape)
            one.cut = False
            resize(one, 0)

    def take_back(self) -> None:
        """What was lent is slices again."""
        lent, self._lent = self._lent, []
        for one in lent:
            one.show_slice()

    @torch.no_grad()
    def loaded(self) -> None:
        """Keep this worker's slices of values that were loaded into whole parameters."""
        if self.level == 3:
            for one in self._lent:
                begin, end = one.edges[self.group.rank]
                one.mine.copy_(one.parameter.data.reshape(-1)[begin:end])
        self.take_back()

    def close(self) -> None:
        """Parameters are whole where their memory is."""
        self.show_whole()


def resize(one: ShardedParameter, length: int) -> None:
    """Give back the memory of whole values, or take it again; views that autograd keeps stay valid."""
    storage = one.whole.untyped_storage()
    if storage.resizable():  # not if numpy has seen it, as with batch normalisation
        storage.resize_(length * one.whole.element_size())
