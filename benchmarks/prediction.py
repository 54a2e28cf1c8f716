"""How well are steps predicted? Predicted against measured, for clusters, models and plans not seen before.

    python benchmarks/prediction.py [--quick] [--seen] [--state FILE] [--json FILE] [--only CASE]

Costs come from single workers and from one pair of nodes: every model is profiled on one worker; every node
computes by itself, with its quota, while the others do the same; a pair of nodes reduces buffers and trains
two tiny models on one link, by the rate of the link. Then whole clusters train, in labs, and are compared
with what was predicted from those costs. Targets: mean error 8 %, Spearman 0.95, regret of the first choice
5 %. What was measured is kept in FILE, so that the benchmark can be continued or evaluated again.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import prediction_lab as lab_run
from echelon.cluster.lab.spec import LabSpec, parse_lab
from echelon.plan.job import ComputeCost, JobProfile, Layer
from echelon.plan.predict.engine_costs import EngineCosts
from echelon.plan.predict.predict import predict
from echelon.plan.strategy import Prediction, RunStrategy
from echelon.plan.topology import Node, Topology, Uplink

MBIT = 125_000.0
RATES = (50, 100, 200, 500, 1000)  # Mb/s
_LAB_BURST_S = 1e-3  # as the lab shapes links
_RING, _HALVES = "ring", "halving-doubling"


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One cluster and model, with several plans: shares, collective, overlap."""

    name: str
    sites: tuple[int, ...]
    cpus: tuple[float, ...]
    mbit: float
    model: str
    batch: int
    plans: tuple[tuple[str, str, str], ...]
    uplink_mbit: float = 0.0
    quick: bool = False

    def shares(self, kind: str) -> tuple[int, ...]:
        """Equal, or in proportion to the quotas."""
        weights = self.cpus if kind == "speed" else (1.0,) * len(self.cpus)
        exact = [self.batch * weight / sum(weights) for weight in weights]
        whole = [max(1, int(part)) for part in exact]
        order = sorted(range(len(exact)), key=lambda at: whole[at] - exact[at])
        for at in order[: self.batch - sum(whole)]:
            whole[at] += 1
        return tuple(whole)

    @property
    def rates(self) -> dict[str, float]:
        """For the driver: the nodes' links, and the uplink."""
        rates = {"nodes": self.mbit * MBIT}
        return {**rates, "s0/s1": self.uplink_mbit * MBIT} if self.uplink_mbit else rates


_FLAT = (("equal", _RING, "backward"), ("speed", _RING, "backward"), ("speed", _HALVES, "step"))
_TWO = (
    ("speed", "hierarchical(sizes=[2, 2])", "backward"),
    ("speed", _RING, "backward"),
    ("equal", "hierarchical(sizes=[2, 2])", "step"),
)
_TWICE = (("equal", "auto", "backward"), ("speed", "auto", "backward"), ("speed", "auto", "step"))
_EQUAL = (("equal", "auto", "backward"), ("equal", "auto", "step"), ("equal", "butterfly", "backward"))
_FOUR = (("equal", _RING, "backward"), ("equal", _HALVES, "backward"), ("equal", "direct", "step"))
_SIX = (
    ("equal", _RING, "backward"),
    ("speed", "auto", "backward"),
    ("speed", "hierarchical(group=3)", "step"),
)
_SPLIT = (
    ("speed", "hierarchical(sizes=[3, 2])", "backward"),
    ("equal", _RING, "backward"),
    ("speed", "hierarchical(sizes=[3, 2])", "step"),
)
_UNEQUAL = (0.8, 0.4, 0.2, 0.1)
_SPREAD = (0.4, 0.4, 0.2, 0.2, 0.2, 0.1)


def _case(
    name: str,
    sites: tuple[int, ...],
    cpus: tuple[float, ...],
    mbit: float,
    job: tuple[str, int],
    *plans: Any,
) -> Case:
    return Case(name=name, sites=sites, cpus=cpus, mbit=mbit, model=job[0], batch=job[1], plans=plans)


# What the model of a step was made with: its form and its constants.
SEEN = (
    _case("pair-lenet", (2,), (0.8, 0.4), 100, ("lenet", 128), *_TWICE),
    _case("pair-mlp", (2,), (0.5, 0.5), 500, ("mlp-512", 128), *_EQUAL),
    _case("four-lenet", (4,), _UNEQUAL, 1000, ("lenet", 256), *_FLAT),
    _case("four-cnn", (4,), _UNEQUAL, 200, ("cnn", 64), *_FLAT),
    _case("four-mlp", (4,), (0.4,) * 4, 200, ("mlp-256", 128), *_FOUR),
    replace(
        _case("sites-mlp", (2, 2), (0.4, 0.4, 0.4, 0.2), 1000, ("mlp-512", 128), *_TWO), uplink_mbit=100.0
    ),
    replace(
        _case("sites-lenet", (2, 2), (0.4, 0.4, 0.2, 0.2), 500, ("lenet", 192), *_TWO), uplink_mbit=50.0
    ),
    _case("six-cnn", (6,), _SPREAD, 500, ("cnn-narrow", 96), *_SIX),
)

# What it had not seen.
CASES = (
    replace(_case("pair-wide", (2,), (0.8, 0.6), 1000, ("mlp-1024", 64), *_EQUAL), quick=True),
    _case("trio-lenet", (3,), (0.6, 0.3, 0.3), 200, ("lenet", 96), *_FLAT),
    replace(_case("trio-cnn", (3,), (0.5, 0.25, 0.15), 1000, ("cnn", 48), *_FLAT), quick=True),
    _case("trio-mlp", (3,), (0.5,) * 3, 500, ("mlp-256", 96), *_FOUR),
    _case("five-lenet", (5,), (0.6, 0.3, 0.2, 0.2, 0.1), 500, ("lenet", 320), *_FLAT),
    _case("five-cnn", (5,), (0.35,) * 5, 100, ("cnn-narrow", 80), *_FOUR),
    replace(_case("split-mlp", (3, 2), (0.3,) * 5, 1000, ("mlp-256", 160), *_SPLIT), uplink_mbit=50.0),
    replace(
        _case("split-cnn", (3, 2), (0.5, 0.25, 0.25, 0.2, 0.1), 500, ("cnn-narrow", 120), *_SPLIT),
        uplink_mbit=200.0,
    ),
)


def spec_of(sites: Sequence[int], mbit: float = 1000, uplink_mbit: float = 0.0) -> LabSpec:
    """A lab of equal nodes; quotas come later."""
    text = "".join(
        f'[[node]]\nname = "s{at}"\ncount = {count}\nsite = "s{at}"\nlink = "{mbit:g}mbit"\n'
        for at, count in enumerate(sites)
    )
    if len(sites) > 1:
        text += f'[[uplink]]\nbetween = ["s0", "s1"]\nrate = "{uplink_mbit or 100:g}mbit"\n'
    return parse_lab(text, file="benchmark", name="benchmark")


# Calibration ---------------------------------------------------------------------------------------


def calibration() -> list[dict[str, Any]]:
    """What one pair of nodes does: rank 0 is the single worker."""
    free = [None, None]
    settings: list[dict[str, Any]] = [
        {"do": "profile", "model": model, "batch": batch}
        for model, batch in sorted({(case.model, case.batch // len(case.cpus)) for case in (*SEEN, *CASES)})
    ]
    for model in ("mlp-8", "mlp-8x8"):
        settings.append({"do": "alone", "model": model, "shares": [4, 4], "cpus": free})
        settings += [
            {"do": "train", "model": model, "shares": [4, 4], "cpus": free, "collective": "auto",
             "overlap": overlap, "seconds": 1.5}
            for overlap in ("backward", "step")
        ]  # fmt: skip
    for mbit in RATES:
        for size_bytes in (4, 1 << 18, 1 << 20):
            setting = {"do": "reduce", "size_bytes": size_bytes, "cpus": free, "seconds": 0.8}
            settings.append({**setting, "rates": {"nodes": mbit * MBIT}})
    return settings


@dataclass(slots=True)
class Store:
    """What was measured, by setting, in memory and in a file."""

    file: Path | None
    found: dict[str, dict[str, Any]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.file is not None and self.file.exists():
            self.found = json.loads(self.file.read_text())

    def run(self, where: str, lab: LabSpec, settings: Sequence[dict[str, Any]]) -> None:
        """Measure what is missing."""
        missing = [setting for setting in settings if _key(where, setting) not in self.found]
        if not missing:
            return
        print(f"{where}: {len(missing)} measurements", file=sys.stderr, flush=True)
        for found, setting in zip(_exhausted(lab_run.measured(lab, missing)), missing, strict=False):
            self.found[_key(where, setting)] = found
            if self.file is not None:
                self.file.write_text(json.dumps(self.found))

    def of(self, where: str, setting: dict[str, Any]) -> dict[str, Any]:
        """What was measured for a setting."""
        return self.found[_key(where, setting)]


def _exhausted(found: Iterator[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    yield from found


def _key(where: str, setting: dict[str, Any]) -> str:
    return json.dumps([where, setting], sort_keys=True)


def profile_of(found: dict[str, Any]) -> JobProfile:
    """From JSON."""
    layers = tuple(Layer(**{**layer, "factors": tuple(layer["factors"])}) for layer in found["layers"])
    return JobProfile(**{**found, "cost": ComputeCost(**found["cost"]), "layers": layers})


def engine_of(store: Store) -> tuple[EngineCosts, dict[float, float]]:
    """The engine's costs, and the payload's part of each rate, from the pair."""
    settings = calibration()
    found = {_key("pair", setting): store.of("pair", setting) for setting in settings}
    reduces: dict[float, dict[int, dict[str, Any]]] = {}
    for setting in settings:
        if setting["do"] == "reduce":
            mbit = setting["rates"]["nodes"] / MBIT
            reduces.setdefault(mbit, {})[setting["size_bytes"]] = found[_key("pair", setting)]

    def cpu(result: dict[str, Any]) -> float:
        return statistics.mean(result["cpu_s"])

    large, middle = 1 << 20, 1 << 18
    small = {mbit: by_size[4] for mbit, by_size in reduces.items()}
    empty_s = statistics.median(cpu(one) for one in small.values())
    latency_s = statistics.median(max(0.0, one["step_s"] - cpu(one)) / 2 for one in small.values())
    byte_s, payload = [], {}
    for mbit, by_size in sorted(reduces.items()):
        wall_s = by_size[large]["step_s"] - by_size[middle]["step_s"]
        payload[mbit] = min(1.0, (large - middle) / wall_s / (mbit * MBIT))
        byte_s.append((mbit * MBIT * payload[mbit], max(0.0, cpu(by_size[large]) - empty_s) / (2 * large)))
    tiny = {
        (setting["model"], setting.get("overlap", "alone")): cpu(found[_key("pair", setting)])
        for setting in settings
        if setting["do"] in ("alone", "train") and "overlap" in (*setting, "overlap")
    }
    more = {name: tiny[name, "backward"] - tiny[name, "alone"] for name in ("mlp-8", "mlp-8x8")}
    parameter_s = max(0.0, (more["mlp-8x8"] - more["mlp-8"]) / 14)  # 18 parameters and 4
    settle_s = statistics.mean(tiny[name, "step"] - tiny[name, "backward"] for name in more)
    engine = EngineCosts(
        step_s=max(0.0, more["mlp-8"] - 4 * parameter_s - empty_s),
        parameter_s=parameter_s,
        bucket_s=empty_s / 3,
        message_s=empty_s * 2 / 3 / 4,
        byte_s=tuple(byte_s),
        latency_s=latency_s,
        settle_s=max(0.0, settle_s),
        burst_s=_LAB_BURST_S,
    )
    return engine, payload


# Cases ---------------------------------------------------------------------------------------------


def settings_of(case: Case) -> list[dict[str, Any]]:
    """What is measured in a case: first every worker for itself, then the plans."""
    shares = case.shares("equal")
    settings: list[dict[str, Any]] = [
        {"do": "alone", "model": case.model, "shares": shares, "cpus": case.cpus, "rates": case.rates,
         "seconds": 1.5}
    ]  # fmt: skip
    settings += [
        {"do": "train", "model": case.model, "shares": case.shares(kind), "collective": collective,
         "overlap": overlap, "cpus": case.cpus}
        for kind, collective, overlap in case.plans
    ]  # fmt: skip
    return settings


def predicted(
    case: Case, store: Store, engine: EngineCosts, payload: dict[float, float]
) -> list[Prediction]:
    """Every plan's prediction."""
    share = case.batch // len(case.cpus)
    job = profile_of(store.of("pair", {"do": "profile", "model": case.model, "batch": share}))
    alone, *_ = settings_of(case)
    # CPU time over the quota: the same as wall time on a quiet machine, and steadier on a busy one.
    spent = store.of(where_of(case), alone)["cpu_s"]
    walls = [cpu_s / quota for cpu_s, quota in zip(spent, case.cpus, strict=True)]
    names = [node.name for node in spec_of(case.sites).nodes]
    # The profile gives the form of the cost, and the least CPU time of a node its size: quotas that stop a
    # worker leave its caches cold, which the other nodes' times show.
    whole_s = job.cost.at(share) + job.cost.apply_s
    job = replace(job, batch=case.batch, cost=_scaled(job.cost, min(spent) / whole_s))
    costs = {
        name: _scaled(job.cost, wall_s / min(spent)) for name, wall_s in zip(names, walls, strict=True)
    }
    job = replace(job, costs=costs)
    rate = case.mbit * MBIT * payload[case.mbit]
    sites = [f"s{at}" for at, count in enumerate(case.sites) for _ in range(count)]
    nodes = tuple(
        Node(name=name, site=site, speed=cpu, cores=cpu, up_bytes_per_s=rate, down_bytes_per_s=rate)
        for name, site, cpu in zip(names, sites, case.cpus, strict=True)
    )
    uplinks: tuple[Uplink, ...] = ()
    if case.uplink_mbit:
        between = case.uplink_mbit * MBIT * payload[case.uplink_mbit]
        uplinks = (Uplink(between=("s0", "s1"), bytes_per_s=between),)
    topology = Topology(nodes=nodes, uplinks=uplinks)
    return [
        predict(
            topology,
            job,
            RunStrategy(
                nodes=tuple(names),
                shares=case.shares(kind),
                collective=collective,
                overlap="step" if overlap == "step" else "backward",
            ),
            engine,
        )
        for kind, collective, overlap in case.plans
    ]


def _scaled(cost: ComputeCost, factor: float) -> ComputeCost:
    return ComputeCost(
        fixed_s=cost.fixed_s * factor,
        per_sample_s=cost.per_sample_s * factor,
        apply_s=cost.apply_s * factor,
    )


def where_of(case: Case) -> str:
    """Cases with the same nodes share a lab."""
    return f"lab {'+'.join(str(count) for count in case.sites)}"


def spearman(one: Sequence[float], other: Sequence[float]) -> float:
    """The correlation of ranks."""

    def ranks(values: Sequence[float]) -> list[float]:
        order = sorted(range(len(values)), key=lambda at: values[at])
        return [float(order.index(at)) for at in range(len(values))]

    return statistics.correlation(ranks(one), ranks(other))


def main() -> None:
    """Measure what is missing, predict, compare."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    options.add_argument("--quick", action="store_true", help="two cases, six combinations")
    options.add_argument("--state", type=Path, help="what was measured is kept here")
    options.add_argument("--json", type=Path)
    options.add_argument("--only", default="", help="cases whose names begin so")
    options.add_argument("--seen", action="store_true", help="the cases that the model was made with")
    asked = options.parse_args()
    cases = [
        case
        for case in (SEEN if asked.seen else CASES)
        if case.name.startswith(asked.only) and (case.quick or not asked.quick)
    ]
    store = Store(asked.state)
    store.run("pair", spec_of((2,)), calibration())
    for where in dict.fromkeys(where_of(case) for case in cases):
        held = [case for case in cases if where_of(case) == where]
        spec = spec_of(held[0].sites)
        store.run(where, spec, [setting for case in held for setting in settings_of(case)])
    report(cases, store, asked.json)


def report(cases: Sequence[Case], store: Store, file: Path | None) -> None:
    """A line for each combination, and the summary."""
    engine, payload = engine_of(store)
    print(f"engine: {engine}\npayload: { {mbit: round(part, 3) for mbit, part in payload.items()} }")
    rows, regrets = [], []
    for case in cases:
        found = predicted(case, store, engine, payload)
        _, *trains = settings_of(case)
        measured = [store.of(where_of(case), train) for train in trains]
        for plan, one, real in zip(case.plans, found, measured, strict=True):
            error = one.step_s / real["step_s"] - 1
            rows.append(
                {"case": case.name, "plan": plan, "predicted_s": one.step_s, "measured_s": real["step_s"]}
            )
            print(
                f"{case.name:12s} {plan[0]:6s} {plan[1]:28s} {plan[2]:9s}"
                f" {one.step_s * 1e3:8.1f} ms predicted {real['step_s'] * 1e3:8.1f} measured {error:+7.1%}"
                f"   {one.bottleneck}"
            )
        chosen = min(range(len(found)), key=lambda at: found[at].step_s)
        regrets.append(measured[chosen]["step_s"] / min(real["step_s"] for real in measured) - 1)
    errors = [abs(row["predicted_s"] / row["measured_s"] - 1) for row in rows]
    summary = {
        "combinations": len(rows),
        "mean error": statistics.mean(errors),
        "spearman": spearman([r["predicted_s"] for r in rows], [r["measured_s"] for r in rows]),
        "mean regret": statistics.mean(regrets),
        "largest regret": max(regrets),
    }
    print(", ".join(f"{name} {value:.3f}" for name, value in summary.items()))
    print("targets: mean error 0.08, spearman 0.95, regret 0.05")
    if file is not None:
        file.write_text(json.dumps({"rows": rows, **summary}))


if __name__ == "__main__":
    main()
