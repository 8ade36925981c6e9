"""`Tracker`: the record of what training does to a model's query-key forms, written while it trains."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from qkform.dynamics.environment import changed, environment
from qkform.dynamics.ledger import Ledger, counted
from qkform.dynamics.measures import Measures
from qkform.dynamics.probe import Probe, place
from qkform.dynamics.processes import by_first, is_first, is_sharded, resharded, total, world_size
from qkform.dynamics.tracker_events import TrainerEvents
from qkform.errors import DynamicsError, QKFormError, RecordError
from qkform.runs import NAME, RunRecord, RunWriter

PERMUTATIONS = 20  # draws of the null of conflict, where it is asked for without a number
HeldOut: TypeAlias = Any  # a number, a function that returns one, None; in a Trainer a bool


class Tracker(TrainerEvents):
    """Writes a line of `record.jsonl` per tracked step: loss, form and attention of every layer and head, rates, time.

    In a plain loop call `step` after every step, and `step(0)` before the first; as a callback of transformers'
    Trainer, `Trainer(callbacks=[tracker])`, it does the same by itself. Tracked are step 0, every `every`-th, and the
    last. The training is not disturbed: random numbers, gradients, modes and weights are what they are without it.

    model        the model that trains, compiled or wrapped or sharded; None in a Trainer, which has it
    every        steps between two lines
    path         the record; its folder must be there
    probe        the batch that attention is measured on, keyword arguments of one call of the model; in a Trainer the
                 first held-out one where none is given. It is kept beside the record, for resuming. Without a probe
                 the weights alone are measured
    experiment   what is trained, for the record's first line: a mapping of plain values
    conflict     whether to record `conflict` on the probe, which needs labels; a number is that of permutations
    held_out     a function without arguments that returns the held-out loss, called at tracked steps. In a Trainer:
                 None evaluates at tracked steps where the Trainer evaluates at all, True always, False never
    resume       the step that training goes on after: the record of the run is cut back to it. A Trainer that resumes
                 from a checkpoint knows it

    Errors: DynamicsError for a model without self-attention and a probe that does not fit it; RecordError for a record
    that exists already, that another process writes, or that cannot be written.

    >>> with Tracker(model, every=100, path="record.jsonl", probe=batch) as tracker:     # doctest: +SKIP
    ...     tracker.step(0, optimizer=optimizer)
    ...     for step, batch in enumerate(batches, 1):
    ...         loss = train(batch)
    ...         tracker.step(step, loss=loss, optimizer=optimizer, batch=batch)
    """

    def __new__(cls, *args: Any, **kwargs: Any) -> Tracker:
        kind = _as_callback(cls) if "transformers" in sys.modules else cls  # type: ignore[arg-type]
        return super().__new__(kind)

    def __init__(
        self,
        model: Any = None,
        every: int = 100,
        path: Any = NAME,
        probe: Mapping[str, Any] | None = None,
        *,
        experiment: Mapping[str, Any] | None = None,
        conflict: bool | int = False,
        held_out: HeldOut = None,
        resume: int | None = None,
    ) -> None:
        if isinstance(every, bool) or not isinstance(every, int) or every < 1:
            raise DynamicsError(f"every is {every!r}; it is a number of steps, 1 or more")
        if resume is not None and (isinstance(resume, bool) or not isinstance(resume, int) or resume < 0):
            raise DynamicsError(f"resume is {resume!r}; it is the step of a checkpoint, 0 or more")
        if not isinstance(conflict, int) or conflict < 0:
            raise DynamicsError(f"conflict is {conflict!r}; it is True, or a number of permutations")
        if experiment is not None and not isinstance(experiment, Mapping):
            raise DynamicsError(
                f"experiment is a {type(experiment).__name__}; it is a mapping of names to plain values"
            )
        self.model, self.every, self.path = model, every, Path(path)
        if os.path.isdir(self.path):
            raise RecordError(
                f"cannot write {path}: it is a folder; name a file in it, such as {self.path / NAME}"
            )
        self.experiment, self.resume, self.held_out = experiment, resume, held_out
        self.conflict: int | None = (
            None if conflict is False else PERMUTATIONS if conflict is True else conflict
        )
        self.reason: str | None = None  # why training ends, for the event `end`; None: it is finished
        self.ledger = Ledger()
        self._probe = None if probe is None else Probe(probe)
        if self.conflict is not None and self._probe is not None and not self._probe.has_labels:
            raise DynamicsError("conflict needs a loss, and the probe has no labels; add them to it")
        self._started = self._resumed_line = self._probe_by_default = False
        self._unmeasured: str | None = None  # why attention is not, though the Trainer gave a probe
        self._writer: RunWriter | None = None  # of the first process
        self._measures: Measures | None = None  # None: not begun
        self._loaded: Mapping[str, Any] | None = None
        self._last: dict[str, Any] | None = None  # the last step, where it was not tracked

    # ---- a plain loop --------------------------------------------------------------------------------------

    def step(
        self,
        step: int,
        *,
        loss: Any = None,
        optimizer: Any = None,
        held_out: HeldOut = None,
        tokens: int | None = None,
        batch: Mapping[str, Any] | None = None,
        last: bool = False,
    ) -> None:
        """A step is done: note its tokens, and where it is tracked write its line. Of several processes each calls it.

        step       how many steps are done: 0 before the first, where there is no loss
        loss       of this step, a number or a tensor, which is not read where the step is not tracked; the mean over
                   processes is recorded
        optimizer  whose rates are recorded, by the `name` of each group, else its number. Call before the scheduler's
                   step, which sets the next rate
        held_out   the held-out loss, or a function that computes it, called where the step is tracked; of several
                   processes the first one's is recorded
        tokens     that this process has seen in this step; or batch, in which those that are no padding are counted
        last       whether training ends here: the line is written at once, before a last checkpoint, not by `close`
        """
        if isinstance(step, bool) or not isinstance(step, int) or step < 0:
            raise DynamicsError(f"step is {step!r}; it is the number of steps done, 0 or more")
        if self._measures is None:
            self._begin(self.model, step, self.resume)
        if tokens is None and batch is not None:
            tokens = counted(batch)
        if tokens is not None:
            self.ledger.add(tokens)
        held_out = self.held_out if held_out is None else held_out
        if isinstance(held_out, bool):
            raise DynamicsError(
                f"held_out is {held_out}; that is for a Trainer: in a loop of your own it is a number, or a function "
                "that returns one"
            )
        loss = loss.detach() if isinstance(loss, Tensor) else loss
        if step % self.every and not last:
            self._last = {"step": step, "loss": loss, "rates": rates(optimizer), "held_out": held_out}
            return
        self._last = None
        self._track(step, loss=loss, rates=rates(optimizer), held_out=held_out)

    def close(self, reason: str | None = None, *, measure: bool = True) -> None:
        """Training is over: the last step gets its line, and the record the event `end` with the reason.

        measure   False: no line, as when the model is broken, or when this process may be the only one that stops
        """
        if self._measures is not None:
            if self._last is not None and measure:
                last, self._last = self._last, None
                self._track(**last)
            self._end(reason or self.reason or "finished")
        self.abandon()

    def abandon(self) -> None:
        """Let the record go without an end, as a kill would: the run can be resumed."""
        if self._writer is not None:
            self._writer.close()
        if self._hook is not None:
            self._hook.remove()
        self._writer = self._measures = self._last = self._hook = None

    def __enter__(self) -> Tracker:
        return self

    def __exit__(self, kind: Any, *rest: Any) -> None:
        if kind is None:
            self.close()
        else:
            self.abandon()

    def event(self, name: str, **said: Any) -> None:
        """Note something that happened to the run, a line of its own with plain values."""
        if name in ("start", "resume", "end"):
            raise DynamicsError(f"the event {name!r} is the tracker's own; name yours otherwise")
        if self._measures is None:
            raise DynamicsError(
                "the record has not begun; note events after step(0), or after training began"
            )
        if self._writer is not None:
            self._writer.event(name, **said)

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint keeps of the tracker: tokens and seconds so far. Of several processes each calls it."""
        if self._measures is not None:
            self.ledger.settle(self._device)
        return self.ledger.state()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a `state_dict`, in place of what the record says of the step that is resumed."""
        self.ledger.load(state)
        self._loaded = dict(state)

    # ---- inside --------------------------------------------------------------------------------------------

    def _begin(self, model: Any, step: int, resume: int | None) -> None:
        """Find what is tracked, and open the record: a new one, or the old one cut back to `resume`."""
        if model is None:
            raise DynamicsError("the tracker has no model; give it one, or use it as a callback of a Trainer")
        if resume is not None and step < resume:
            raise DynamicsError(f"the tracker resumes after step {resume}, and step {step} comes before it")
        self.ledger.begin()
        with self.ledger.own():
            measures = Measures(model)
            self._started, self._first_step, self._first_rows = resume is not None, step, True
            self._resumed_line, self._unmeasured = False, None
            found = by_first(lambda: self._opened(resume, measures), measures.device)
            self._measures = measures
            if found is None:
                return
            if found.probe is not None:
                self._probe = found.probe
            self._resumed_line = found.last is not None and found.last["step"] == resume
            if self._loaded is None and found.last is not None:
                self.ledger.load(found.last)

    def _opened(self, resume: int | None, measures: Measures) -> Resumed | None:
        """In the first process: the record, and what a resumed run goes on with."""
        if resume is None:
            self._writer = RunWriter.new(self.path)
            return None
        before = RunRecord.load(self.path)
        if before.layers != measures.about:
            raise RecordError(
                f"{self.path} is the record of another model: its layers are not those of this one"
            )
        probe = kept_probe(self.path, before, self._probe)
        now = environment(measures.live.root)
        reason = changed(before.start.get("environment") or {}, now)
        lines = {line["step"]: dict(line) for line in before.steps if line["step"] <= resume}
        if reason is None and resume not in lines:
            if resume % self.every == 0:
                reason = f"the record has no line of step {resume}"
            elif self._loaded is None:
                reason = f"nothing says how many tokens and seconds there were up to step {resume}"
        self._writer, _ = RunWriter.resume(
            self.path, resume, environment=now, exact=reason is None, reason=reason
        )
        return Resumed(probe, lines[max(lines)] if lines else None)

    def _start(self) -> None:
        """The first line, once it is known what the probe is."""
        if self._started:
            return
        self._started = True
        measures = self._measures
        if self.conflict is not None and self._probe is None and self._unmeasured is None:
            raise DynamicsError(
                "conflict is measured on a probe, a batch with labels, and there is none; give probe="
            )
        if self._writer is None or measures is None:
            return
        if self._probe is not None:
            self._probe.save(place(self.path))
        root = measures.live.root
        self._writer.start(
            {
                "step": self._first_step,
                "experiment": self.experiment,
                "environment": environment(root),
                "model": {"class": type(root).__name__, "model_type": measures.model_type},
                "layers": measures.about,
                "probe": None if self._probe is None else self._probe.about,
            }
        )
        if self._unmeasured is not None:
            self._writer.event("unmeasured", step=self._first_step, reason=self._unmeasured)

    def _track(self, step: int, *, loss: Any, rates: Mapping[str, Any], held_out: HeldOut) -> None:
        """Measure, and write the line."""
        loss = None if loss is None else total(float(loss), self._device) / world_size()
        held_out = held_out() if callable(held_out) else held_out
        line = self._measured(step, rates)
        self._write({**line, "loss": loss, "held_out": None if held_out is None else float(held_out)})

    def _measured(self, step: int, rates: Mapping[str, Any]) -> dict[str, Any]:
        """The line of a step without its losses: the model as it is now."""
        self.ledger.settle(self._device)
        with self.ledger.own():
            layers = self._rows()
            self._start()  # after the first measurement, which may show that the probe is of no use
        return {
            "step": step,
            "loss": None,
            "held_out": None,
            "tokens": 0 if step == 0 else self.ledger.tokens,
            "rates": dict(rates),
            "layers": layers,
            **self.ledger.line(),
        }

    def _rows(self) -> list[dict[str, Any]]:
        """Of the first process; others take part where the model is sharded over them."""
        measures = self._measures
        assert measures is not None
        sharded = is_sharded(measures.live.root)
        if not is_first() and not sharded:
            return []
        batch = None
        if self._probe is not None:
            labels = self.conflict is not None or measures.is_encoder_decoder  # whose decoder reads them
            batch = self._probe.batch(measures.device, labels=labels)
        first, self._first_rows = self._first_rows, False
        measure = measures.rows if is_first() else measures.take_part
        try:
            return measure(batch, permutations=self.conflict)
        except Exception as error:  # a model may raise anything
            if batch is None or not first:
                raise
            problem = _problem(error, batch)
            if not self._probe_by_default:
                raise problem from error
            self._unmeasured = str(problem)
            warnings.warn(f"the record has no attention weights: {problem}", UserWarning, stacklevel=2)
            self._probe = None
            return measure(None, permutations=None)
        finally:
            if sharded:
                resharded(measures.live.root)

    def _write(self, line: Mapping[str, Any]) -> None:
        if self._writer is not None:
            with self.ledger.own():
                self._writer.append(line)

    def _end(self, reason: str, step: int | None = None) -> None:
        if self._writer is not None:
            self._start()
            self._writer.event("end", step=self._writer.last_step if step is None else step, reason=reason)

    @property
    def _device(self) -> torch.device:
        assert self._measures is not None
        return self._measures.device


class Resumed(NamedTuple):
    """What a resumed run goes on with: its probe, and the last line that is left."""

    probe: Probe | None
    last: dict[str, Any] | None


def _problem(error: Exception, batch: Mapping[str, Any]) -> QKFormError:
    """What is wrong with the first measurement on a probe, in words."""
    known = isinstance(error, QKFormError)
    said = "" if known else f"the model cannot be called with the probe, which has {', '.join(batch)}: "
    kind = "" if known else f"{type(error).__name__}: "
    return DynamicsError(f"{said}{kind}{error} (without a probe the weights alone are tracked)")


def kept_probe(path: Path, record: RunRecord, given: Probe | None) -> Probe | None:
    """The probe that a record was begun with: the one that is given, or the one beside it."""
    kept, file = (record.start.get("probe") or {}).get("sha256"), place(path)
    if given is None and kept is not None and not file.exists():
        raise RecordError(
            f"the probe of {path} is missing: put {file} back, or give the same batch as probe="
        )
    probe = Probe.load(file) if given is None and kept is not None else given
    if (None if probe is None else probe.sha256) != kept:
        where = f"give none: it is in {file}" if kept is not None else "it was begun without one"
        raise RecordError(f"{path} was begun with another probe; {where}")
    return probe


def rates(optimizer: Any) -> dict[str, float | None]:
    """The learning rate of each parameter group, by its `name`, else its number."""
    if optimizer is None:
        return {}
    groups = enumerate(optimizer.param_groups)
    return {str(g.get("name", i)): float(g["lr"]) if "lr" in g else None for i, g in groups}


@cache
def _as_callback(cls: type[Tracker]) -> type[Tracker]:
    """The class as transformers' own kind of callback, whose state goes into the Trainer's checkpoints."""
    try:
        from transformers.trainer_callback import ExportableState, TrainerCallback
    except ImportError:
        return cls
    if issubclass(cls, TrainerCallback):
        return cls
    about = {"__module__": cls.__module__, "__doc__": cls.__doc__}
    return type(cls.__name__, (cls, TrainerCallback, ExportableState), about)
