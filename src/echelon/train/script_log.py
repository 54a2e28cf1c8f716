"""What a script can record: losses, evaluations, numbers, notes."""

from __future__ import annotations

import logging
import time
from dataclasses import replace

from torch import Tensor

from echelon.errors import ConfigError
from echelon.observe.events import Evaluated, Logged, Noted, StepsExpected
from echelon.plan.plan import Plan
from echelon.train.clock import StepClock
from echelon.train.record import RunRecord

_log = logging.getLogger(__name__)


class ScriptLog:
    """The recording half of a session."""

    def __init__(self, record: RunRecord, clock: StepClock, plan: Plan, rank: int) -> None:
        self._record = record
        self._clock = clock
        self._plan = plan
        self._log_rank = rank
        self._log_leads = rank == 0  # another worker, once the first one is lost
        self.evaluated: tuple[int, dict[str, float]] = (-1, {})
        """The step of the last evaluation, and its figures."""

    @property
    def epoch(self) -> int:
        """The current epoch, from 0."""
        return self._clock.epoch

    @property
    def step(self) -> int:
        """How many steps the optimizer has taken."""
        return self._clock.step

    def log(self, *, loss: Tensor | float | None = None, **values: Tensor | float) -> None:
        """Record the loss of this step, and any other numbers, for the report.

        loss    this worker's loss; the report shows the mean over all workers
        values  other numbers, each under its own name

        Example:

            session.log(loss=loss, grad_norm=norm)
        """
        if not self._clock.records:
            return
        if loss is not None:
            self._clock.note_loss(loss)
        if values:
            numbers = {name: _number(value) for name, value in values.items()}
            self._record.emit(Logged(t=time.time(), rank=self._log_rank, step=self.step, values=numbers))

    def log_evaluation(
        self, *, loss: float | None = None, accuracy: float | None = None, samples: int
    ) -> None:
        """Record how good the model is on held-out data: a loss, an accuracy, or both.

        loss      the mean loss over the held-out samples
        accuracy  the fraction of correct answers, from 0 to 1
        samples   how many samples these figures are over

        All workers may call it; the leader's figures are recorded. Example:

            session.log_evaluation(accuracy=correct / total, samples=total)
        """
        if loss is None and accuracy is None:
            raise ConfigError(
                "an evaluation needs a loss or an accuracy",
                where="session.log_evaluation",
                fix="give loss=..., accuracy=..., or both",
            )
        given = {"loss": loss, "accuracy": accuracy}
        self.evaluated = self.step, {name: float(one) for name, one in given.items() if one is not None}
        if not self._log_leads:
            return
        self._record.emit(
            Evaluated(
                t=time.time(),
                rank=self._log_rank,
                epoch=self.epoch,
                step=self.step,
                loss=loss,
                accuracy=accuracy,
                samples=samples,
            )
        )
        self._record.flush()

    def expect_steps(self, steps: int) -> None:
        """Tell the progress display how many steps the whole run will have.

        steps  the total, for example `len(loader) * epochs`
        """
        if self._log_leads:
            self._record.emit(StepsExpected(t=time.time(), rank=self._log_rank, steps=steps))

    def note(self, text: str) -> None:
        """Record a sentence that the report shows to its reader.

        text  the sentence, for example "learning rate halved after two bad epochs"
        """
        _log.info(text)
        self._record.emit(Noted(t=time.time(), rank=self._log_rank, text=text))

    def warn(self, text: str) -> None:
        """Tell the user that something may not be as it was meant: in the log, and in the report.

        text  the sentence, with what to do about it
        """
        _log.warning(text, extra={"is_noted": True})
        self._record.emit(Noted(t=time.time(), rank=self._log_rank, text=text, warning=True))
        self._record.flush()

    def explain(self, topic: str, why: str, tell: str = "") -> None:
        """Record in the plan why something was decided during the run.

        topic  the entry in the plan's `reasons`
        why    the reason
        tell   a sentence for the report as well; none if empty
        """
        if not self._log_leads:
            return
        self._plan = replace(self._plan, reasons={**self._plan.reasons, topic: why})
        if self._record.folder is not None:
            self._record.folder.plan.write_text(self._plan.to_toml())
        if tell:
            self.note(tell)


def _number(value: Tensor | float) -> float:
    return float(value.detach() if isinstance(value, Tensor) else value)
