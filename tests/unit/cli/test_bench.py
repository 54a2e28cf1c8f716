"""`echelon bench codecs` as it is called: quickly, on a tiny model; `echelon bench step` with mistakes."""

import json
import os
import subprocess
import sys
import webbrowser
from pathlib import Path

import pytest

QUICK = ["--quick", "--steps", "4", "--codecs", "fp16; top-k(ratio=0.1)"]


@pytest.fixture
def called(echelon):
    """A quick comparison, with these options besides."""
    return lambda *words: echelon("bench", "codecs", *QUICK, *words)


def _assert_refused(ended, where):
    assert ended.code == 2, ended
    assert ended.out == ""
    lines = ended.err.splitlines()
    assert len(lines) == 3, ended.err
    assert lines[1] == f"  where: {where}"
    assert lines[2].startswith("  fix:   ")
    assert not list(Path().iterdir())


def test_prints_a_row_for_each_codec_and_writes_page_and_figures(called):
    ended = called("--out", "found", "--workers", "2")
    assert ended.code == 0, ended.err
    lines = ended.out.splitlines()
    rows = [words for line in lines if len(words := line.split()) > 2 and words[1].endswith("x")]
    assert [row[0] for row in rows] == ["none", "fp16", "top-k(ratio=0.1)"]
    assert rows[0][1] == "1.0x"
    assert 1.8 < float(rows[1][1][:-1]) <= 2
    assert all(row[-1] == "%" for row in rows[1:])
    assert "predicted" in ended.out
    assert "link:        12.5 MB/s (given; steps at it are predicted)" in lines
    assert lines[-2:] == ["picture: found/codecs.html", "figures: found/codecs.json"]
    assert sorted(path.name for path in Path("found").iterdir()) == ["codecs.html", "codecs.json"]
    assert "top-k(ratio=0.1)" in Path("found/codecs.html").read_text(encoding="utf-8")


def test_figures_are_complete(called):
    called("--out", "found", "--link", "1mbit", "--workers", "2", "--seed", "3")
    found = json.loads(Path("found/codecs.json").read_text())
    assert [one["codec"] for one in found["codecs"]] == ["none", "fp16", "top-k(ratio=0.1)"]
    assert (found["bench"]["workers"], found["bench"]["seed"], found["bench"]["steps"]) == (2, 3, 4)
    for one in found["codecs"]:
        assert one["predicted_wire_s"] == pytest.approx(one["sent_bytes"] / 125e3)
        assert one["smaller"] == pytest.approx(found["exact_bytes"] / one["sent_bytes"])
        spent = found["compute_s"] + one["encode_s"] + one["decode_s"] + one["predicted_wire_s"]
        assert one["predicted_step_s"] == pytest.approx(spent)
        assert (one["curve"][-1]["step"], one["curve"][-1]["loss"]) == (4, one["loss"])
    assert found["exact_bytes"] == found["gradient_bytes"]  # 2 (P-1)/P of two workers
    assert found["command"].startswith("echelon bench codecs --quick")
    assert found["says"]


def test_several_seeds_are_trained_when_asked(called):
    ended = called("--out", "found", "--seeds", "2", "--seed", "5")
    assert "Losses are means of 2 seeds" in ended.out
    found = json.loads(Path("found/codecs.json").read_text())
    assert (found["bench"]["seed"], found["bench"]["seeds"]) == (5, 2)
    for one in found["codecs"]:
        assert one["loss"] == pytest.approx(sum(one["losses"]) / 2)
        assert one["spread"][0] <= one["worse"] <= one["spread"][1] or one["codec"] == "none"


def test_one_codec_may_be_asked_for_in_the_singular(echelon):
    assert (
        echelon("bench", "codec", "--help").out.splitlines()[3:]
        == (echelon("bench", "codecs", "--help").out.splitlines()[3:])
    )


def test_the_folder_has_a_new_name_unless_it_is_given(called):
    ended = called()
    (folder,) = Path().glob("bench-codecs-*")
    assert ended.out.splitlines()[-2] == f"picture: {folder / 'codecs.html'}"


def test_given_options_override_the_quick_settings(called):
    called("--out", "found", "--model", "mlp(8, 1)", "--lr", "0.3", "--momentum", "0.5")
    bench = json.loads(Path("found/codecs.json").read_text())["bench"]
    assert (bench["model"], bench["data"], bench["lr"]) == ("mlp(8, 1)", "digits", 0.3)
    assert (bench["momentum"], bench["batch"]) == (0.5, 8)


def test_the_page_is_shown_only_when_asked(called, monkeypatch):
    opened = []
    monkeypatch.setattr(webbrowser, "open", lambda url: bool(opened.append(url)))
    called("--out", "found")
    assert opened == []
    ended = called("--out", "found", "--open")
    assert opened == [Path("found/codecs.html").resolve().as_uri()]
    assert "open the file by hand" in ended.out


def test_all_codecs_train_when_none_is_named(echelon):
    ended = echelon("bench", "codecs", "--quick", "--steps", "3", "--out", "found")
    assert ended.code == 0, ended.err
    found = json.loads(Path("found/codecs.json").read_text())
    assert len(found["codecs"]) >= 15
    assert found["codecs"][0]["codec"] == "none"
    assert all(one["loss"] is not None for one in found["codecs"])


@pytest.mark.parametrize(
    ("words", "where", "named"),
    [
        (["--codecs", "fp16; topk"], "--codecs", "did you mean 'top-k'?"),
        (["--codecs", "top-k(rato=0.1)"], "--codecs", "did you mean 'ratio'?"),
        (["--codecs", "fp16;;top-k"], "--codecs", "with ; between them"),
        (["--codecs", "fp16; fp16"], "--codecs", "fp16 is given twice"),
        (["--codecs", "auto"], "--codecs", "only chooses another codec"),
        (["--model", "lenett"], "--model", "did you mean 'lenet'?"),
        (["--data", "digit"], "--data", "did you mean 'digits'?"),
        (["--workers", "1"], "--workers", "at least 2"),
        (["--steps", "0"], "--steps", "at least 1"),
        (["--lr", "0"], "--lr", "above 0"),
        (["--link", "fast"], "--link", "100mbit"),
        (["--link", "0mbit"], "--link", "above 0"),
    ],
)
def test_invalid_values_are_refused_naming_the_option(called, words, where, named):
    ended = called(*words)
    _assert_refused(ended, where)
    assert named in ended.err


def test_a_folder_that_cannot_be_made_is_named(called):
    Path("taken").touch()
    ended = called("--out", "taken/found")
    assert ended.code == 2
    assert "taken" in ended.err
    assert "Traceback" not in ended.err


def test_errors_are_reported_before_torch_is_imported():
    program = (
        "import sys\n"
        "from echelon.cli import main\n"
        "for args in ([], ['--help'], ['codecs', '--help'], ['codecs', '--codecs', 'topk'],\n"
        "             ['codecs', '--model', 'lenett']):\n"
        "    sys.argv = ['echelon', 'bench', *args]\n"
        "    try:\n"
        "        main()\n"
        "    except SystemExit:\n"
        "        pass\n"
        "    if 'torch' in sys.modules:\n"
        "        sys.exit('imported torch: ' + ' '.join(args))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], env=dict(os.environ), capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr


def test_help_fits_80_columns_and_has_examples(echelon):
    ended = echelon("bench", "codecs", "--help")
    assert ended.code == 0
    assert max(map(len, ended.out.splitlines())) <= 80
    lines = [line.strip() for line in ended.out.splitlines()]
    examples = lines[lines.index("Examples:") + 1 :]
    examples = examples[: examples.index("")]
    assert len(examples) >= 3
    assert all(example.startswith("echelon bench codecs") for example in examples)
    assert "codecs" in echelon("bench", "--help").out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--model", "lent"], "did you mean 'lenet'?"),
        (["--workers", "1"], "give 2 or more"),
        (["--ddp-script", "ddp.py"], "--script train.py"),
        (["--script", "none.py"], "there is no script none.py"),
        (["--script", "plain.py"], "--ddp-script ddp.py"),
    ],
)
def test_step_refuses_mistakes_before_anything_is_started(echelon, words, said):
    Path("plain.py").write_text("import torch\n", encoding="utf-8")
    ended = echelon("bench", "step", *words)
    assert (ended.code, ended.out) == (2, "")
    assert said in ended.err
    assert len(ended.err.splitlines()) == 3, "what, where, fix"
