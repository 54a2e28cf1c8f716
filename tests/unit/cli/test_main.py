"""What every command has in common: help, and errors in three lines before anything is started."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

import echelon as package

COMMANDS = [
    "run",
    "train",
    "adapt",
    "runs",
    "report",
    "trace",
    "list",
    "simulate",
    "bench",
    "lab",
    "config",
    "doctor",
]
GROUPS = {
    "bench": ["codecs"],
    "lab": ["up", "status", "exec", "down"],
    "config": ["show"],
}
PATHS = [(name, below) for name in COMMANDS for below in GROUPS.get(name, [""])]


def _assert_three_lines(ended, kind: str, where: str) -> None:
    """Kind and message, the place, the remedy; on stderr only, exit code 2, no traceback."""
    assert ended.code == 2, ended
    assert ended.out == ""
    lines = ended.err.splitlines()
    assert len(lines) == 3, ended.err
    assert lines[0].startswith(f"{kind}: ")
    assert lines[1] == f"  where: {where}"
    assert lines[2].startswith("  fix:   ")


def test_help_names_every_command_and_the_first_steps(echelon):
    ended = echelon("--help")
    assert ended.code == 0
    for command in COMMANDS:
        assert f"│ {command} " in ended.out
    assert "echelon train --workers 4" in ended.out
    assert ended.out == echelon("-h").out


def test_without_a_command_the_help_is_shown(echelon):
    ended = echelon()
    assert "Commands" in ended.out + ended.err


def test_the_version_is_the_packages(echelon):
    ended = echelon("--version")
    assert (ended.code, ended.out) == (0, package.__version__ + "\n")


@pytest.mark.parametrize("command", COMMANDS)
def test_help_of_each_command_fits_80_columns_and_says_what_it_does(echelon, command):
    ended = echelon(command, "--help")
    assert ended.code == 0
    assert f"Usage: echelon {command}" in ended.out
    assert max(map(len, ended.out.splitlines())) <= 80


@pytest.mark.parametrize("path", PATHS, ids=" ".join)
def test_help_has_examples_one_to_a_line_and_no_type_for_flags(echelon, path):
    words = list(filter(None, path))
    told = echelon(*words, "--help").out
    lines = [line.strip() for line in told.splitlines()]
    examples = lines[lines.index("Examples:") + 1 :]
    examples = examples[: examples.index("")]
    assert len(examples) >= 2
    whole = [at for at, line in enumerate(examples) if not at or not examples[at - 1].endswith("\\")]
    assert all(examples[at].startswith(f"echelon {' '.join(words)}") for at in whole if words[-1] != "up")
    assert "bool" not in told.lower()
    assert max(map(len, told.splitlines())) <= 80


@pytest.mark.parametrize(
    ("typed", "offered"),
    [("li", ["list"]), ("lab e", ["exec"]), ("run --work", ["--workers"]), ("list cod", ["codec"])],
)
def test_a_shell_can_complete_commands_options_and_kinds(typed, offered):
    asked = {
        "_ECHELON_COMPLETE": "complete_bash",
        "COMP_WORDS": f"echelon {typed}",
        "COMP_CWORD": str(len(typed.split())),
    }
    done = subprocess.run(
        [sys.executable, "-m", "echelon"],
        env=os.environ | asked,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.stdout.split() == offered, done.stderr


def test_completion_can_be_installed(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "echelon", "--install-completion", "bash"],
        env={**os.environ, "HOME": str(tmp_path), "_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION": "1"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    (script,) = tmp_path.glob(".bash_completions/*")
    assert "_ECHELON_COMPLETE=complete_bash" in script.read_text()
    assert script.name in (tmp_path / ".bashrc").read_text()


def test_unknown_command_names_the_nearest(echelon):
    ended = echelon("trian")
    assert ended.code == 2
    assert "train" in ended.err
    assert "Traceback" not in ended.err


def test_unknown_option_is_refused_without_a_traceback(echelon):
    ended = echelon("train", "--worker", "2")
    assert ended.code == 2
    assert "--workers" in ended.err
    assert "Traceback" not in ended.err


@pytest.mark.parametrize(
    ("args", "kind", "where", "named"),
    [
        (["train", "--model", "lenett"], "UnknownName", "--model", "did you mean 'lenet'?"),
        (["train", "--model", "mlp(widht=3)"], "UnknownName", "--model", "did you mean 'width'?"),
        (["train", "--data", "digit"], "UnknownName", "--data", "did you mean 'digits'?"),
        (["train", "--delay", "norml(0, 1)"], "UnknownName", "--delay", "did you mean 'normal'?"),
        (["train", "--delay", "normal(0"], "ConfigError", "character 9", "write name"),
        (["train", "--optimizer", "adam"], "ConfigError", "--optimizer", "sgd | adamw"),
        (["train", "--epochs", "0"], "ConfigError", "--epochs", "at least 1"),
        (["train", "--workers", "65"], "ConfigError", "--batch", "a batch of at least 65"),
        (["train", "--speed", "1,1,1", "--batch", "2"], "ConfigError", "--batch", "at least 3"),
        (
            ["train", "--workers", "2", "--shares", "1,0"],
            "ConfigError",
            "--shares",
            "rank 1 has a share of 0",
        ),
        (
            ["train", "--workers", "2", "--shares", "1,1,1"],
            "ConfigError",
            "--shares",
            "3 shares for 2 workers",
        ),
        (["train", "--workers", "2", "--speed", "1,2"], "ConfigError", "--speed", "numbers in (0, 1]"),
        (["train", "--workers", "9999999", "--batch", "9999999"], "LaunchError", "--workers", "memory"),
        (["list", "modle"], "UnknownName", "echelon list", "did you mean 'model'?"),
        (["run"], "ConfigError", "echelon run", "no script to run"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_error_is_printed_in_three_lines_before_anything_starts(echelon, args, kind, where, named):
    ended = echelon(*args)
    _assert_three_lines(ended, kind, where)
    assert named in ended.err
    assert not Path("runs").exists()


def test_unknown_lab_names_the_nearest(echelon):
    ended = echelon("train", "--lab", "two-site")
    assert ended.code == 2
    assert len(ended.err.splitlines()) == 3
    assert "unknown lab 'two-site'" in ended.err
    assert "did you mean 'two-sites'?" in ended.err


def test_a_script_that_is_not_there_is_named_with_the_folder(echelon):
    ended = echelon("run", "--workers", "2", "train.py", "--epochs", "3")
    _assert_three_lines(ended, "LaunchError", str(Path.cwd()))
    assert "there is no script train.py" in ended.err
    assert not Path("runs").exists()


def test_a_port_in_use_is_refused_before_anything_is_started(echelon):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = str(server.getsockname()[1])
        ended = echelon("train", "--workers", "2", "--port", port)
    _assert_three_lines(ended, "LaunchError", "--port")
    assert f"port {port} cannot be used" in ended.err
    assert not Path("runs").exists()


def test_wrong_value_in_a_settings_file_names_the_file(echelon):
    Path("echelon.toml").write_text('[run]\nshares = "fair"\n')
    _assert_three_lines(echelon("train"), "ConfigError", "echelon.toml, [run], shares")
    Path("echelon.toml").write_text('[train]\nmodel = "lenett"\n')
    _assert_three_lines(echelon("train"), "UnknownName", "echelon.toml, [train], model")


def test_a_run_folder_that_cannot_be_made_is_named(echelon):
    Path("taken").touch()
    ended = echelon("train", "--runs", "taken/runs")
    _assert_three_lines(ended, "ConfigError", "taken/runs")


def test_text_like_markup_or_emoji_is_printed_unchanged(echelon):
    ended = echelon("run", "[red]main.cpp:100: x[/red].py")
    assert "no script [red]main.cpp:100: x[/red].py" in ended.err


def test_informational_commands_do_not_import_torch():
    commands = [
        ["--help"],
        ["--version"],
        *([command, "--help"] for command in COMMANDS),
        ["list"],
        ["list", "model"],
        ["list", "model", "--json"],
        ["list", "data"],
        ["list", "delay"],
        ["list", "lab"],
        ["config", "show"],
        ["train", "--model", "lenett"],
    ]
    program = (
        "import sys\n"
        "from echelon.cli import main\n"
        f"for args in {commands!r}:\n"
        "    sys.argv = ['echelon', *args]\n"
        "    try:\n"
        "        main()\n"
        "    except SystemExit:\n"
        "        pass\n"
        "    if 'torch' in sys.modules:\n"
        "        sys.exit('imported torch: echelon ' + ' '.join(args))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], env=dict(os.environ), capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr


def test_python_m_echelon_runs_the_command_line():
    done = subprocess.run(
        [sys.executable, "-m", "echelon", "list", "nothing"], capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith("UnknownName: unknown kind 'nothing'\n")
    assert len(done.stderr.splitlines()) == 3
