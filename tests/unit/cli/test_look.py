from __future__ import annotations

import json
import subprocess
import sys
import webbrowser
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from echelon.cli import look
from echelon.errors import ConfigError
from echelon.observe.events import Noted, encode
from echelon.observe.run_folder import RunFolder

app = typer.Typer()
app.command("trace")(look.trace)
app.command("report")(look.report)


def _call(*args: str):
    return CliRunner().invoke(app, list(args), catch_exceptions=True)


@pytest.fixture
def runs(tmp_path) -> Path:
    for name in ("first", "second"):
        folder = RunFolder(tmp_path / "runs" / f"2025-{name}").with_subfolders()
        folder.events_of(0).write_bytes(encode(Noted(t=1.0, rank=0, text=name)) + b"\n")
    return tmp_path / "runs"


def test_trace_writes_into_the_latest_run_and_says_how_to_open_it(runs):
    result = _call("trace", "--runs", str(runs))
    assert result.exit_code == 0, result.output
    written = runs / "2025-second" / "trace.json"
    assert json.loads(written.read_bytes())["traceEvents"]
    assert str(written) in result.output.splitlines()
    assert "open https://ui.perfetto.dev and drop the file there" in result.output


def test_report_of_a_named_run_is_written_to_the_given_path(runs, tmp_path):
    out = tmp_path / "elsewhere" / "page.html"
    result = _call("report", "2025-first", "--runs", str(runs), "--out", str(out))
    assert result.exit_code == 0, result.output
    assert "first" in out.read_text(encoding="utf-8")
    assert result.output.splitlines() == [str(out)]
    assert not (runs / "2025-first" / "report.html").exists()


def test_report_opens_the_page_only_when_asked(runs, monkeypatch):
    opened: list[str] = []
    monkeypatch.setattr(webbrowser, "open", lambda url: opened.append(url) or True)
    _call("report", "--runs", str(runs))
    assert opened == []
    result = _call("report", "--runs", str(runs), "--open")
    assert opened == [(runs / "2025-second" / "report.html").resolve().as_uri()]
    assert "no browser" not in result.output


def test_a_machine_without_a_browser_is_no_error(runs, monkeypatch):
    monkeypatch.setattr(webbrowser, "open", lambda url: False)
    result = _call("report", "--runs", str(runs), "--open")
    assert result.exit_code == 0
    assert "open the file by hand" in result.output


@pytest.mark.parametrize("command", ["trace", "report"])
def test_unknown_run_error_lists_the_existing_runs(runs, command):
    error = _call(command, "third", "--runs", str(runs)).exception
    assert isinstance(error, ConfigError)
    assert "2025-second" in error.fix


@pytest.mark.parametrize("command", ["trace", "report"])
def test_help_has_examples(command):
    output = _call(command, "--help").output
    assert "Examples" in output
    assert f"echelon {command}" in output


def test_looking_at_runs_does_not_import_torch():
    code = "import sys, echelon.cli.look; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
