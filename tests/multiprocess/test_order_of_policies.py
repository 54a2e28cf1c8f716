"""The cluster and the virtual clock put policies in the same order, by gradients applied per second.

Two of three workers are 4.5 times slower than the first. In lockstep all go at their pace; with two backups
the first goes at its own, and their pushes are dropped; without any waiting they add what they can to that.
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
from served import ServedRun, take_part

WORKERS = 3
SLOW_S, FAST_S = 0.18, 0.04
IN_ORDER = ["full", "backup(2)", "async"]
TIMES_LONGER = [1, 1, 4, 16]


def work(name, *args):
    return take_part(globals()[name], *args)


def slow_two(samples, longer):
    """Sleeps in place of computing; all but the first worker sleep longer."""
    with echelon.join() as session:
        data = TensorDataset(torch.randn(samples, 64), torch.arange(samples) % 10)
        model = nn.Linear(64, 10)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        loader = DataLoader(data, batch_size=12, shuffle=True)
        model, optimizer, loader = session.prepare(model, optimizer, loader)
        for x, y in loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            time.sleep(longer * (SLOW_S if session.rank else FAST_S))
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


def on_the_cluster(pool, folder, sync, longer):
    """Gradients applied per second. In lockstep a batch takes as long as the slowest, so it has fewer."""
    folder.mkdir()
    if sync == "full":
        cluster = ServedRun(folder, workers=WORKERS, sync=sync)
        cluster.run(pool, work, "slow_two", 72, longer)
        return rate_together(cluster)
    cluster = ServedRun(folder, workers=WORKERS, servers=1, sync=sync)
    cluster.run(pool, work, "slow_two", 240, longer)
    return served_rate(cluster)


def on_the_virtual_clock():
    """The same, where a gradient takes as long as workers sleep."""
    setting = Setting(
        workers=WORKERS,
        model="mlp(8, 1)",
        speeds=(1.0, FAST_S / SLOW_S, FAST_S / SLOW_S),
        seconds=3.0,
        gradients=False,
        profile=Profile(compute_s=FAST_S, link=VirtualLink(latency_s=1e-4, bytes_per_s=1e8)),
    )
    outcome = simulate(setting, IN_ORDER)
    return {run.policy: run.totals.applied / setting.seconds for run in outcome.runs}


def ordered(rates):
    return sorted(rates, key=lambda sync: rates[sync])


def test_the_cluster_and_the_virtual_clock_give_the_same_order_of_policies(warm_pool, tmp_path):
    """Other load delays every step a little, so in further tries all take longer, and it counts less."""
    virtual = on_the_virtual_clock()
    assert ordered(virtual) == IN_ORDER
    tries = []
    for number, longer in enumerate(TIMES_LONGER):
        rates = {
            sync: on_the_cluster(warm_pool, tmp_path / f"{sync}-{number}", sync, longer)
            for sync in IN_ORDER
        }
        tries.append(rates)
        if ordered(rates) == ordered(virtual):
            break
    assert ordered(tries[-1]) == ordered(virtual), f"cluster {tries}, virtual clock {virtual}"
