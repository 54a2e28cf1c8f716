"""Which codec a run's gradients are written with, what it must not be used with, and what it owes.

One for each run. Every model has a coding of its own: its parameters' states, and the thread that encodes.
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
    """How one worker's gradients are written; `sites` are groups of workers that are near each other."""

    def __init__(
        self, text: str, group: Group, *, links: Links | None, sites: Sites, explain: Explain
    ) -> None:
        self._text = text
        CODECS.build(text, where="--codec")
        self._group = group
        self._links = links
        self._sites = sites
        self._explain = explain
        self._codings: list[ModelEncoder | None] = []
        self._models: list[nn.Module] = []
        self._texts: list[str] = []  # of each model: its codec, as it could have been asked for

    def _asked(self, text: str) -> Codec:
        return CODECS.build(text or self._text, where="codec")

    def active(self, text: str = "") -> bool:
        """Whether gradients may be anything but what they are, with the run's codec or another."""
        codec = self._asked(text)
        alone = self._group.size == 1 and not inner_of(codec).momentum
        return not isinstance(codec, NoCodec) and not alone

    def check(self, optimizer: Optimizer) -> None:
        """Refuse momentum that would be applied twice to any parameter."""
        held = {id(p) for group in optimizer.param_groups for p in group["params"]}
        for model, coding in zip(self._models, self._codings, strict=True):
            if coding is not None and any(id(p) in held for p in model.parameters()):
                check_momentum(coding.codec, optimizer)

    def add(self, model: nn.Module, text: str = "") -> ModelEncoder | None:
        """What a model's reducer needs; None if its gradients travel as they are. All workers call this."""
        self._texts.append(text or self._text)
        coding = self._coding(model, self._asked(text)) if self.active(text) else None
        self._models.append(model)
        self._codings.append(coding)
        if coding is not None:
            self._look_at(model, coding)
        return coding

    def _look_at(self, model: nn.Module, coding: ModelEncoder) -> None:
        """Say what the codec has nothing to do with, and what it must not be left to."""
        codec = coding.codec
        trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad and p.numel()]
        others = [name for name, p in trained if not coding.fits(p)]
        if others and codec.momentum:
            raise ConfigError(
                f"codec {codec.name} applies the momentum, but not to {others[0]}, which it cannot write",
                where="--codec",
                fix=f"codecs write float32 parameters on the CPU; use {codec.name}(momentum=0) and give "
                "the optimizer its momentum",
            )
        if others:
            count = "one parameter" if len(others) == 1 else f"{len(others)} parameters"
            why = f"{count} travel unencoded ({others[0]} ...): codecs write float32 parameters on the CPU"
            self._explain("codec, exceptions", why, f"codec {codec.name}: {why}")
        if codec.feedback and not codec.contracts:
            why = "its errors may be larger than gradients, so what it owes grows from step to step"
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
        group = self._group
        between = between and group.size > 1
        way = route.by_site(group, self._sites) if between else route.flat(group)
        return ModelEncoder(codec, way, rank=group.rank, names=group.names)

    def _choose(self, auto: AutoCodec, model: nn.Module) -> cost.CodecChoice:
        """All workers measure, the slowest one's speed counts, and all decide alike."""
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
            sites=self._sites if self._group.own_transport else (),
            margin=auto.margin,
        )

    # Checkpoints and the end ---------------------------------------------------------------------

    def residuals(self) -> dict[str, Any]:
        """What the codecs remember on this worker: every model's, and between which sites."""
        if not any(self._codings):
            return {}
        states: list[Saved] = [coding.states.save() if coding else {} for coding in self._codings]
        return {"codecs": list(self._texts), "models": states, "sites": _listed(self._sites)}

    def restore(self, residuals: Sequence[Mapping[str, Any]]) -> None:
        """Take over what all workers of another run owed, by rank; or say that it is lost."""
        theirs = [one for one in residuals if "codecs" in one]
        by_server = [one["codec"] for one in residuals if "codec" in one]
        had = list(theirs[0]["codecs"]) if theirs else by_server[:1]
        for at, before in enumerate(had):
            coding = self._codings[at] if at < len(self._codings) else None
            now = self._texts[at] if coding is not None else "none"
            same = bool(theirs) and coding is not None and same_codec(before, now)
            if coding is not None:
                coding.states.load(self._share(coding, theirs, at) if same else {})
            if not same and before != "none":
                self._explain(
                    "codec residuals",
                    f"the checkpoint's codec was {before}, this run's is {now}",
                    f"the checkpoint was written with codec {before}: what that had not sent yet is lost",
                )
        for coding in self._codings[len(had) :]:
            if coding is not None:
                coding.states.load({})

    def _share(self, coding: ModelEncoder, theirs: Sequence[Mapping[str, Any]], model: int) -> Saved:
        """This worker's part of what workers owed; its own, if they are as many and at the same sites."""
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
        """Say what did not fit into the codec's range, and what was never sent; all workers call this."""
        for coding in self._codings:
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
                text = f"what codec {name} has not sent in the end has a norm of {math.sqrt(all_of[1]):.3g}"
                self._explain("codec residuals", text, "")

    def join(self) -> None:
        """Wait until nothing is under way, after the group was closed."""
        for coding in self._codings:
            if coding is not None:
                coding.join()

    def close(self) -> None:
        """No more rounds."""
        for coding in self._codings:
            if coding is not None:
                coding.close()


def _listed(sites: Sites) -> list[list[int]]:
    return [list(site) for site in sites]


def check_momentum(codec: Codec, optimizer: Optimizer) -> None:
    """Refuse an optimizer that has momentum besides the codec's."""
    for group in optimizer.param_groups:
        own = group.get("momentum") or (group.get("betas") or (0.0,))[0]
        refuse_momentum(codec, float(own), type(optimizer).__name__)
