"""The options of `echelon bench codecs`, as a user writes them."""

from __future__ import annotations

from dataclasses import dataclass

from echelon.bench.codecs import Bench, usual_codecs
from echelon.config.describe import described, like
from echelon.config.units import rate_bytes_per_s
from echelon.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchSettings:
    """What to compare, and on what; everything but the names is checked when one is made."""

    codecs: str | None = described(
        None, 'Codecs with options: "fp16; top-k(ratio=0.01)". Default: all. See `echelon list codec`.'
    )
    model: str = like(Bench, "model", "The model: see `echelon list model`.")
    data: str = like(Bench, "data", "The data set: see `echelon list data`.")
    workers: int = like(Bench, "workers", "How many emulated workers.")
    steps: int = like(Bench, "steps", "Steps of each training.")
    batch: int = like(Bench, "batch", "The batch of each worker.")
    lr: float = like(Bench, "lr", "The learning rate.")
    decay: float = like(Bench, "decay", "The last part of the steps, in which the rate falls to 0.")
    momentum: float = like(Bench, "momentum", "The momentum of SGD, or of a codec that has its own.")
    seed: int = like(Bench, "seed", "Fixes the initial weights and the order of samples.")
    seeds: int = like(Bench, "seeds", "Train with so many seeds, from --seed on, and print means.")
    test_samples: int = like(Bench, "test_samples", "How many test samples to evaluate on; 0 is all.")
    link: str = described("100mbit", "The rate for which the time on the wire is predicted.")

    def __post_init__(self) -> None:
        self.bench()

    def bench(self) -> Bench:
        """What these options describe."""
        return Bench(
            model=self.model,
            data=self.data,
            workers=self.workers,
            steps=self.steps,
            batch=self.batch,
            lr=self.lr,
            decay=self.decay,
            momentum=self.momentum,
            seed=self.seed,
            seeds=self.seeds,
            test_samples=self.test_samples,
            link_bytes_per_s=rate_bytes_per_s(self.link, where="--link"),
        )

    def codec_texts(self) -> list[str]:
        """The codecs to compare, each with its options; the usual ones if none is named."""
        if self.codecs is None:
            return list(usual_codecs())
        texts = [text.strip() for text in self.codecs.split(";")]
        if not all(texts):
            raise ConfigError(
                f"{self.codecs!r} has an empty place",
                where="--codecs",
                fix='give codecs with ; between them: "fp16; one-bit"',
            )
        return texts


# For `--quick`: a few seconds in all.
QUICK = BenchSettings(model="mlp(32, 1)", data="digits", steps=30, lr=0.05, test_samples=100)
