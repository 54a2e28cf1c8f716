"""Can this plan work? The launcher asks before it starts workers; every worker asks when it joins.

Imports no torch, so that the command line answers quickly.
"""

from __future__ import annotations

from echelon.codec.codec import CODECS
from echelon.codec.codecs.between import Between
from echelon.codec.fitting import (
    check_sites,
    goes_on,
    refuse_factors,
    refuse_for_weights,
    refuse_sums,
    refuse_transport,
    served_codec,
)
from echelon.comm.schedule.collective import COLLECTIVES
from echelon.config.choices import check_servers
from echelon.errors import ConfigError
from echelon.parallel.layout import Layout, extents, is_auto, parse_layout
from echelon.parallel.strategies.pipeline import Pipeline
from echelon.parallel.strategies.sharded import Sharded
from echelon.parallel.strategies.threads import Threads
from echelon.plan.plan import Plan
from echelon.sync.policies.levels import Levels
from echelon.sync.policies.local import Local
from echelon.sync.policy import POLICIES, ClusterInfo, Policy
from echelon.verify.verification import Verification, check_verifications


def check_plan(plan: Plan, cluster: ClusterInfo) -> Policy:
    """Refuse strategies that do not exist or do not work together; returns the sync policy."""
    policy = POLICIES.build(plan.sync, where="--sync").resolved()
    COLLECTIVES.build(plan.collective, where="--collective")
    if cluster.workers > 1:
        policy.check(cluster)
        check_servers(cluster.servers, plan, sums=not needs_parameter_servers(policy))
    _check_codec(plan, policy, cluster)
    chosen_verifications(plan, len(plan.workers))
    check_layout(plan, cluster.workers)
    if cluster.servers and _between_groups(policy).family in ("mix", "share"):
        raise ConfigError(f"sync {policy.name} has no use for servers", where="--servers", fix="start none")
    return policy


def chosen_verifications(plan: Plan, workers: int) -> tuple[Verification, ...]:
    """The checks of --verify that have something to do; refuses what does not work with this plan."""
    return check_verifications(
        plan.verify,
        workers=workers,
        together=POLICIES.build(plan.sync, where="--sync").resolved().family == "reduce",
        overlap=plan.overlap,
        coded=plan.codec != "none",
    )


def alone(text: str, where: str) -> bool:
    """Whether a layout has a meaning for one worker: micro-batches in one stage, states on disk."""
    if is_auto(text):
        return False
    layout = parse_layout(text, where=where)
    if layout.find(Threads) is not None:
        return True
    pipeline, sharded = layout.find(Pipeline), layout.find(Sharded)
    one_stage = pipeline is not None and pipeline.extent == 1
    return one_stage or (sharded is not None and bool(sharded.offload))


def check_layout(plan: Plan, workers: int, *, where: str = "--parallel") -> Layout:
    """Refuse a layout that these workers cannot have, or that does not go with the plan's other choices."""
    if is_auto(plan.parallel):
        return Layout(())  # chosen in the first `prepare`
    layout = parse_layout(plan.parallel, where=where)
    extents(layout, workers, where=where)
    if layout.find(Threads) is not None:
        _check_threads(layout, plan, where)
    if layout.is_data_only or workers == 1:
        return layout
    pipeline, sharded = layout.find(Pipeline), layout.find(Sharded)
    filled = pipeline is not None and pipeline.schedule == "filled"
    if filled and sharded is not None and sharded.level == 3:
        raise ConfigError(
            "sharded(level=3) does not go with schedule filled: workers gather parameters together, and "
            "with filled each computes weights when it has to wait",
            where=where,
            fix="use schedule=1f1b or gpipe, or sharded(level=2)",
        )
    if pipeline is not None and pipeline.late and sharded is not None:
        raise ConfigError(
            "sharded does not go with schedule stale: it keeps weights of several steps, and shards divide "
            "those of one",
            where=where,
            fix="use another schedule, or * data",
        )
    for option, value, needed in (
        ("sync", POLICIES.build(plan.sync, where="--sync").resolved().name, "full"),
        ("codec", CODECS.build(plan.codec, where="--codec").name, "none"),
        ("overlap", plan.overlap, "backward"),
        ("verify", plan.verify, "none"),
    ):
        if value != needed:
            raise ConfigError(
                f"{option} {value} does not work with a model in parts, {plan.parallel!r}",
                where=where,
                fix=f"use --{option} {needed}, or --parallel data",
            )
    if plan.transport == "c10d":
        raise ConfigError(
            "a model in parts needs Echelon's own transports, not torch.distributed",
            where=where,
            fix="use --transport auto, shm or tcp",
        )
    return layout


def _check_threads(layout: Layout, plan: Plan, where: str) -> None:
    """Refuse what does not go with replicas in threads, which call all layers at the same time."""
    if not layout.is_data_only:
        raise ConfigError(
            f"threads goes with data only, not with {plan.parallel!r}",
            where=where,
            fix="use threads * data; a pipeline's workers may have torch's own threads, with --threads",
        )
    for option, value, refused in (
        ("sync", plan.sync, POLICIES.build(plan.sync, where="--sync").resolved().name != "full"),
        ("overlap", plan.overlap, plan.overlap == "step"),
        ("factors", plan.factors, plan.factors == "always"),
        ("verify", plan.verify, plan.verify != "none"),
    ):
        if refused:
            raise ConfigError(
                f"{option} {value} does not work with replicas in threads",
                where=where,
                fix=f"leave --{option} at its default, or threads out",
            )


def _check_codec(plan: Plan, policy: Policy, cluster: ClusterInfo) -> None:
    """Refuse a codec that does not work with the policy, the servers or the transport."""
    codec = CODECS.build(plan.codec, where="--codec")
    between = _between_groups(policy)
    refuse_factors(codec, plan.factors)
    if policy.family == "reduce":
        if isinstance(codec, Between) and cluster.workers > 1:
            check_sites(plan.groups)
            refuse_transport(plan.transport)
        refuse_sums(codec, cluster.servers)
    elif policy.family == "serve":
        served_codec(plan.codec)
    elif between.family in ("mix", "share"):
        refuse_for_weights(plan.codec, between.name)


def refuse_without_servers(plan: Plan, workers: int, servers: int) -> None:
    """Refuse a policy that needs servers, where another launcher than `echelon run` started no process for
    one.
    """
    policy = POLICIES.build(plan.sync, where="--sync").resolved()
    if workers > 1 and not servers and needs_parameter_servers(policy):
        raise ConfigError(
            f"{_between_groups(policy).name} needs a parameter server, and there is none",
            where="--sync",
            fix="let the last process be one, with join(servers=1) or ECHELON_SERVERS=1, "
            f"and start {workers + 1} processes for {workers} workers",
        )


def needs_parameter_servers(policy: Policy) -> bool:
    """Whether servers keep parameters, and do not only sum."""
    return _between_groups(policy).family == "serve"


def _between_groups(policy: Policy) -> Policy:
    """The policy between groups; of a policy without groups, the policy itself."""
    return policy.between if isinstance(policy, Levels) else policy


def refuse_losses(plan: Plan) -> None:
    """Refuse what cannot go on yet when a worker is lost."""
    policy = POLICIES.build(plan.sync, where="--sync").resolved()
    found = (
        f"--sync {plan.sync}"
        if policy.family != "reduce" and not (isinstance(policy, Local) and policy.periods is None)
        else f"--codec {plan.codec}"
        if not goes_on(plan.codec)
        else f"--verify {plan.verify}"
        if plan.verify != "none"
        else "--overlap step"
        if plan.overlap == "step"
        else "--transport c10d"
        if plan.transport == "c10d"
        else "a run with servers"
        if plan.servers
        else ""
    )
    if found:
        raise ConfigError(
            f"{found} cannot go on yet when a worker is lost",
            where="--min-workers",
            fix="leave --min-workers out: then a loss ends the run",
        )
