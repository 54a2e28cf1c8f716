"""Which groups does the user ask for? A rule as text becomes groups of nodes; a search then keeps to them.

by-cost            by transfer cost, then by order of magnitude of compute power (Algorithm 1)
equal-power(N)     N groups of equal total power; about √n without a number
random(N, seed=0)  N groups at random; about √n without a number
N                  groups of at most N nodes, formed by what tells the nodes apart
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from echelon.config.call import Call, Value, parse_call
from echelon.errors import ConfigError, nearest
from echelon.plan.equal_power import equal_power_groups
from echelon.plan.grouping import Grouping, compute_speeds, form_groups, random_groups, separate
from echelon.plan.hierarchy import root_count
from echelon.plan.job import JobProfile
from echelon.plan.topology import Topology

GroupRuleName = Literal["by-cost", "equal-power", "random", "most"]
_NAMES = get_args(GroupRuleName)[:3]
_FIX = "give by-cost, equal-power, equal-power(3), random(3, seed=1), or the largest size of a group: 8"


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupRule:
    """How groups are formed. `number` is how many there are, or with `most` how large they may be."""

    name: GroupRuleName
    number: int | None = None
    seed: int = 0


def parse_group_rule(text: str, *, where: str = "--groups") -> GroupRule:
    """The rule that a text names; ConfigError names what is wrong with it."""
    if text.strip().isdecimal():
        return _checked(GroupRule(name="most", number=int(text)), where)
    call = parse_call(text)
    for name in _NAMES:
        if call.name == name:
            return _checked(_with_options(call, name, where), where)
    near = nearest(call.name, _NAMES)
    raise ConfigError(
        f"{text!r} is no way to form groups" + (f" (did you mean {near}?)" if near else ""),
        where=where,
        fix=_FIX,
    )


def groups_by_rule(rule: GroupRule, topology: Topology, job: JobProfile | None = None) -> Grouping:
    """The groups of all nodes; ConfigError if the nodes are too few."""
    names = tuple(node.name for node in topology.nodes)
    if rule.name == "most":
        return form_groups(topology, job, most=rule.number, seed=rule.seed)
    if rule.name == "by-cost":
        groups = separate(topology, job)
        reason = f"{len(groups)} groups by transfer cost and order of magnitude of compute power."
        return Grouping(groups=groups, kind="transfer and power", reason=reason)
    count = rule.number or root_count(len(names))
    if count > len(names):
        raise ConfigError(
            f"{len(names)} nodes cannot form {count} groups", where="--groups", fix="ask for fewer groups"
        )
    if rule.name == "random":
        drawn = random_groups(names, count, seed=rule.seed)
        reason = f"{count} groups at random, as asked (seed {rule.seed})."
        return Grouping(groups=drawn, kind="random", reason=reason)
    speeds = compute_speeds(topology, job)
    equal = equal_power_groups(names, [speeds[name] for name in names], count)
    return Grouping(groups=equal, kind="equal power", reason=f"{count} groups of equal power, as asked.")


def _with_options(call: Call, name: GroupRuleName, where: str) -> GroupRule:
    options: dict[str, Value] = dict(call.options)
    if call.args:
        options["number"] = call.args[0]
    known = {"random": {"number", "seed"}, "equal-power": {"number"}}.get(name, set())
    if len(call.args) > 1 or set(options) - known or not all(type(v) is int for v in options.values()):
        raise ConfigError(f"{call} cannot be read", where=where, fix=_FIX)
    number, seed = options.get("number"), options.get("seed", 0)
    assert number is None or isinstance(number, int)
    assert isinstance(seed, int)
    return GroupRule(name=name, number=number, seed=seed)


def _checked(rule: GroupRule, where: str) -> GroupRule:
    if rule.number is not None and rule.number < 1:
        raise ConfigError(f"groups of number {rule.number}", where=where, fix="give at least 1")
    return rule
