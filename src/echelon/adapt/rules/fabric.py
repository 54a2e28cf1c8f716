"""Turns a script of Lightning Fabric into one of the session."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from echelon.adapt.finding import ScriptFinding
from echelon.adapt.mapping import Equivalent, Library, mapped
from echelon.adapt.reading import FABRICS, Reading
from echelon.adapt.rewrite import braced
from echelon.adapt.rule import AdaptRule
from echelon.adapt.tree import constant, keyword


def _base(reading: Reading, call: ast.Call) -> str:
    assert isinstance(call.func, ast.Attribute)
    return reading.text.of(call.func.value)


def _backward(reading: Reading, call: ast.Call) -> str:
    if len(call.args) != 1:
        return ""
    rest = ", ".join(reading.text.of(one) for one in call.keywords if one.arg != "model")
    return f"{braced(reading.text, call.args[0])}.backward({rest})"


def _all_reduce(reading: Reading, call: ast.Call) -> str:
    given = keyword(call, "reduce_op")
    how = constant(given.value) if given is not None else "mean"
    if len(call.args) != 1:
        return ""
    value = reading.text.of(call.args[0])
    if how == "mean":
        return f"{_base(reading, call)}.mean({value})"
    if how == "sum":
        return f"{_base(reading, call)}.all_reduce({braced(reading.text, call.args[0])}.clone())"
    return ""


def _barrier(reading: Reading, call: ast.Call) -> str:
    return f"{_base(reading, call)}.barrier()"


def _clip(reading: Reading, call: ast.Call) -> str:
    norm, value = keyword(call, "max_norm"), keyword(call, "clip_val")
    if not call.args or reading.tree.imports.get("torch") != "torch":
        return ""
    parameters = f"{braced(reading.text, call.args[0])}.parameters()"
    if norm is not None:
        return f"torch.nn.utils.clip_grad_norm_({parameters}, {reading.text.of(norm.value)})"
    if value is not None:
        return f"torch.nn.utils.clip_grad_value_({parameters}, {reading.text.of(value.value)})"
    return ""


def _no_sync(reading: Reading, call: ast.Call) -> str:
    enabled = keyword(call, "enabled")
    given = enabled.value if enabled is not None else call.args[1] if len(call.args) > 1 else None
    return f"{_base(reading, call)}.accumulate({reading.text.of(given) if given is not None else ''})"


def _to_device(reading: Reading, call: ast.Call) -> str:
    if len(call.args) != 1:
        return ""
    return f"{braced(reading.text, call.args[0])}.to({_base(reading, call)}.device)"


_FABRIC = Library(
    rule="fabric",
    title="Lightning Fabric",
    makers=frozenset(FABRICS),
    loaders=frozenset({"setup_dataloaders"}),
    attributes={
        "launch": Equivalent(gone=True, hand="leave it out: a launcher starts the workers"),
        "setup": Equivalent(name="prepare"),
        "setup_module": Equivalent(name="prepare"),
        "setup_optimizers": Equivalent(name="prepare"),
        "setup_dataloaders": Equivalent(name="prepare"),
        "backward": Equivalent(rewrite=_backward, hand="loss.backward()"),
        "print": Equivalent(),
        "device": Equivalent(),
        "world_size": Equivalent(),
        "global_rank": Equivalent(name="rank"),
        "is_global_zero": Equivalent(name="is_leader"),
        "local_rank": Equivalent(hand='int(os.environ.get("LOCAL_RANK", "0"))'),
        "barrier": Equivalent(rewrite=_barrier),
        "all_reduce": Equivalent(rewrite=_all_reduce, hand="{session}.all_reduce(tensor)"),
        "all_gather": Equivalent(
            hand="{session}.gather_for_metrics(tensor) along the first dimension, or "
            "{session}.all_reduce(tensor) for a sum; both take tensors"
        ),
        "broadcast": Equivalent(hand="{session}.broadcast(tensor), for tensors only"),
        "clip_gradients": Equivalent(
            rewrite=_clip, hand="torch.nn.utils.clip_grad_norm_(model.parameters(), norm)"
        ),
        "no_backward_sync": Equivalent(rewrite=_no_sync, hand="{session}.accumulate(enabled)"),
        "to_device": Equivalent(rewrite=_to_device, hand="x.to({session}.device)"),
        "save": Equivalent(
            hand="{session}.save(folder, extra={{...}}) for all that is prepared, or "
            "{session}.on_leader(torch.save, state, path)"
        ),
        "load": Equivalent(hand="{session}.load(folder) after prepare"),
        "log": Equivalent(hand="{session}.log(loss=loss)"),
        "log_dict": Equivalent(hand="{session}.log(**values)"),
        "autocast": Equivalent(hand="torch.autocast({session}.device.type, dtype=torch.bfloat16)"),
        "seed_everything": Equivalent(hand="torch.manual_seed(seed), and the seeds of other libraries"),
        "rank_zero_first": Equivalent(hand="if {session}.is_leader: download; {session}.barrier()"),
    },
    options={
        "precision": "torch.autocast({session}.device.type, dtype=torch.bfloat16) around the forward pass",
        "callbacks": "call them in the loop",
        "loggers": "start the logger on the leader: if {session}.is_leader: ...",
    },
)


@dataclass(frozen=True, slots=True, kw_only=True)
class LightningFabric(AdaptRule):
    """Fabric() of Lightning, and its methods."""

    name: ClassVar[str] = "fabric"

    def look(self, reading: Reading) -> Iterator[ScriptFinding]:
        """One finding per place where Fabric is used in another way than a session."""
        if reading.flavour == "fabric":
            yield from mapped(reading, _FABRIC)
