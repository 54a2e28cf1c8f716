"""torch's own tests of backends, from torch's wheel, on Gloo and on Echelon's backend: both counts.

    python benchmarks/backend_tests.py                # all that apply to the CPU, both backends
    python benchmarks/backend_tests.py -k broadcast   # those whose names contain a word
    python benchmarks/backend_tests.py --only echelon

torch names its backends in many of these tests, and skips those of other names. So Echelon's backend stands
in for Gloo here: the name "gloo" makes a group on Echelon's engine, and nothing else of the tests changes.
Each test runs in four processes, forks of this one, so that none has to import torch. Needs expecttest.
"""

from __future__ import annotations

import argparse
import collections
import json
import os
import subprocess
import sys
import tempfile
import time
import unittest
from pathlib import Path

WORLD_SIZE = 4


def stand_in() -> None:
    """Let the name "gloo" make groups on Echelon's engine, in this process and its forks."""
    from torch.distributed import distributed_c10d

    from echelon.backend.process_group import BackendProcessGroup

    class InPlaceOfGloo(BackendProcessGroup):
        def __init__(self, store, rank, size, timeout):
            super().__init__(store, rank, size, timeout)
            self.options = argparse.Namespace()

    distributed_c10d.ProcessGroupGloo = InPlaceOfGloo


def test_case(backend: str) -> type[unittest.TestCase]:
    """torch's tests of backends, each in forked processes."""
    os.environ.setdefault("TEMP_DIR", tempfile.mkdtemp())
    os.environ.update(BACKEND="gloo", WORLD_SIZE=str(WORLD_SIZE), INIT_METHOD="env://")
    import torch
    from torch.testing._internal.distributed import distributed_test

    class TorchTests(distributed_test.TestDistBackend, distributed_test.DistributedTest._DistTestBase):
        def setUp(self) -> None:
            super().setUp()
            self._start_processes(torch.multiprocessing.get_context("fork").Process)

    if backend == "echelon":  # the profiler's events of listed backends are compared in detail
        distributed_test.PROFILING_SUPPORTED_BACKENDS.clear()
        distributed_test.SEND_RECV_PROFILING_SUPPORTED_BACKENDS.clear()
    return TorchTests


def names(case: type[unittest.TestCase], word: str) -> list[str]:
    """The tests whose names contain a word."""
    return [name for name in unittest.TestLoader().getTestCaseNames(case) if word in name]


def outcome(case: type[unittest.TestCase], name: str) -> tuple[str, str]:
    """Run one test: passed, skipped or failed, and why."""
    result = unittest.TestResult()
    case(name).run(result)
    if result.skipped:
        return "skipped", result.skipped[0][1]
    problems = [*result.errors, *result.failures]
    return ("failed", problems[0][1]) if problems else ("passed", "")


def run_child(backend: str, word: str, target: Path) -> None:
    """Run the tests on one backend and write the outcomes."""
    if backend == "echelon":
        stand_in()
    case = test_case(backend)
    found: dict[str, tuple[str, str]] = {}
    for name in names(case, word):
        begun = time.monotonic()
        found[name] = outcome(case, name)
        print(
            f"{backend} {name}: {found[name][0]} ({time.monotonic() - begun:.1f} s)",
            file=sys.stderr,
            flush=True,
        )
        target.write_text(json.dumps(found))


def main() -> None:
    """Run, count, compare."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("-k", default="", metavar="WORD")
    parser.add_argument("--only", choices=("gloo", "echelon"))
    parser.add_argument("--child", metavar="FILE")
    options = parser.parse_args()
    if options.child:
        run_child(options.only, options.k, Path(options.child))
        return
    outcomes = {}
    with tempfile.TemporaryDirectory() as folder:
        for backend in [options.only] if options.only else ["gloo", "echelon"]:
            file = Path(folder) / backend
            command = [sys.executable, __file__, "--child", str(file), "--only", backend, "-k", options.k]
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
            outcomes[backend] = json.loads(file.read_text())
    for backend, found in outcomes.items():
        count = {
            kind: sum(one[0] == kind for one in found.values()) for kind in ("passed", "failed", "skipped")
        }
        print(
            f"{backend}: {count['passed']} passed, {count['failed']} failed, "
            f"{count['skipped']} do not apply"
        )
    if len(outcomes) == 2:
        for name, (kind, why) in outcomes["echelon"].items():
            other = outcomes["gloo"][name][0]
            if kind != other:
                print(
                    f"{name}: gloo {other}, echelon {kind}: {why.strip().splitlines()[-1] if why else ''}"
                )
    else:
        reasons = collections.Counter(
            why for kind, why in outcomes[options.only].values() if kind == "skipped"
        )
        for why, count in reasons.most_common():
            print(f"{count:4} {why}")
        for name, (kind, why) in outcomes[options.only].items():
            if kind == "failed":
                print(f"--- {name}\n{why}")


if __name__ == "__main__":
    main()
