import json
import os
import socket
import subprocess
import sys

import pytest
import typer
from typer.testing import CliRunner

from echelon.cli.doctor import doctor

APP = typer.Typer(add_completion=False)
APP.command()(doctor)


def _run(*args: str):
    return CliRunner().invoke(APP, args, env={"COLUMNS": "80", "NO_COLOR": "1"})


@pytest.fixture(autouse=True)
def _data_folder(monkeypatch, tmp_path):
    monkeypatch.setenv("ECHELON_DATA", str(tmp_path))


def test_machine_without_problems_is_ready_and_exits_with_zero():
    result = _run()
    assert result.exit_code == 0, result.output
    assert result.output.splitlines()[-1].startswith("ready")
    for topic in ("versions", "machine", "network", "ports", "lab", "data"):
        assert f"\n{topic}\n" in "\n" + result.output


def test_every_line_fits_80_columns_and_is_labelled():
    lines = _run("--peer", "x" * 60 + ".." + "y" * 60).output.splitlines()
    assert max(map(len, lines)) <= 80
    assert not [line for line in lines if line != line.rstrip()]
    labels = {line[2:9].strip() for line in lines if line.startswith("  ") and line[2] != " "}
    assert {"ok", "problem"} <= labels


def test_problems_come_last_each_with_its_fix_and_exit_with_one():
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = str(server.getsockname()[1])
        result = _run("--port", port, "--peer", "two..dots")
    assert result.exit_code == 1
    end = result.output.partition("\n2 problems")[2]
    assert end.count("fix: ") == 2
    assert f"port {port}: in use" in end
    assert "'two..dots' cannot be resolved" in end
    assert "ready" not in result.output


def test_json_output_has_the_same_findings():
    result = _run("--json", "--peer", "two..dots")
    answer = json.loads(result.stdout)
    assert result.exit_code == 1
    assert answer["ready"] is False
    levels = {finding["subject"]: finding["level"] for finding in answer["findings"]}
    assert levels["peer"] == "problem"
    assert levels["torch"] == "ok"
    assert answer["machine"]["cores_usable"] >= 1
    assert "127.0.0.1" in [entry["address"] for entry in answer["interfaces"]]


def test_json_output_of_a_ready_machine_has_ready_true():
    result = _run("--json")
    assert result.exit_code == 0
    assert json.loads(result.stdout)["ready"] is True


def test_port_that_does_not_exist_is_refused():
    result = _run("--port", "70000")
    assert result.exit_code == 2
    assert "65535" in result.output


def test_markup_in_a_hosts_name_is_printed_as_it_is():
    assert "[red]..x" in _run("--peer", "[red]..x").output


def test_answers_without_importing_torch():
    code = (
        "import sys; from echelon.cli.doctor import doctor; doctor(json=True); "
        "assert 'torch' not in sys.modules"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], env=dict(os.environ), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["ready"] is True
