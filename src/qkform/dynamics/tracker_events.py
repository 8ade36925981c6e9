"""What a tracker does at the events of transformers' Trainer.

A callback is not told the loss of a step. The Trainer logs the mean since it logged last, so that of a tracked step is
its own where the Trainer logs at the step before and at the step itself: both are asked for. Evaluation is asked for at
tracked steps too, and the random numbers it draws are put back. The line of a step is written when both losses are
known: before the Trainer saves a checkpoint of that step.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qkform.dynamics.chance import RandomState
from qkform.dynamics.ledger import Ledger, counted
from qkform.dynamics.probe import Probe, first_of
from qkform.dynamics.processes import by_first
from qkform.errors import DynamicsError

if TYPE_CHECKING:
    from qkform.dynamics.measures import Measures

_BY_METRIC = ("ReduceLROnPlateau", "GreedyLR")  # schedulers that every evaluation steps


class TrainerEvents:
    """The events, as `transformers.TrainerCallback` names them; those that are not here do nothing."""

    every: int
    path: Path
    model: Any
    held_out: Any
    resume: int | None
    conflict: int | None
    reason: str | None
    ledger: Ledger
    _measures: Measures | None
    _probe: Probe | None
    _loaded: Mapping[str, Any] | None

    _begin: Callable[..., None]
    _measured: Callable[..., dict[str, Any]]
    _write: Callable[[Mapping[str, Any]], None]
    _end: Callable[..., None]
    abandon: Callable[[], None]

    _started: bool
    _probe_by_default: bool
    _unmeasured: str | None
    _resumed_line: bool

    # Of the run in a Trainer; in a plain loop nothing changes them.
    _evaluates = False
    _line: dict[str, Any] | None = None  # of a tracked step, until its losses are known
    _known: Mapping[str, Any] = {}  # losses of the step that ended last
    _tracked = -1  # the last tracked step
    _logged = 0  # the step at which the Trainer logged last
    _random: RandomState | None = None  # as it was when an evaluation was asked for
    _eval_on_start: bool | None = None  # what it was before it was set
    _by_trainer = False  # tokens are counted by it
    _hook: Any = None
    _rates: Mapping[str, Any] = {}  # replaced, never changed

    def on_train_begin(self, args: Any, state: Any, control: Any, **had: Any) -> None:
        step, model = state.global_step, had["model"]
        self.abandon()
        self._line, self._known, self._tracked, self._logged = None, {}, -1, step
        if self.resume not in (None, step):
            raise DynamicsError(
                f"the tracker resumes after step {self.resume}, and the Trainer begins after step {step}; a tracker "
                "without resume= goes by the Trainer's checkpoint: trainer.train(resume_from_checkpoint=...)"
            )
        self._carry_over(state)
        exists = by_first(lambda: step > 0 and self.path.exists(), args.device)
        resumed = self.resume is not None or exists
        self._begin(model, step, step if resumed else None)
        self._rates = _rates(had.get("optimizer"))
        self._evaluates = self._may_evaluate(args, had.get("lr_scheduler"))
        self._count(args, model, had.get("train_dataloader"))
        self._keep(state)
        if self._resumed_line:
            self._tracked = step
        elif step == 0:
            self._first(args)

    def on_step_begin(self, args: Any, state: Any, control: Any, **had: Any) -> None:
        self._flush()
        self._random, self._known = None, {}
        self._undo(args)

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **had: Any) -> None:
        self._rates = _rates(had.get("optimizer"))  # before the scheduler sets the next

    def on_step_end(self, args: Any, state: Any, control: Any, **had: Any) -> Any:
        step = state.global_step
        if self._by_trainer:
            self.ledger.tokens = state.num_input_tokens_seen
        if self._is_tracked(step, state) or control.should_training_stop:
            self._track_now(step, state, control)
        elif self._is_tracked(step + 1, state):
            control.should_log = True
        if control.should_save:
            self._keep(state)
        return control

    def on_epoch_end(self, args: Any, state: Any, control: Any, **had: Any) -> Any:
        self._flush()
        if control.should_training_stop and self._tracked < state.global_step:
            self._track_now(
                state.global_step, state, control
            )  # training stopped at a step that was not to be tracked
        if control.should_save:
            self._keep(state)
        return control

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **had: Any) -> None:
        if not logs or "loss" not in logs:
            return
        if state.global_step - self._logged == 1:  # else it is a mean over several steps
            self._known = {**self._known, "loss": float(logs["loss"])}
        self._logged = state.global_step
        if not control.should_evaluate:
            self._flush()

    def on_evaluate(self, args: Any, state: Any, control: Any, metrics: Any = None, **had: Any) -> None:
        if self._measures is None:  # the Trainer is not training
            return
        self._known = {**self._known, "held_out": held_out_in(metrics or {})}
        if self._line is not None and self._wants_probe:
            self._take_probe(had.get("eval_dataloader"), args)
        self._flush()
        if self._random is not None:
            self._random.put_back()
        self._undo(args)
        self._keep(state)  # a checkpoint of the best step may follow

    def on_save(self, args: Any, state: Any, control: Any, **had: Any) -> None:
        self._flush()

    def on_train_end(self, args: Any, state: Any, control: Any, **had: Any) -> None:
        self._flush()
        self._undo(args)
        if self._measures is not None:
            done = state.global_step >= state.max_steps
            self._end(self.reason or ("finished" if done else "stopped"), state.global_step)
        self.abandon()

    def state(self) -> dict[str, Any]:
        """What the Trainer's checkpoints keep: how the tracker was made, and what the run had used when it was kept."""
        args = {
            "every": self.every,
            "path": str(self.path),
            "conflict": False if self.conflict is None else self.conflict,
            "held_out": self.held_out if isinstance(self.held_out, bool) else None,
        }
        return {"args": args, "attributes": {"_loaded": self._loaded}}

    def __getattr__(self, name: str) -> Any:
        if name.startswith("on_"):  # an event without a meaning here, of a later transformers perhaps
            return _nothing
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    # ---- inside --------------------------------------------------------------------------------------------

    @property
    def _wants_probe(self) -> bool:
        """Whether the first evaluation is to give the probe: the line of its step is measured then."""
        return self._probe is None and self._evaluates and not self._started

    def _is_tracked(self, step: int, state: Any) -> bool:
        return step % self.every == 0 or step >= state.max_steps

    def _first(self, args: Any) -> None:
        """Step 0: at once, or when it is evaluated."""
        self._tracked = 0
        self._line = {"step": 0} if self._wants_probe else self._measured(0, self._rates)
        if not self._evaluates:
            self._flush()
            return
        self._eval_on_start = args.eval_on_start
        self._random = None if args.eval_on_start else RandomState()
        args.eval_on_start = True

    def _undo(self, args: Any) -> None:
        if self._eval_on_start is not None:
            args.eval_on_start, self._eval_on_start = self._eval_on_start, None

    def _track_now(self, step: int, state: Any, control: Any) -> None:
        """Measure a step that has just ended; the Trainer logs its loss next, and evaluates."""
        self._line = {"step": step} if self._wants_probe else self._measured(step, self._rates)
        self._tracked = step
        control.should_log = True
        if self._evaluates and not control.should_evaluate and "held_out" not in self._known:
            self._random = RandomState()
            control.should_evaluate = True
        self._keep(state)

    def _flush(self) -> None:
        """Write the line that is waiting, with what is known."""
        line, self._line = self._line, None
        if line is not None:
            measured = line if "layers" in line else self._measured(line["step"], self._rates)
            self._write({**measured, **self._known})

    def _may_evaluate(self, args: Any, scheduler: Any) -> bool:
        """Whether to ask for evaluations: where there is a held-out set, and none of them steps the scheduler."""
        if isinstance(self.held_out, bool):
            return self.held_out
        kind = type(getattr(scheduler, "scheduler", scheduler)).__name__
        return (
            str(getattr(args.eval_strategy, "value", args.eval_strategy)) != "no" and kind not in _BY_METRIC
        )

    def _take_probe(self, dataloader: Any, args: Any) -> None:
        """The first held-out batch, the same in every process."""
        found = by_first(lambda: _probe_or_reason(dataloader, args.per_device_eval_batch_size), args.device)
        if isinstance(found, str):
            self._unmeasured = found
            warnings.warn(f"the record has no attention weights: {found}", UserWarning, stacklevel=2)
        else:
            self._probe, self._probe_by_default = found, True

    def _count(self, args: Any, model: Any, train_dataloader: Any) -> None:
        """See to it that tokens are counted: as the model is called or, where it is compiled, by the Trainer."""
        if str(args.include_num_input_tokens_seen) == "no" and not args.torch_compile:
            self._hook = model.register_forward_pre_hook(self._see, with_kwargs=True)
            return
        self._by_trainer = True
        if str(args.include_num_input_tokens_seen) == "no":
            args.include_num_input_tokens_seen = _what_to_count(train_dataloader)

    def _see(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Before the model runs: note the tokens that it learns from."""
        if module.training:
            tokens = counted(kwargs)
            if tokens is not None:
                self.ledger.add(tokens)

    def _carry_over(self, state: Any) -> None:
        """What an earlier process of the run had used, from the Trainer's checkpoint."""
        self.ledger, self._loaded = Ledger(), None
        entries = state.stateful_callbacks.get(type(self).__name__)
        for entry in (
            entries if isinstance(entries, list) else [entries]
        ):  # a list where there are several trackers
            kept = (entry or {}).get("attributes", {}).get("_loaded") or {}
            if kept.get("step") == state.global_step and entry["args"].get("path") == str(self.path):
                self.ledger.load(kept)
                self._loaded = kept

    def _keep(self, state: Any) -> None:
        """What the run has used goes into the next checkpoint. Of several processes each calls it."""
        assert self._measures is not None
        self.ledger.settle(self._measures.device)
        self._loaded = {**self.ledger.state(), "step": state.global_step}
        kept, name = state.stateful_callbacks, type(self).__name__
        if not isinstance(kept.get(name), list):
            kept[name] = self.state()


def held_out_in(metrics: Mapping[str, Any]) -> float | None:
    """The loss of an evaluation, None where it has none.

    The Trainer names it PREFIX_loss and a metric of the user's PREFIX_NAME, which may be PREFIX_aux_loss and stand
    before it: the shortest name is the loss.
    """
    name = min((name for name in metrics if name.endswith("_loss")), key=len, default=None)
    return None if name is None else float(metrics[name])


def _probe_or_reason(dataloader: Any, sequences: int) -> Probe | str:
    """The first batch of a data loader, or why it makes no probe."""
    try:
        return Probe(first_of(dataloader, sequences))
    except Exception as error:  # data sets and collators may raise anything
        return f"the first held-out batch cannot be had: {type(error).__name__}: {error}"


def _what_to_count(train_dataloader: Any) -> str:
    """All tokens, or those that are no padding where examples say which they are."""
    try:
        example = train_dataloader.dataset[0]
        return "non_padding" if "attention_mask" in example else "all"
    except (TypeError, KeyError, AttributeError, IndexError, NotImplementedError):
        return "all"


def _rates(optimizer: Any) -> dict[str, float | None]:
    from qkform.dynamics.tracker import rates

    return rates(optimizer)


def _nothing(*args: Any, **kwargs: Any) -> None:
    """An event that means nothing here."""
