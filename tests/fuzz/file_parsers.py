"""The parsers of files that others may have written: a run's folder, a checkpoint, a plan, settings."""

from __future__ import annotations

import msgspec
import torch
import xxhash

from echelon.checkpoint import state_tree, store
from echelon.checkpoint.manifest import Manifest, PartFacts, figures_in
from echelon.cluster.lab.spec import parse_lab, read_lab
from echelon.config.resolve import _read as read_settings
from echelon.data import chunk
from echelon.observe.events import decode_line
from echelon.observe.run_folder import RunFolder
from echelon.observe.sync import plan_values
from echelon.plan.check_file import PlanSurroundings, contradictions
from echelon.plan.cluster_file import read_cluster, write_cluster
from echelon.plan.plan import Plan, PlanRequest, make_plan
from echelon.plan.told import topology_of_lab
from echelon.start import history, recorded_command
from echelon.start.failure import Failure, read_failure
from fuzz.parser import Parser, from_file

_HEAD_END = 16  # digits of a checksum


def _text(read: object) -> object:
    return lambda data: read(data.decode(errors="replace"))


def _manifest() -> bytes:
    tree, _ = state_tree.leaves({"epoch": 3, "x": [1.5, "a", b"b", (1, 2)]})
    part = PartFacts(file="tensors.safetensors", size_bytes=10, xxh3="0" * 16)
    return Manifest(
        step=7, parts=[part], common=tree, lead=tree, workers=[tree], figures={"loss": 1.0}
    ).encode()


def _resealed(data: bytes) -> bytes:
    """With the right checksum, which anybody can compute: the text behind it is what is to be parsed."""
    whole = _manifest()
    head = whole.index(b'",')
    begin = head - _HEAD_END
    rest = data[head:] if len(data) > head else b'",' + data
    return whole[:begin] + xxhash.xxh3_64_hexdigest(rest).encode() + rest


def _checkpoint(resealing: bool) -> object:
    def read(folder: object) -> None:
        store.read_newest(folder, lambda *found: None)

    parse = from_file(read, f"step-000000007/{store.STATE_FILE}")

    def feed(data: bytes) -> None:
        written = _resealed(data) if resealing else data
        figures_in(written)
        parse(written)

    return feed


_EVENTS = (
    b'{"type":"step","t":1.0,"rank":0,"step":1,"loss":2.5}',
    b'{"type":"run-ended","t":1.0,"rank":0}',
    b'{"type":"link-measured","t":1.0,"rank":0,"bytes_per_s":null}',
)


def file_parsers() -> list[Parser]:
    """All of them."""
    plan = make_plan("r", ["a", "b"], PlanRequest(), cores=1).to_toml().encode()
    lab = read_lab("two-sites")
    cluster = write_cluster(topology_of_lab(lab)).encode()
    state = {"epoch": 3, "weights": torch.arange(4.0), "nested": [{"a": (1, b"x")}]}
    failure = Failure(rank=0, t=1.0, kind="ValueError", message="m")
    command = recorded_command.RecordedCommand(kind="train", argv=["train"], name="r", cwd="/")
    lab_text = b'name = "l"\n[[node]]\nname = "a"\nrate = "1gbit"\n'
    return [
        Parser("state-tree", state_tree.unpack, (state_tree.pack(state), state_tree.pack({}))),
        Parser("checkpoint", _checkpoint(False), (_manifest(),)),
        Parser("checkpoint-resealed", _checkpoint(True), (_manifest(),)),
        Parser("event-lines", decode_line, _EVENTS),
        Parser("plan", from_file(lambda folder: Plan.read(folder / "plan.toml"), "plan.toml"), (plan,)),
        Parser(
            "plan-of-a-run", from_file(lambda folder: plan_values(RunFolder(folder)), "plan.toml"), (plan,)
        ),
        Parser("plan-check", _text(lambda text: contradictions(text, PlanSurroundings())), (plan,)),
        Parser("cluster", _text(lambda text: read_cluster(text, "f")), (cluster,)),
        Parser("lab", _text(lambda text: parse_lab(text, file="f", name="f")), (lab_text,)),
        Parser(
            "settings",
            from_file(lambda folder: read_settings(folder / "echelon.toml"), "echelon.toml"),
            (b'[run]\nworkers = 2\n[train]\nlr = 0.1\nmodel = "mlp"\n',),
        ),
        Parser(
            "failure",
            from_file(lambda folder: read_failure(folder / "rank-0.json"), "rank-0.json"),
            (msgspec.json.encode(failure),),
        ),
        Parser(
            "command",
            from_file(lambda folder: recorded_command.read(RunFolder(folder)), "command.json"),
            (msgspec.json.encode(command),),
        ),
        Parser(
            "summary",
            from_file(lambda folder: history._summary(RunFolder(folder).with_subfolders()), "summary.json"),
            (b'{"steps": 3}',),
        ),
        Parser("catalogue", from_file(chunk.read, chunk.CATALOGUE), (b'{"folder":"x"}',)),
    ]
