"""The page of benchmarks is made from what the scripts print, and says what they do."""

from __future__ import annotations

import importlib.util
import re
import sys

import pytest

from documents import ROOT


@pytest.fixture(scope="module")
def report():
    spec = importlib.util.spec_from_file_location("report", ROOT / "benchmarks" / "report.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules["report"] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules["report"]


def test_every_row_names_a_script_that_is_there_and_the_page_has_every_row(report):
    page = report.PAGE.read_text(encoding="utf-8")
    for row in report.rows():
        assert (ROOT / "benchmarks" / row.command.split()[0]).is_file()
        assert f"| {row.what} |" in page
        assert re.compile(row.found).groups > 0


@pytest.mark.parametrize(
    ("what", "line", "found"),
    [
        (
            "all-reduce in shared memory, 2 workers; 1, 4, 16, 64 MB",
            "shm    2 workers   1.000 MB: ours     0.103 ms, peer     0.950 ms,  9.20 x (target 5.00)",
            "9.20 x",
        ),
        ("AlexNet, 2 local workers, 224 x 224, batch 8 each; samples/s", "  speedup: 1.65", "1.65 x"),
        ("recording one step", "recording a step [us]               3.412", "3.412 (µs, %)"),
    ],
)
def test_figures_are_found_in_what_a_script_prints(report, what, line, found):
    row = next(row for row in report.rows() if row.what == what)
    assert report.found_in(row, f"something else\n{line}\n") == found
    assert report.found_in(row, "something else\n") == ""


def test_new_figures_replace_the_old_ones_and_nothing_else(report):
    page = f"before\n{report.BEGIN}\nold\n{report.END}\nafter\n"
    assert report.with_figures(page, "new") == f"before\n{report.BEGIN}\n\nnew\n\n{report.END}\nafter\n"
