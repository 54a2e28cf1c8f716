"""The cluster and the virtual clock put policies in the same order, by gradients applied per second.

One of three workers is five times slower than the others. In lockstep all go at its pace; with one backup
the others go at theirs, and what it pushes is dropped; without any waiting it adds what it can to that.
"""

from __future__ import annotations

import time

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import echelon
from echelon.observe.events import Arrived, Decided, StepEnded, read_events
from echelon.simulate.profile import Profile, VirtualLink
from echelon.simulate.run import simulate
from echelon.simulate.setting import Setting
from served import Crew, take_part

WORKERS = 3
SLOW_S, FAST_S = 0.15, 0.03
IN_ORDER = ["full", "backup(1)", "async"]
TRIES = 4


def work(name, *args):
    return take_part(globals()[name], *args)


def slow_one(samples):
    """Sleeps in place of computing; the last worker sleeps longer."""
    with echelon.join() as session:
        data = TensorDataset(torch.randn(samples, 64), torch.arange(samples) % 10)
        model = nn.Linear(64, 10)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        loader = DataLoader(data, batch_size=12, shuffle=True)
        model, optimizer, loader = session.prepare(model, optimizer, loader)
        for x, y in loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            time.sleep(SLOW_S if session.rank == session.world_size - 1 else FAST_S)
            loss.backward()
            optimizer.step()


def served_rate(cluster):
    """From the first arrival until a worker finds no more data: as long as all are at work."""
    record = cluster.record()
    arrivals = [event for event in record if isinstance(event, Arrived)]
    began, ended = arrivals[0].t, min(event.t for event in arrivals if event.kind == "leave")
    updates = [event for event in record if isinstance(event, Decided) and event.what == "apply"]
    return sum(len(event.parts) for event in updates if began < event.t <= ended) / (ended - began)


def rate_together(cluster):
    """In lockstep every step of every worker is a gradient applied; likewise without the first."""
    steps = [
        event
        for rank in range(cluster.workers)
        for event in read_events(cluster.folder.events_of(rank))
        if isinstance(event, StepEnded)
    ]
    began = max(event.arrival for event in steps if event.step == 0)
    return sum(event.step > 0 for event in steps) / (max(event.arrival for event in steps) - began)


def on_the_cluster(pool, folder, sync):
    """Gradients applied per second. In lockstep a batch takes five times as long, so it has fewer."""
    folder.mkdir()
    if sync == "full":
        cluster = Crew(folder, workers=WORKERS, sync=sync)
        cluster.run(pool, work, "slow_one", 72)
        return rate_together(cluster)
    cluster = Crew(folder, workers=WORKERS, servers=1, sync=sync)
    cluster.run(pool, work, "slow_one", 240)
    return served_rate(cluster)


def on_the_virtual_clock():
    """The same, where a gradient takes as long as workers sleep."""
    setting = Setting(
        workers=WORKERS,
        model="mlp(8, 1)",
        speeds=(1.0, 1.0, FAST_S / SLOW_S),
        seconds=3.0,
        gradients=False,
        profile=Profile(compute_s=FAST_S, link=VirtualLink(latency_s=1e-4, bytes_per_s=1e8)),
    )
    outcome = simulate(setting, IN_ORDER)
    return {run.policy: run.totals.applied / setting.seconds for run in outcome.runs}


def ordered(rates):
    return sorted(rates, key=lambda sync: rates[sync])


def test_the_cluster_and_the_virtual_clock_give_the_same_order_of_policies(warm_pool, tmp_path):
    """Other load only ever lowers a rate, so the best of a few tries counts where one is not enough."""
    virtual = on_the_virtual_clock()
    assert ordered(virtual) == IN_ORDER
    best = dict.fromkeys(IN_ORDER, 0.0)
    for attempt in range(TRIES):
        for sync in IN_ORDER:
            rate = on_the_cluster(warm_pool, tmp_path / f"{sync}-{attempt}", sync)
            best[sync] = max(best[sync], rate)
        if ordered(best) == ordered(virtual):
            break
    assert ordered(best) == ordered(virtual), f"cluster {best}, virtual clock {virtual}"
