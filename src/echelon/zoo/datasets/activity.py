"""Generated windows of human activity, in the layout of UCI's data set (Anguita et al., 2013).

A phone at the waist, 50 samples a second, windows of 128: three channels each of body acceleration [g],
angular velocity [rad/s] and total acceleration [g]. Six classes: walking, walking upstairs, walking
downstairs, sitting, standing, lying. A walk is a periodic motion with harmonics, whose pace, strength and
phase differ from window to window; rest is a posture with a little sway. Both have noise, and a phone that
is slightly tilted.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from echelon.zoo.dataset import Data, SampleSpec, Splits
from echelon.zoo.options import check_range, check_seed

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

_CHANNELS = 9
_STEPS = 128
_RATE_PER_S = 50.0
# For each class: steps per second, strength [g], direction of gravity, share of the second harmonic.
_KINDS = (
    (1.9, 0.30, (1.0, 0.0, 0.0), 0.5),
    (1.6, 0.25, (0.95, -0.2, 0.2), 0.2),
    (2.1, 0.45, (0.97, 0.1, -0.1), 0.9),
    (0.3, 0.015, (0.8, 0.3, 0.5), 0.0),
    (0.3, 0.020, (1.0, -0.1, 0.0), 0.0),
    (0.25, 0.010, (0.0, 0.5, 0.85), 0.0),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Activity(Data):
    """Generated activity windows: 9 channels of motion, 128 steps, 6 classes, 80 % for training.

    Another seed gives other windows of the same activities.
    """

    name: ClassVar[str] = "activity"

    seed: int = 0
    samples: int = 10_000

    def __post_init__(self) -> None:
        check_seed("data activity", self.seed)
        check_range("data activity", "samples", self.samples, least=100)

    def load(self) -> Splits:
        """Windows of 9 x 128, in physical units."""
        import numpy as np
        import torch

        from echelon.zoo.arrays import ArrayDataset, collate

        # numpy guarantees that this generator's numbers never change.
        random = np.random.RandomState(self.seed)
        labels = random.randint(len(_KINDS), size=self.samples)
        inputs = torch.from_numpy(_windows(labels, random))
        targets = torch.from_numpy(labels.astype(np.uint8))
        cut = self.samples * 8 // 10
        return Splits(
            train=ArrayDataset(inputs[:cut].clone(), targets[:cut].clone()),
            test=ArrayDataset(inputs[cut:].clone(), targets[cut:].clone()),
            spec=SampleSpec(
                shape=(_CHANNELS, _STEPS), dtype="float32", classes=len(_KINDS), task="classify"
            ),
            collate=collate,
        )


def _windows(labels: NDArray[np.int64], random: np.random.RandomState) -> NDArray[np.float32]:
    """One window of 9 x 128 per label."""
    import numpy as np

    count = len(labels)
    kinds = [_KINDS[label] for label in labels]
    pace = np.array([kind[0] for kind in kinds]) * random.normal(1.0, 0.12, count)
    strength = np.array([kind[1] for kind in kinds]) * np.exp(random.normal(0.0, 0.3, count))
    harmonic = np.array([kind[3] for kind in kinds])
    down = np.array([kind[2] for kind in kinds]) + random.normal(0.0, 0.12, (count, 3))
    down /= np.linalg.norm(down, axis=1, keepdims=True)

    cycle = 2 * np.pi * np.arange(_STEPS) / _RATE_PER_S
    phase = random.uniform(0.0, 2 * np.pi, (count, 6, 1))
    angle = pace[:, None, None] * cycle + phase
    wave = np.sin(angle) + harmonic[:, None, None] * np.sin(2 * angle + phase)
    # Most of the motion is along gravity; the two other axes swing less.
    weight = 0.4 + 0.6 * np.abs(down)
    body = strength[:, None, None] * weight[:, :, None] * wave[:, :3]
    spin = 2.0 * strength[:, None, None] * wave[:, 3:]
    body += random.normal(0.0, 0.02, body.shape)
    spin += random.normal(0.0, 0.05, spin.shape)
    total = body + down[:, :, None]
    return np.concatenate([body, spin, total], axis=1).astype(np.float32)
