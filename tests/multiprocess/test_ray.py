"""What only Ray does: actors that die, room that there is not, a Ray that is the program's own."""

from __future__ import annotations

import base64
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from echelon.observe.events import StepEnded, read_events
from engines.ray import MISSING, QUIET, RayEngine

pytestmark = pytest.mark.skipif(bool(MISSING), reason=MISSING)
ROOT = Path(__file__).parents[2]
RUN_S = 200.0
SECRET = "the-secret-of-these-tests"
GONE_S = 30.0

TRAIN = """
import os, sys, torch, echelon
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

session = echelon.join()
torch.manual_seed(0)
x = torch.randn(16, 3)
loader = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=8)
model = nn.Linear(3, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model, optimizer, loader = session.prepare(model, optimizer, loader)
try:
    for epoch in session.epochs(int(sys.argv[1])):
        for x, y in loader:
            optimizer.zero_grad()
            nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()
except KeyboardInterrupt:
    print("heard of it")
    raise
print("devices", os.environ.get("CUDA_VISIBLE_DEVICES"), "threads", torch.get_num_threads())
"""

# A program that uses Ray itself, before and after.
PROGRAM = """
import os, signal, sys
import ray, echelon

def place():
    session = echelon.join()
    return session.rank, session.world_size

@ray.remote
class Counter:
    def __init__(self):
        self.count = 0
    def add(self):
        self.count += 1
        return self.count

before = dict(os.environ), signal.getsignal(signal.SIGTERM)
print("not initialised", echelon.launch(place, workers=2, on=f"ray(address='{sys.argv[1]}')", quiet=True))
assert not ray.is_initialized()
assert (dict(os.environ), signal.getsignal(signal.SIGTERM)) == before

ray.init(address=sys.argv[1], log_to_driver=False)
counter = Counter.options(num_cpus=0).remote()
assert ray.get(counter.add.remote()) == 1
print("initialised", echelon.launch(place, workers=2, on="ray", quiet=True))
assert ray.is_initialized()
print("count", ray.get(counter.add.remote()), "groups", {
    group["state"] for group in ray.util.placement_group_table().values()
})
"""

# Does something to the actors of a run that goes on.
OUTSIDE = """
import sys
import ray
ray.init(address=sys.argv[1], log_to_driver=False)
from ray._raylet import PlacementGroupID
from ray.util.placement_group import PlacementGroup, placement_group_table, remove_placement_group
(name,) = [name for name, group in placement_group_table().items() if group["state"] == "CREATED"]
remove_placement_group(PlacementGroup(PlacementGroupID(bytes.fromhex(name))))
"""


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RayEngine]:
    made = RayEngine(tmp_path_factory.mktemp("engine-ray"))
    yield made
    made.close()


@pytest.fixture
def work(tmp_path: Path, engine: RayEngine) -> Iterator[Path]:
    (tmp_path / "train.py").write_text(TRAIN)
    yield tmp_path
    _until(lambda: not engine.processes(), lambda: engine.processes())


def _until(true, what) -> None:
    until = time.monotonic() + GONE_S
    while not true():
        assert time.monotonic() < until, what()
        time.sleep(0.05)


def _environment(engine: RayEngine | None = None) -> dict[str, str]:
    path = f"{ROOT / 'src'}{os.pathsep}{ROOT / 'tests'}"
    return {**os.environ, "PYTHONPATH": path, **QUIET, **(engine.env if engine else {})}


def _command(*words: str, on: str = "ray", workers: int = 2) -> list[str]:
    return [sys.executable, "-m", "echelon", "run", "--on", on, "--workers", str(workers), *words]


def _run(work: Path, argv: list[str], env: dict[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(argv, cwd=work, env=env, capture_output=True, text=True, timeout=RUN_S)


def _started(work: Path, argv: list[str], env: dict[str, str]) -> subprocess.Popen[bytes]:
    """A run that has done a step on its last rank."""
    with (work / "out").open("wb") as out:
        started = subprocess.Popen(argv, cwd=work, env=env, stdout=out, stderr=out)
    until = time.monotonic() + RUN_S
    while not any(_stepped(path) for path in work.glob("runs/*/events/rank-1.jsonl")):
        assert started.poll() is None, (work / "out").read_text()
        assert time.monotonic() < until, (work / "out").read_text()
        time.sleep(0.05)
    return started


def _stepped(path: Path) -> bool:
    return any(isinstance(event, StepEnded) for event in read_events(path))


def _actor_of(engine: RayEngine) -> psutil.Process:
    """The process of Ray's that the run's agent is a child of."""
    agents = [one for one in engine.processes() if "echelon.start.agents.agent" in one.cmdline()]
    (parent,) = {one.parent() for one in agents}
    assert parent is not None
    assert parent.cmdline()[0].startswith("ray::")
    return parent


def test_death_of_an_actor_ends_the_run_and_is_named_and_rays_logs_have_no_secret(
    engine: RayEngine, work: Path
) -> None:
    env = {**_environment(engine), "ECHELON_SECRET": SECRET}
    started = _started(work, _command("train.py", "1000000"), env)
    _actor_of(engine).send_signal(signal.SIGKILL)
    assert started.wait(timeout=RUN_S) == 1
    told = (work / "out").read_text()
    assert re.search(r"rank \d on \S+ failed: .*the agent on \S+ is gone: ActorDiedError: .* died", told), (
        told
    )
    logs = [path.read_bytes() for path in engine.logs()]
    assert any(b"AgentHost" in log for log in logs)
    assert not [log for log in logs if _tells(log)]


def _tells(log: bytes) -> bool:
    """Whether there is the secret, by itself or in an invitation."""
    words = re.findall(rb"[A-Za-z0-9+/]{40,}", log)
    return SECRET.encode() in log or any(
        SECRET.encode() in base64.b64decode(word[at : len(word) - (len(word) - at) % 4])
        for word in words
        for at in range(4)
    )


def test_removal_of_the_placement_group_ends_the_run(engine: RayEngine, work: Path) -> None:
    env = _environment(engine)
    started = _started(work, _command("train.py", "1000000"), env)
    done = _run(work, [sys.executable, "-c", OUTSIDE, engine.address], env)
    assert done.returncode == 0, done.stderr
    assert started.wait(timeout=RUN_S) == 1
    told = (work / "out").read_text()
    assert re.search(r"rank \d on \S+ failed: .*placement group was removed", told), told


@pytest.mark.parametrize(
    ("on", "workers", "told"),
    [
        ("ray", 5, "5 workers of 1 CPU each do not fit the Ray cluster, which has room for 4"),
        ("ray(cpus=3)", 2, "2 workers of 3 CPU each do not fit the Ray cluster, which has room for 1"),
        ("ray(gpus=1)", 3, "3 workers of 1 CPU and 1 GPU each do not fit the Ray cluster"),
        ("ray(cpus=0)", 2, "a worker needs a CPU or a GPU"),
        ("ray(address='127.0.0.1:1')", 2, "no Ray answers at 127.0.0.1:1: Connection refused"),
        ("ray(address=nonsense)", 2, "'nonsense' is not an address of Ray"),
        ("ray(runtime_env=nowhere.yaml)", 2, "is neither a file nor a mapping"),
    ],
)
def test_runs_that_cannot_work_end_at_once_with_the_reason(
    engine: RayEngine, work: Path, on: str, workers: int, told: str
) -> None:
    done = _run(work, _command("train.py", "1", on=on, workers=workers), _environment(engine))
    assert done.returncode == 2, done.stderr
    assert told in done.stderr.replace("\n", " ")
    assert not (work / "runs").exists()


def test_run_that_waits_for_cpus_that_others_use_says_so(engine: RayEngine, work: Path) -> None:
    env = _environment(engine)
    (work / "first").mkdir()
    (work / "first" / "train.py").write_text(TRAIN)
    first = _started(work / "first", _command("train.py", "1000000", workers=3), env)
    done = _run(work, _command("--join-timeout-s", "3", "train.py", "1"), env)
    first.send_signal(signal.SIGINT)
    assert first.wait(timeout=RUN_S) == 130
    assert done.returncode == 2, done.stderr
    assert "2 CPUs are needed, 1 of 4 are free" in done.stderr.replace("\n", " ")


def test_workers_on_one_node_see_all_gpus_of_the_run_there_and_use_the_reserved_cores(
    engine: RayEngine, work: Path
) -> None:
    done = _run(work, _command("train.py", "1", on="ray(gpus=1, cpus=2)"), _environment(engine))
    assert done.returncode == 0, done.stderr
    (path,) = (work / "runs").iterdir()
    threads = max(1, min(2, len(os.sched_getaffinity(0)) // 2))
    for rank in (0, 1):
        log = (path / "logs" / f"rank-{rank}.log").read_text()
        assert re.search(rf"devices (0,1|1,0) threads {threads}$", log, re.MULTILINE), log


def test_ray_of_the_program_is_used_and_left_running_and_without_one_the_program_stays_as_it_was(
    engine: RayEngine, work: Path
) -> None:
    env = {name: value for name, value in _environment(engine).items() if name != "RAY_ADDRESS"}
    done = _run(work, [sys.executable, "-c", PROGRAM, engine.address], env)
    assert done.returncode == 0, done.stderr
    assert "not initialised [(0, 2), (1, 2)]" in done.stdout
    assert "initialised [(0, 2), (1, 2)]" in done.stdout.splitlines()
    assert "count 2 groups {'REMOVED'}" in done.stdout


def test_runtime_environment_reaches_the_workers(engine: RayEngine, work: Path) -> None:
    (work / "env.yaml").write_text('env_vars: {CUDA_VISIBLE_DEVICES: "told by the environment"}\n')
    done = _run(work, _command("train.py", "1", on="ray(runtime_env=env.yaml)"), _environment(engine))
    assert done.returncode == 0, done.stderr
    assert "devices told by the environment" in done.stdout


@pytest.fixture
def short() -> Iterator[Path]:
    """A folder for temporary files: the paths of Ray's sockets have to be short."""
    with tempfile.TemporaryDirectory(prefix="t", dir="/tmp") as name:
        yield Path(name)


@pytest.mark.parametrize("number", [0, signal.SIGINT, signal.SIGKILL])
def test_ray_that_a_run_has_started_is_gone_with_it(tmp_path: Path, short: Path, number: int) -> None:
    (tmp_path / "train.py").write_text(TRAIN)
    env = {**_environment(), "TMPDIR": str(short)}
    steps = "1000000" if number else "200"
    started = _started(tmp_path, _command("train.py", steps, on="ray(address=local)"), env)
    of_run = psutil.Process(started.pid).children(recursive=True)
    assert any(one.name() == "raylet" for one in of_run)
    if number:
        assert list(short.glob("ray-*"))
        started.send_signal(number)
    code = started.wait(timeout=RUN_S)
    assert code == {0: 0, signal.SIGINT: 130, signal.SIGKILL: -9}[number], (tmp_path / "out").read_text()
    _, left = psutil.wait_procs(of_run, timeout=GONE_S)
    assert not left
    _until(lambda: not list(short.glob("ray-*")), lambda: list(short.iterdir()))
    if number == signal.SIGINT:  # which Ray blocks in its processes
        (log,) = tmp_path.glob("runs/*/logs/rank-0.log")
        assert "heard of it" in log.read_text()
