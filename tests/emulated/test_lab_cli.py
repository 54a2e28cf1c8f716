"""The commands of `echelon lab`, on the real kernel."""

from __future__ import annotations

import functools
import json
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from echelon.cli.lab import app
from echelon.cluster.lab import remove
from echelon.cluster.lab.lab import Lab, take_down
from echelon.cluster.lab.names import Names, short_id
from echelon.errors import EchelonError, LabError, UnknownName

COMMAND = [sys.executable, "-c", "from echelon.cli.lab import app; app()"]


@pytest.fixture
def lab_file(can_emulate: None, tmp_path: Path) -> Iterator[Path]:
    """The file of a lab of two nodes with a unique name."""
    name = f"t{secrets.token_hex(4)}"
    file = tmp_path / "lab.toml"
    file.write_text(
        f'name = "{name}"\n[[node]]\nname = "a"\ncount = 2\ncpu = 0.5\nlink = "1gbit"\nlatency = "1ms"\n'
    )
    yield file
    take_down(name)
    assert short_id(name) not in remove.lab_ids()


def name_in(file: Path) -> str:
    return file.read_text().split('"')[1]


def type_in(*words: str | Path) -> Result:
    return CliRunner().invoke(app, [str(word) for word in words])


def error_of(result: Result) -> EchelonError:
    assert isinstance(result.exception, EchelonError)
    return result.exception


def run(*words: str | Path) -> subprocess.CompletedProcess[str]:
    command = [*COMMAND, *(str(word) for word in words)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def test_a_lab_goes_up_is_shown_and_goes_down(lab_file: Path) -> None:
    name = name_in(lab_file)
    up = type_in("up", lab_file)
    assert up.exit_code == 0
    address = Lab.find(name).seats[1].address
    row = next(line for line in up.stdout.splitlines() if line.startswith("a-1"))
    assert {"main", "0.5", "1gbit", address} <= set(row.split())
    assert f"lab {name} is up" in up.stdout
    assert ("not emulated" in up.stdout) == (not Lab.find(name).latency_emulated)
    again = type_in("up", lab_file)
    assert "already up" in error_of(again).message
    assert f"lab {name}" in type_in("status").stdout
    assert "a-0" in type_in("status", name).stdout
    down = type_in("down", lab_file)
    assert down.exit_code == 0
    assert "removed lab" in down.stdout
    assert Names(short_id(name)).namespaces() == []
    assert "is not up" in type_in("down", lab_file).stdout
    missing = error_of(type_in("status", lab_file))
    assert isinstance(missing, LabError)
    assert missing.fix == f"run: echelon lab up {name}"


SHOW = (
    "import json, os; print(json.dumps({k: os.environ.get(k) for k in ('RANK', 'NODE_RANK', 'WORLD_SIZE', "
    "'LOCAL_RANK', 'MASTER_ADDR', 'MASTER_PORT', 'GLOO_SOCKET_IFNAME', 'MINE')}))"
)


def test_a_program_in_all_nodes_has_the_environment_of_a_cluster(lab_file: Path) -> None:
    type_in("up", lab_file)
    first = Lab.find(name_in(lab_file)).seats[0].address
    done = run(
        "exec", lab_file, "--all", "--env", "MINE=x=y", "--port", "1234", "--", sys.executable, "-c", SHOW
    )
    assert done.returncode == 0
    said = dict(line.split(" | ", 1) for line in done.stdout.splitlines())
    for rank, node in enumerate(("a-0", "a-1")):
        assert json.loads(said[node]) == {
            "RANK": str(rank),
            "NODE_RANK": str(rank),
            "WORLD_SIZE": "2",
            "LOCAL_RANK": "0",
            "MASTER_ADDR": first,
            "MASTER_PORT": "1234",
            "GLOO_SOCKET_IFNAME": "eth0",
            "MINE": "x=y",
        }


def test_known_placeholders_in_braces_are_filled_in_and_others_stay(lab_file: Path) -> None:
    type_in("up", lab_file)
    seats = Lab.find(name_in(lab_file)).seats
    words = "{rank}/{world} {node} {address} {master}:{port} {other} {}"
    done = run("exec", name_in(lab_file), "--all", "--", "echo", words)
    master = seats[0].address
    assert sorted(done.stdout.splitlines()) == [
        f"{seat.node} | {rank}/2 {seat.node} {seat.address} {master}:29500 {{other}} {{}}"
        for rank, seat in enumerate(seats)
    ]


def test_one_node_has_unchanged_output_and_its_own_exit_code(lab_file: Path) -> None:
    type_in("up", lab_file)
    done = run("exec", lab_file, "--node", "a-1", "--", "sh", "-c", "echo $RANK {node}; echo x >&2; exit 5")
    assert (done.returncode, done.stdout, done.stderr) == (5, "0 a-1\n", "x\n")


def test_the_first_failure_ends_the_others_and_is_the_exit_code(lab_file: Path) -> None:
    type_in("up", lab_file)
    script = "test {rank} = 0 && exit 3; echo waiting; sleep 60"
    done = run("exec", lab_file, "--all", "--", "sh", "-c", script)
    assert done.returncode == 3
    assert "a-0 ended with exit code 3" in done.stderr
    assert processes_in(lab_file) == []


def test_with_keep_going_the_others_finish(lab_file: Path) -> None:
    type_in("up", lab_file)
    script = "test {rank} = 0 && exit 3; sleep 0.3; echo done"
    done = run("exec", lab_file, "--all", "--keep-going", "--", "sh", "-c", script)
    assert done.returncode == 3
    assert "a-1 | done" in done.stdout


def test_nothing_that_a_program_started_outlives_it(lab_file: Path) -> None:
    type_in("up", lab_file)
    done = run("exec", lab_file, "--all", "--", "sh", "-c", "setsid sleep 60 >/dev/null 2>&1 & exit 0")
    assert done.returncode == 0
    assert processes_in(lab_file) == []


@pytest.mark.parametrize("where", [["--all"], ["--node", "a-0"]], ids=["all nodes", "one node"])
def test_an_interrupt_reaches_the_programs_and_ends_the_call(where: list[str], lab_file: Path) -> None:
    type_in("up", lab_file)
    script = 'trap "echo interrupted; exit 0" INT; echo ready; sleep 60 & wait'
    command = [*COMMAND, "exec", str(lab_file), *where, "--", "sh", "-c", script]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for _ in range(2 if where == ["--all"] else 1):
            assert "ready" in process.stdout.readline()
        process.send_signal(signal.SIGINT)
        rest = process.communicate(timeout=120)[0]
    assert process.returncode == 128 + signal.SIGINT
    assert rest.count("interrupted") == (2 if where == ["--all"] else 1)
    assert processes_in(lab_file) == []


def test_status_shows_what_runs_in_a_node(lab_file: Path) -> None:
    type_in("up", lab_file)
    seat = Lab.find(name_in(lab_file)).seats[0]
    with subprocess.Popen([*seat.prefix, "sleep", "61"]) as process:
        wait_until(lambda: "sleep 61" in type_in("status", lab_file).stdout)
        assert f"{process.pid} sleep 61" in type_in("status", lab_file).stdout
        process.kill()


def test_down_all_removes_every_lab_of_the_prefix(
    build_lab: Callable[[str], Lab], lab_prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    labs = [build_lab('[[node]]\nname = "a"\n') for _ in range(2)]
    monkeypatch.setattr(remove, "remove_all", functools.partial(remove.remove_all, lab_prefix))
    result = type_in("down", "--all")
    assert result.exit_code == 0
    assert all(lab.id in result.stdout for lab in labs)
    assert remove.lab_ids(lab_prefix) == []
    assert "no lab is up" in type_in("down", "--all").stdout


def test_an_unknown_node_names_the_nearest(lab_file: Path) -> None:
    type_in("up", lab_file)
    error = error_of(type_in("exec", lab_file, "--node", "a-5", "--", "true"))
    assert isinstance(error, UnknownName)
    assert error.nearest in ("a-0", "a-1")


def test_a_command_that_does_not_exist_fails_with_the_shells_code(lab_file: Path) -> None:
    type_in("up", lab_file)
    done = run("exec", lab_file, "--all", "--", "no-such-program")
    assert done.returncode == 127
    assert "no-such-program: not found" in done.stderr


def processes_in(file: Path) -> list[str]:
    lab = Lab.find(name_in(file))
    assert all(not list(lab.groups.of(node.name).glob("job-*")) for node in lab.spec.nodes)
    return [command for status in lab.status() for command in status.processes.values()]


def wait_until(true: Callable[[], bool], deadline_s: float = 90.0) -> None:
    until = time.monotonic() + deadline_s
    while not true():
        assert time.monotonic() < until, "the condition did not become true"
        time.sleep(0.02)
