"""Turns a script of Hugging Face accelerate into one of the session."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from echelon.adapt.finding import ScriptFinding
from echelon.adapt.mapping import Equivalent, Library, mapped
from echelon.adapt.reading import ACCELERATORS, Reading
from echelon.adapt.rewrite import braced
from echelon.adapt.rule import AdaptRule
from echelon.adapt.tree import constant, keyword

_ACCUMULATE = (
    "last = (step + 1) % k == 0; with {session}.accumulate(not last): (loss / k).backward(); "
    "if last: optimizer.step(), optimizer.zero_grad()"
)


def _backward(reading: Reading, call: ast.Call) -> str:
    if len(call.args) != 1:
        return ""
    rest = ", ".join(reading.text.of(one) for one in call.keywords)
    return f"{braced(reading.text, call.args[0])}.backward({rest})"


def _reduce(reading: Reading, call: ast.Call) -> str:
    given = keyword(call, "reduction")
    how = (
        constant(given.value)
        if given is not None
        else constant(call.args[1])
        if len(call.args) > 1
        else "mean"
    )
    if how not in ("sum", "mean") or not call.args or not isinstance(call.func, ast.Attribute):
        return ""
    base = reading.text.of(call.func.value)
    return f'{base}.all_reduce({braced(reading.text, call.args[0])}.clone(), "{how}")'


def _unwrap(reading: Reading, call: ast.Call) -> str:
    return reading.text.of(call.args[0]) if len(call.args) == 1 else ""


def _save(reading: Reading, call: ast.Call) -> str:
    if len(call.args) < 2 or not isinstance(call.func, ast.Attribute):
        return ""
    given = ", ".join(reading.text.of(one) for one in call.args[:2])
    return f"{reading.text.of(call.func.value)}.on_leader(torch.save, {given})"


def _clip(reading: Reading, call: ast.Call) -> str:
    if not isinstance(call.func, ast.Attribute) or reading.tree.imports.get("torch") != "torch":
        return ""
    given = ", ".join(reading.text.of(one) for one in [*call.args, *call.keywords])
    return f"torch.nn.utils.{call.func.attr}({given})"


def _no_sync(reading: Reading, call: ast.Call) -> str:
    return (
        f"{reading.text.of(call.func.value)}.accumulate()" if isinstance(call.func, ast.Attribute) else ""
    )


def _accumulate(reading: Reading, call: ast.Call) -> str:
    """Without steps to accumulate it does nothing, as `accumulate(False)` does."""
    steps = [keyword(one, "gradient_accumulation_steps") for one in reading.tree.calls(*ACCELERATORS)]
    if any(one is not None and constant(one.value) != 1 for one in steps):
        return ""
    return f"{reading.text.of(call.func)}(False)"


_ACCELERATE = Library(
    rule="accelerate",
    title="accelerate",
    makers=frozenset(ACCELERATORS),
    loaders=frozenset({"prepare", "prepare_data_loader"}),
    attributes={
        "prepare": Equivalent(),
        "prepare_data_loader": Equivalent(name="prepare"),
        "prepare_model": Equivalent(name="prepare"),
        "prepare_optimizer": Equivalent(name="prepare"),
        "prepare_scheduler": Equivalent(name="prepare"),
        "print": Equivalent(),
        "device": Equivalent(),
        "backward": Equivalent(rewrite=_backward, hand="loss.backward()"),
        "gather_for_metrics": Equivalent(),
        "gather": Equivalent(name="gather_for_metrics"),
        "reduce": Equivalent(rewrite=_reduce, hand='{session}.all_reduce(tensor, "mean")'),
        "wait_for_everyone": Equivalent(name="barrier"),
        "is_main_process": Equivalent(name="is_leader"),
        "is_local_main_process": Equivalent(name="is_leader"),
        "process_index": Equivalent(name="rank"),
        "num_processes": Equivalent(name="world_size"),
        "local_process_index": Equivalent(hand='int(os.environ.get("LOCAL_RANK", "0"))'),
        "unwrap_model": Equivalent(rewrite=_unwrap, hand="the model itself"),
        "save": Equivalent(rewrite=_save, hand="{session}.on_leader(torch.save, object, path)"),
        "save_state": Equivalent(name="save"),
        "load_state": Equivalent(name="load"),
        "save_model": Equivalent(hand="{session}.on_leader(torch.save, model.state_dict(), path)"),
        "clip_grad_norm_": Equivalent(rewrite=_clip, hand="torch.nn.utils.clip_grad_norm_(...)"),
        "clip_grad_value_": Equivalent(rewrite=_clip, hand="torch.nn.utils.clip_grad_value_(...)"),
        "no_sync": Equivalent(rewrite=_no_sync, hand="{session}.accumulate()"),
        "accumulate": Equivalent(rewrite=_accumulate, hand=_ACCUMULATE),
        "main_process_first": Equivalent(hand="if {session}.is_leader: ..., then {session}.barrier()"),
        "local_main_process_first": Equivalent(
            hand="if {session}.is_leader: ..., then {session}.barrier()"
        ),
        "sync_gradients": Equivalent(hand="whether this is the last backward pass before optimizer.step()"),
        "end_training": Equivalent(gone=True),
        "free_memory": Equivalent(gone=True),
        "log": Equivalent(
            hand="{session}.log(loss=loss) for the record; other trackers on the leader only"
        ),
        "autocast": Equivalent(hand="torch.autocast({session}.device.type, dtype=torch.bfloat16)"),
        "init_trackers": Equivalent(hand="if {session}.is_leader: start the tracker"),
        "skip_first_batches": Equivalent(hand="{session}.load continues with the next sample by itself"),
    },
    options={
        "mixed_precision": "with torch.autocast({session}.device.type, dtype=torch.bfloat16): forward pass",
        "gradient_accumulation_steps": _ACCUMULATE,
        "log_with": "start the tracker on the leader: if {session}.is_leader: ...",
        "deepspeed_plugin": "leave it out",
        "fsdp_plugin": "leave it out: models larger than a worker's memory are not supported",
    },
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Accelerate(AdaptRule):
    """Accelerator() of Hugging Face accelerate, and its methods."""

    name: ClassVar[str] = "accelerate"

    def look(self, reading: Reading) -> Iterator[ScriptFinding]:
        """One finding per place where the accelerator is used in another way than a session."""
        if reading.flavour != "accelerate":
            return
        yield from mapped(reading, _ACCELERATE)
        for call in reading.prepare_calls:
            scheduled = [one for one in call.args if _is_scheduler(reading, one)]
            if scheduled:
                yield reading.say(
                    self.name,
                    call,
                    "check",
                    f"{reading.source(scheduled[0])} is prepared",
                    "accelerate steps a prepared scheduler once per worker in every step, Echelon once",
                    "compute its length from len(loader) after prepare: the steps of all workers together",
                )


def _is_scheduler(reading: Reading, node: ast.expr) -> bool:
    return reading.things.kind(node) == "scheduler" or "sched" in reading.tree.written(node).lower()
