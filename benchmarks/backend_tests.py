"""torch's own tests of backends, from torch's wheel, on Gloo and on Echelon's backend: both counts.

    python benchmarks/backend_tests.py                # all that apply to the CPU, both backends
    python benchmarks/backend_tests.py -k broadcast   # those whose names contain a word
    python benchmarks/backend_tests.py --only echelon --quick

torch names its backends in many of these tests, and skips those of other names. So Echelon's backend stands
in for Gloo: the name "gloo" makes a group on Echelon's engine, and the tests do not change. There are two
exceptions. Tests of the all-to-all for CPUs, and with fewer than 8 workers those of groups, are skipped
unless the name is "mpi"; here both backends run them. A test that compares the backend's name runs with
Echelon's own. The profiler's events are compared for Gloo only: torch does so for a list of backends.

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
BACKENDS = ("gloo", "echelon")
NAMED = ("test_ddp_logging_data_cpu",)
MPI_ONLY = "all_to_all"
QUICK = (
    "test_all_gather_object_subgroup",
    "test_all_reduce_coalesced_group_sum",
    "test_all_reduce_sum_async",
    "test_barrier_timeout_full_group",
    "test_batch_isend_irecv_gloo_tags",
    "test_gather_group",
    "test_reduce_group_max",
    "test_scatter_object_list",
    "test_send_recv_any_source",
    "test_sparse_all_reduce_sum",
)
Outcomes = dict[str, tuple[str, str]]


def stand_in() -> None:
    """Let the name "gloo" make groups on Echelon's engine, in this process and its forks."""
    from torch.distributed import distributed_c10d

    from echelon.backend.process_group import BackendProcessGroup

    class InPlaceOfGloo(BackendProcessGroup):
        def __init__(self, store, rank, size, timeout):
            super().__init__(store, rank, size, timeout)
            self.options = argparse.Namespace()

    distributed_c10d.ProcessGroupGloo = InPlaceOfGloo


def test_case(backend: str, skips: str, name: str) -> type[unittest.TestCase]:
    """torch's tests, each in forked processes. They skip as for a backend `skips`, and make `name`."""
    os.environ.setdefault("TEMP_DIR", tempfile.mkdtemp())
    os.environ.update(BACKEND=skips, WORLD_SIZE=str(WORLD_SIZE), INIT_METHOD="env://")
    import torch
    from torch.testing._internal.distributed import distributed_test

    class TorchTests(distributed_test.TestDistBackend, distributed_test.DistributedTest._DistTestBase):
        def setUp(self) -> None:
            super().setUp()
            self._start_processes(torch.multiprocessing.get_context("fork").Process)

    distributed_test.BACKEND = name
    os.environ["BACKEND"] = "mpi"  # others need 8 workers for tests of groups of two
    if backend == "echelon":
        distributed_test.PROFILING_SUPPORTED_BACKENDS.clear()
        distributed_test.SEND_RECV_PROFILING_SUPPORTED_BACKENDS.clear()
    return TorchTests


def outcome(case: type[unittest.TestCase], name: str) -> tuple[str, str]:
    """Run one test: passed, skipped or failed, and why."""
    result = unittest.TestResult()
    case(name).run(result)
    if result.skipped:
        return "skipped", result.skipped[0][1]
    problems = [*result.errors, *result.failures]
    return ("failed", problems[0][1]) if problems else ("passed", "")


def run_pass(backend: str, which: str, word: str, target: Path, *, quick: bool) -> None:
    """Run some tests on one backend and write the outcomes: the usual ones, MPI's, or the named."""
    skips, name = ("mpi", "gloo") if which == "mpi" else ("gloo", "echelon" if which == "named" else "gloo")
    if backend == "echelon":
        if which == "named":
            import echelon.backend  # noqa: F401 - registers the name
        else:
            stand_in()
    case = test_case(backend, skips, name)
    found: Outcomes = {}
    for test in unittest.TestLoader().getTestCaseNames(case):
        usual = MPI_ONLY not in test and not (backend == "echelon" and test in NAMED)
        chosen = {"usual": usual, "mpi": MPI_ONLY in test, "named": test in NAMED}[which]
        if chosen and word in test and (not quick or test in QUICK):
            begun = time.monotonic()
            found[test] = outcome(case, test)
            seconds = time.monotonic() - begun
            print(f"{backend} {test}: {found[test][0]} ({seconds:.1f} s)", file=sys.stderr, flush=True)
    target.write_text(json.dumps(found))


def run(backend: str, word: str, *, quick: bool) -> Outcomes:
    """All passes of one backend, each in a process of its own: torch reads names when it is imported."""
    found: Outcomes = {}
    passes = ["usual"] if quick else ["usual", "mpi", *(["named"] if backend == "echelon" else [])]
    for which in passes:
        with tempfile.TemporaryDirectory() as folder:
            target = Path(folder) / "outcomes"
            command = [sys.executable, __file__, "--child", which, "--target", str(target)]
            command += ["--only", backend, "-k", word, *(["--quick"] if quick else [])]
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
            found |= json.loads(target.read_text())
    return found


def report(outcomes: dict[str, Outcomes]) -> None:
    """Counts; then each difference, or with one backend, what failed and why others do not apply."""
    for backend, found in outcomes.items():
        count = collections.Counter(kind for kind, _ in found.values())
        print(
            f"{backend}: {count['passed']} passed, {count['failed']} failed, "
            f"{count['skipped']} do not apply"
        )
    if len(outcomes) == 2:
        theirs, ours = outcomes["gloo"], outcomes["echelon"]
        for name in sorted(name for name in ours if ours[name][0] != theirs[name][0]):
            (peer, reason), (own, why) = theirs[name], ours[name]
            print(f"{name}: gloo {peer}, echelon {own}\n{(why or reason).strip()}")
        return
    for found in outcomes.values():
        for why, count in collections.Counter(
            why for kind, why in found.values() if kind == "skipped"
        ).items():
            print(f"{count:4} {why}")
        for name, (kind, why) in found.items():
            if kind == "failed":
                print(f"--- {name}\n{why}")


def main() -> None:
    """Run, count, compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("-k", default="", metavar="WORD")
    parser.add_argument("--only", choices=BACKENDS)
    parser.add_argument("--quick", action="store_true", help="a chosen few")
    parser.add_argument("--child", choices=("usual", "mpi", "named"), help=argparse.SUPPRESS)
    parser.add_argument("--target", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        run_pass(options.only, options.child, options.k, options.target, quick=options.quick)
        return
    chosen = [options.only] if options.only else BACKENDS
    report({backend: run(backend, options.k, quick=options.quick) for backend in chosen})


if __name__ == "__main__":
    main()
