"""Feeds each parser for minutes with bytes that reach new code in it: `make fuzz`, or

    python tests/fuzz/run.py [--seconds 600] [--list] [NAME ...]

The fuzzer is atheris (libFuzzer). It begins with the valid messages of each parser, and keeps what reached
new code in `.fuzz/NAME/`, so that the next run goes on from there. A parser fails if it raises what is no
error of Echelon's, needs more than 2 GB, or more than 10 s for one input. The input is then in
`.fuzz/NAME.failed-...`; add it to the seeds of the parser with the correction.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

_HERE = Path(__file__).resolve().parent
_KEPT = _HERE.parent.parent / ".fuzz"
_MOST_BYTES = 4096
_MEMORY_MB = 2048
_LONGEST_S = 10


def fuzz(name: str, seconds: int) -> None:
    """In this process, which it ends."""
    import atheris

    sys.path.insert(0, str(_HERE.parent))
    with atheris.instrument_imports(include=["echelon"]):
        from fuzz.parsers import parsers
    parser = parsers()[name]
    kept = _KEPT / name
    kept.mkdir(parents=True, exist_ok=True)
    for number, seed in enumerate(parser.seeds):
        (kept / f"seed-{number}").write_bytes(seed)
    atheris.Setup(
        [
            sys.argv[0],
            f"-max_total_time={seconds}",
            f"-max_len={_MOST_BYTES}",
            f"-rss_limit_mb={_MEMORY_MB}",
            f"-timeout={_LONGEST_S}",
            f"-artifact_prefix={_KEPT / name}.failed-",
            "-print_final_stats=1",
            str(kept),
        ],
        parser.feed,
    )
    atheris.Fuzz()


def names() -> list[str]:
    """All parsers."""
    sys.path.insert(0, str(_HERE.parent))
    from fuzz.parsers import parsers

    return list(parsers())


def main() -> int:
    """Each parser in a process of its own; returns 1 if one has failed."""
    asked = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    asked.add_argument("names", nargs="*", metavar="NAME")
    asked.add_argument("--seconds", type=int, default=600, help="for each parser")
    asked.add_argument("--list", action="store_true", help="print the names")
    asked.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    told = asked.parse_args()
    if told.here:
        fuzz(told.names[0], told.seconds)
    known = names()
    if told.list:
        print("\n".join(known))
        return 0
    unknown = sorted(set(told.names) - set(known))
    if unknown:
        print(f"no such parser: {', '.join(unknown)}; known: {', '.join(known)}")
        return 2
    failed = [name for name in told.names or known if not _passes(name, told.seconds)]
    print(f"failed: {', '.join(failed)}" if failed else "no parser failed")
    return 1 if failed else 0


def _passes(name: str, seconds: int) -> bool:
    command = [sys.executable, __file__, "--here", "--seconds", str(seconds), name]
    ended = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False)
    said = ended.stdout.decode(errors="replace")
    runs = [line.split()[-1] for line in said.splitlines() if "number_of_executed_units" in line]
    print(f"{name:32} {runs[0] if runs else '?':>10} inputs  {'ok' if not ended.returncode else 'FAILED'}")
    if ended.returncode:
        print(said[-4000:])
    sys.stdout.flush()
    return not ended.returncode


if __name__ == "__main__":
    sys.exit(main())
