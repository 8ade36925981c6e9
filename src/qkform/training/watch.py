"""What happens around the updates of a run: the record, held-out loss, checkpoints, and when to stop."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from transformers import TrainerCallback

from qkform.dynamics.processes import by_first
from qkform.errors import QKFormError, TrainingError
from qkform.training import checkpoints, states
from qkform.training.engine import Engine
from qkform.training.folder import CHECKPOINTS
from qkform.training.logits import largest_logit
from qkform.training.saving import save_model


@dataclass(frozen=True)
class Progress:
    """Where a run is. `tokens_per_second` and `seconds_left` are since this process began or resumed it."""

    step: int
    steps: int
    loss: float  # of the step, nats; NaN at step 0
    held_out: float | None  # the last one that was measured, nats
    tokens_per_second: float
    seconds_left: float


class Watch(TrainerCallback):
    """Drives tracker, checkpoints and stops from Trainer's own events, in an order that a kill cannot confuse.

    Before an update the loss is looked at; after it the held-out loss is measured and the line is written; a checkpoint
    comes last, so that the record always reaches as far as the newest checkpoint.
    """

    def __init__(
        self,
        engine: Engine,
        tracker: Any,
        folder: Path,
        facts: dict[str, Any],
        data: dict[str, Any],
        tokenizer: Any,
        progress: Callable[[Progress], None] | None,
    ) -> None:
        self.engine, self.tracker, self.folder = engine, tracker, folder
        self.facts, self.data, self.tokenizer = facts, data, tokenizer
        self.progress = progress
        self.asked_to_stop: Callable[[], bool] = lambda: False
        self.reason: str | None = None  # why training ended before its last step
        self.held_out: float | None = None
        self.best: float | None = None  # lowest held-out loss that was measured
        self._began: tuple[float, int] = (0.0, 0)
        self._saved = -1
        self._stopping = False
        self._measurable = False  # after a step that was not made: all stop, and the weights are as before
        self._rates: list[
            dict[str, Any]
        ] = []  # of the step that is made; the schedule sets the next ones at once

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        step = state.global_step
        self._began = (time.monotonic(), step)
        if self.tracker.resume is None:
            self._track(0)
            self.tracker.event("data", **self.data)
            self._save(0)
        else:
            self._saved = step
        self._report(step)

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._rates = [{"name": g["name"], "lr": g["lr"]} for g in self.engine.optimizer.param_groups]
        self._stopping, sound = self.engine.settle(self.asked_to_stop())
        if not sound:
            self.reason = "nan"
            raise TrainingError(self._not_finite(state.global_step + 1))

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        step, e = state.global_step, self.engine.experiment
        last = step >= e.steps
        self._track(step)
        if step % e.track_every == 0 or last:
            if e.report_to:
                said = {"loss": self.engine.last_loss, "held_out": self.held_out}
                self.engine.log({name: value for name, value in said.items() if value is not None})
            if e.stop_at_loss is not None and self.held_out is not None and self.held_out <= e.stop_at_loss:
                self.reason = "stop_at_loss"
        if self._stopping and not last and self.reason is None:
            self.reason = "interrupted"
        if step % e.save_every == 0 or last or self.reason:
            self._save(step)
        if self.reason:
            control.should_training_stop = True
        self._report(step)

    def facts_of_loss(self) -> dict[str, float | None]:
        return {"held_out": self.held_out, "best": self.best}

    def broke(self, error: BaseException) -> None:
        """Note in the record that training broke off, where that can be written, and let go of it.

        What takes all processes is done only where all have agreed to stop.
        """
        with suppress(QKFormError, OSError):
            if self.reason == "nan":
                self.tracker.close("nan", measure=self._measurable)
            elif isinstance(error, KeyboardInterrupt):
                self.tracker.event("interrupted", step=self.engine.state.global_step)
        self.tracker.abandon()

    def _track(self, step: int) -> None:
        e = self.engine.experiment
        self.tracker.step(
            step,
            loss=self.engine.last_loss if step else None,
            held_out=self._held_out,
            optimizer=SimpleNamespace(
                param_groups=self._rates if step else self.engine.optimizer.param_groups
            ),
            tokens=e.batch_size * e.seq_len // self.engine.args.world_size if step else 0,
            last=step == e.steps,
        )

    def _held_out(self) -> float:
        self.held_out = self.engine.held_out_loss()
        if math.isfinite(self.held_out):
            self.best = self.held_out if self.best is None else min(self.best, self.held_out)
        return self.held_out

    def _save(self, step: int) -> None:
        """A checkpoint of this step; all processes gather it and the first one writes."""
        if self._saved == step:
            return
        model, training = self.engine.whole_model(), self.engine.training_state()
        tracked = self.tracker.state_dict()
        self._refuse_nan(step)

        def write() -> None:
            facts = {
                "step": step,
                **self.facts,
                **self.facts_of_loss(),
                "tracker": tracked,
                "reason": self.reason,
            }
            if self.reason is None and step >= self.engine.experiment.steps:
                facts["reason"] = "finished"
            with checkpoints.written(self.folder / CHECKPOINTS, f"step-{step}", facts) as aside:
                save_model(model, self.tokenizer, aside)
                states.save(training, aside)
                self.engine.state.save_to_json(str(aside / "trainer_state.json"))
            checkpoints.tidy(self.folder / CHECKPOINTS, self.engine.experiment.keep)

        by_first(write, self.engine.args.device)  # where it cannot be written, all stop
        self._saved = step

    def _refuse_nan(self, step: int) -> None:
        """TrainingError, in all processes alike, where a weight that would be saved is no number."""
        broken = self.engine.broken_weights()
        if broken:
            self.reason = "nan"
            raise TrainingError(
                f"step {step}: the loss is finite and the weights are not{_in(broken)}; {self._last_good()}; "
                "a smaller lr or clip may help"
            )

    def _not_finite(self, step: int) -> str:
        e = self.engine
        what = f"the loss is {e.last_loss}"
        if math.isfinite(e.last_loss):
            broken = e.broken_gradients()
            what = f"the loss is {e.last_loss:.4g}, but the gradient is not finite{_in(broken)}"
        batch = {name: value.to(e.args.device) for name, value in e.last_inputs.items() if name != "labels"}
        try:
            path, size = largest_logit(e.model, batch)
            largest = f"the largest logit is {size:.4g}, in {path}"
        except QKFormError as error:
            largest = f"which attention has the largest logit is not known ({error})"
        broken = e.broken_weights()
        self._measurable = not broken
        weights = "the weights were not updated"
        if broken:
            weights = f"the weights were not finite before this step{_in(broken)}"
        return (
            f"step {step}: {what}; {largest}; {weights}; {self._last_good()}; a smaller lr, more warm-up steps or a "
            "smaller clip may help"
        )

    def _last_good(self) -> str:
        found, _ = checkpoints.checkpoints(self.folder / CHECKPOINTS)
        return f"the last good checkpoint is {found[-1].path}" if found else "there is no checkpoint yet"

    def _report(self, step: int) -> None:
        if self.progress is None:
            return
        e = self.engine.experiment
        began, first = self._began
        seconds = max(time.monotonic() - began, 1e-9)
        rate = (step - first) / seconds
        self.progress(
            Progress(
                step,
                e.steps,
                self.engine.last_loss if step > first else math.nan,
                self.held_out,
                rate * e.batch_size * e.seq_len,
                (e.steps - step) / rate if rate else math.nan,
            )
        )


def _in(names: list[str]) -> str:
    """Where something is, in words: of many the first, and how many more."""
    if not names:
        return ""
    return f" in {names[0]}" + (f" and {len(names) - 1} more" if len(names) > 1 else "")
