"""`--parallel auto` against layouts given by hand: the step of five models, each on some workers or a lab.

    python benchmarks/layouts.py
    python benchmarks/layouts.py --pair 2 --steps 30

The choice is made first, by its own trials. Then every layout that has to be tried is timed again, and the
chosen one too; if another one is shorter, both once more, and the shorter time counts. The last column is
the step of the chosen layout against the shortest one of these times.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from echelon.config.resolve import resolve
from echelon.config.schema import TrainSettings
from echelon.errors import EchelonError
from echelon.parallel.candidates import candidate_layouts
from echelon.start.few_steps import timed_step_s
from echelon.start.layout_choice import chosen_layout
from echelon.start.run import Target

TARGET = Target(argv=["-m", "echelon.train.job"], name="layouts")
WORKERS = 2
NODE = '[[node]]\nname = "{name}"\nlink = "{link}"\n'


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """A model, and the links of a lab; without links, two workers of this machine."""

    model: str
    data: str
    batch: int
    links: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """As the table shows it."""
        where = f"lab, {' and '.join(dict.fromkeys(self.links))}" if self.links else "this machine"
        return f"{self.model}, {self.batch}; {where}"

    def given(self, folder: Path) -> dict[str, Any]:
        """The settings of a run."""
        found: dict[str, Any] = {"model": self.model, "data": self.data, "batch": self.batch}
        if not self.links:
            return {**found, "workers": WORKERS}
        lab = folder / "lab.toml"
        nodes = [NODE.format(name=f"n{at}", link=link) for at, link in enumerate(self.links)]
        lab.write_text("".join(nodes))
        return {**found, "lab": str(lab)}


PAIRS = (
    Pair(model="lenet", data="digits", batch=64),
    Pair(model="mlp(1024, 3)", data="digits", batch=32),
    Pair(model="char-transformer", data="text", batch=16),
    Pair(model="mlp(1024, 3)", data="digits", batch=32, links=("100mbit", "100mbit")),
    Pair(model="lenet", data="digits", batch=64, links=("1gbit", "1gbit")),
)


def main() -> None:
    """Print a row for each pair."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--pair", type=int, choices=range(1, len(PAIRS) + 1), help="only this one")
    parser.add_argument("--steps", type=int, default=20)
    asked = parser.parse_args()
    print("| model, batch; where | best by hand | chosen | of the best | took |")
    print("|---|---|---|---|---|")
    for pair in PAIRS if asked.pair is None else PAIRS[asked.pair - 1 : asked.pair]:
        begun = time.monotonic()
        print(f"{row(pair, asked.steps)} {time.monotonic() - begun:.0f} s |", flush=True)


def row(pair: Pair, steps: int) -> str:
    """The pair's row, but for how long it took."""
    with tempfile.TemporaryDirectory() as folder:
        os.environ["ECHELON_CACHE"] = folder
        given = pair.given(Path(folder))
        resolved = resolve(TrainSettings, {**given, "parallel": "auto"})
        chosen = chosen_layout(resolved, TARGET, lambda text: None).resolved.settings.parallel
        taken: dict[str, float] = {}

        def take(text: str) -> None:
            try:
                step_s = timed_step_s(
                    TrainSettings, {**given, "parallel": text, "epochs": 1000}, TARGET, steps
                )
            except EchelonError:
                return  # a layout that does not fit
            taken[text] = min(step_s, taken.get(text, step_s))

        for text in dict.fromkeys([*candidate_layouts(WORKERS, predicted=False), chosen]):
            take(text)
        best = min(taken, key=lambda text: taken[text])
        if best != chosen:  # other programs may have taken the cores meanwhile
            take(best)
            take(chosen)
    best = min(taken, key=lambda text: taken[text])
    return (
        f"| {pair.name} | {best}: {taken[best] * 1e3:.1f} ms | {chosen}: {taken[chosen] * 1e3:.1f} ms "
        f"| {taken[chosen] / taken[best]:.2f} |"
    )


if __name__ == "__main__":
    main()
