"""Which codec encodes a run's gradients, what it must not be combined with, and its residuals.

There is one Encoding for each run. Every model has an encoder of its own: its parameters' states, and the
codec thread.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from echelon.codec.codec import CODECS, Codec
from echelon.codec.codecs.auto import AutoCodec
from echelon.codec.codecs.between import Between
from echelon.codec.codecs.none import NoCodec
from echelon.codec.fitting import inner_of, refuse_momentum, same_codec
from echelon.comm.group import Group
from echelon.comm.meet.links import Links
from echelon.errors import ConfigError
from echelon.reduce.encoded import cost, route
from echelon.reduce.encoded.encoder import ModelEncoder
from echelon.reduce.encoded.states import Saved, for_rail, handed_over
from echelon.train.families.synchronizer import Explain

Sites = Sequence[Sequence[int]]


class Encoding:
    """How one worker's gradients are encoded; `sites` are groups of workers that are near each other."""

    def __init__(
        self, text: str, group: Group, *, links: Links | None, sites: Sites, explain: Explain
    ) -> None:
        self._text = text
        CODECS.build(text, where="--codec")
        self._group = group
        self._links = links
        self._sites = sites
        self._explain = explain
        self._encoders: list[ModelEncoder | None] = []
        self._models: list[nn.Module] = []
        self._texts: list[str] = []  # each model's codec, as the user could have written it

    def _asked(self, text: str) -> Codec:
        return CODECS.build(text or self._text, where="codec")

    def active(self, text: str = "") -> bool:
        """Whether this codec, or the run's, changes how gradients are sent."""
        codec = self._asked(text)
        alone = self._group.size == 1 and not inner_of(codec).momentum
        return not isinstance(codec, NoCodec) and not alone

    def check(self, optimizer: Optimizer) -> None:
        """Refuse an optimizer whose momentum the codec would apply a second time."""
        held = {id(p) for group in optimizer.param_groups for p in group["params"]}
        for model, coding in zip(self._models, self._encoders, strict=True):
            if coding is not None and any(id(p) in held for p in model.parameters()):
                check_momentum(coding.codec, optimizer)

    def add(self, model: nn.Module, text: str = "") -> ModelEncoder | None:
        """The encoder of a model; None if its gradients are sent unencoded. All workers call this."""
        self._texts.append(text or self._text)
        coding = self._coding(model, self._asked(text)) if self.active(text) else None
        self._models.append(model)
        self._encoders.append(coding)
        if coding is not None:
            self._look_at(model, coding)
        return coding

    def _look_at(self, model: nn.Module, coding: ModelEncoder) -> None:
        """Record which parameters are sent unencoded; refuse them if the codec applies the momentum."""
        codec = coding.codec
        trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad and p.numel()]
        others = [name for name, p in trained if not coding.fits(p)]
        if others and codec.momentum:
            raise ConfigError(
                f"codec {codec.name} applies the momentum, but not to {others[0]}, which it cannot encode",
                where="--codec",
                fix=f"codecs encode float32 parameters on the CPU; use {codec.name}(momentum=0) and give "
                "the optimizer its momentum",
            )
        if others:
            count = "one parameter" if len(others) == 1 else f"{len(others)} parameters"
            why = (
                f"{count} are sent unencoded ({others[0]} ...): codecs encode float32 parameters on the CPU"
            )
            self._explain("codec, exceptions", why, f"codec {codec.name}: {why}")
        if codec.feedback and not codec.contracts:
            why = "its errors may be larger than gradients, so its residuals grow from step to step"
            self._explain("codec feedback", why, f"codec {codec.name} with feedback: {why}")

    def _coding(self, model: nn.Module, codec: Codec) -> ModelEncoder | None:
        between = isinstance(codec, Between)
        if isinstance(codec, Between):
            codec = codec.inner
        elif isinstance(codec, AutoCodec):
            chosen = self._choose(codec, model)
            codec, between = CODECS.build(chosen.codec), chosen.between
            self._texts[-1] = f"between({chosen.codec})" if between else chosen.codec
            self._explain("codec", chosen.reason, f"codec auto chose {chosen.reason}")
        if isinstance(codec, NoCodec):
            return None
        group = self._group.current
        between = between and group.size > 1
        way = route.by_site(group, self._sites) if between else route.flat(group)
        return ModelEncoder(codec, way, rank=group.rank, names=group.names)

    def _choose(self, auto: AutoCodec, model: nn.Module) -> cost.CodecChoice:
        """All workers measure and decide alike, by the slowest worker's speed."""
        if self._links is None:
            return cost.CodecChoice(
                codec="none", between=False, reason="none: no links between machines were measured"
            )
        length_bytes = sum(4 * p.numel() for p in model.parameters() if p.requires_grad)
        speeds = {}
        for text, codec in auto.candidates.items():
            mine = cost.measure(codec)
            parts = [mine.encode_s_per_byte, mine.read_s_per_byte, 1 / mine.smaller]
            took = torch.tensor(parts, dtype=torch.float64)
            self._group.all_reduce(took, "max").wait()
            speeds[text] = replace(
                mine,
                smaller=1 / float(took[2]),
                encode_s_per_byte=float(took[0]),
                read_s_per_byte=float(took[1]),
            )
        return cost.decide(
            speeds,
            length_bytes=length_bytes,
            links=self._links,
            sites=self._sites if self._group.own_transport and self._group.changes is None else (),
            margin=auto.margin,
        )

    # Checkpoints and the end ---------------------------------------------------------------------

    def residuals(self) -> dict[str, Any]:
        """This worker's codec states for a checkpoint: every model's, and the sites."""
        if not any(self._encoders):
            return {}
        states: list[Saved] = [coding.states.save() if coding else {} for coding in self._encoders]
        return {"codecs": list(self._texts), "models": states, "sites": _listed(self._sites)}

    def shared(self) -> list[Saved]:
        """Every model's codec states, for a worker that comes back: what it had not sent is lost."""
        return [coding.states.shared() if coding else {} for coding in self._encoders]

    def adopt(self, states: Sequence[Saved]) -> None:
        """Take over the other workers' states."""
        for coding, state in zip(self._encoders, states, strict=True):
            if coding is not None:
                coding.states.load(state)

    def lost(self, slots: Sequence[int]) -> str:
        """What is lost with these workers, for the user; empty if nothing is."""
        if not slots or not any(coding is not None and coding.codec.feedback for coding in self._encoders):
            return ""
        who = " and ".join(f"rank {slot}" for slot in slots)
        return f"lost with {who}: what the codec had left out of gradients there so far"

    def restore(self, residuals: Sequence[Mapping[str, Any]]) -> None:
        """Take over the residuals of a checkpoint's workers, by rank; record which are lost."""
        theirs = [one for one in residuals if "codecs" in one]
        by_server = [one["codec"] for one in residuals if "codec" in one]
        had = list(theirs[0]["codecs"]) if theirs else by_server[:1]
        for at, before in enumerate(had):
            coding = self._encoders[at] if at < len(self._encoders) else None
            now = self._texts[at] if coding is not None else "none"
            same = bool(theirs) and coding is not None and same_codec(before, now)
            if coding is not None:
                coding.states.load(self._share(coding, theirs, at) if same else {})
            if not same and before != "none":
                self._explain(
                    "codec residuals",
                    f"the checkpoint's codec was {before}, this run's is {now}",
                    f"the checkpoint was written with codec {before}: its residuals are lost",
                )
        for coding in self._encoders[len(had) :]:
            if coding is not None:
                coding.states.load({})

    def _share(self, coding: ModelEncoder, theirs: Sequence[Mapping[str, Any]], model: int) -> Saved:
        """This worker's part of the residuals; its own if number and sites of the workers are the same."""
        saved: list[Saved] = [one["models"][model] for one in theirs]
        size, inside = self._group.size, coding.route.inside
        if inside is None:
            return handed_over(saved, size)[self._group.rank]
        if len(saved) == size and theirs[0]["sites"] == _listed(self._sites):
            return saved[self._group.rank]
        if inside.position >= inside.rails:
            return {}
        return for_rail(saved, len(self._sites), inside.rails, inside.position)

    def report(self) -> None:
        """Record how many values exceeded the codec's range, and the residuals. All workers call this."""
        for coding in self._encoders:
            if coding is None:
                continue
            beyond = float(sum(coding.states.saturated().values()))
            all_of = torch.tensor([beyond, coding.states.left_over() ** 2], dtype=torch.float64)
            self._group.all_reduce(all_of).wait()
            name = coding.codec.name
            if all_of[0]:
                text = f"{int(all_of[0])} values of all workers were beyond the range of codec {name}"
                self._explain("codec range", text, text)
            if all_of[1]:
                text = f"the final residuals of codec {name} have a norm of {math.sqrt(all_of[1]):.3g}"
                self._explain("codec residuals", text, "")

    def join(self) -> None:
        """Wait until nothing is in flight, after the group was closed."""
        for coding in self._encoders:
            if coding is not None:
                coding.join()

    def close(self) -> None:
        """Stop the codec threads."""
        for coding in self._encoders:
            if coding is not None:
                coding.close()


def _listed(sites: Sites) -> list[list[int]]:
    return [list(site) for site in sites]


def check_momentum(codec: Codec, optimizer: Optimizer) -> None:
    """Refuse an optimizer that has momentum if the codec applies it."""
    for group in optimizer.param_groups:
        own = group.get("momentum") or (group.get("betas") or (0.0,))[0]
        refuse_momentum(codec, float(own), type(optimizer).__name__)
