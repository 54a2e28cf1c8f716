from __future__ import annotations

import os
from pathlib import Path

from echelon.start.template import ForkRequest, imported_libraries


def _request(program: str) -> ForkRequest:
    return ForkRequest(rank=0, program=[os.fsencode(program)], env={}, log=b"log", stdin_fd=0)


def test_slow_libraries_that_a_script_imports_at_its_top_level_are_found(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "import os, scipy.stats\nfrom sklearn.datasets import load_digits\n"
        "import mine\nfrom . import numpy\n"
        "def main():\n    import pandas\n"
    )
    assert imported_libraries([_request(str(script))] * 2) == ["scipy.stats", "sklearn.datasets"]


def test_a_script_that_is_missing_or_wrong_has_no_libraries(tmp_path: Path) -> None:
    wrong = tmp_path / "wrong.py"
    wrong.write_text("import numpy\ndef\n")
    binary = tmp_path / "binary.py"
    binary.write_bytes(b"\x00\xff")
    assert imported_libraries([_request(str(path)) for path in (wrong, binary, tmp_path / "none.py")]) == []
