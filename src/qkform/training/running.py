"""`run`: train one experiment in one folder, from the beginning or from its newest checkpoint."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qkform.errors import ExperimentError, MissingExtra, QKFormError
from qkform.training import checkpoints, folder
from qkform.training.checkpoints import Checkpoint
from qkform.training.experiment import Experiment
from qkform.training.reach import on_plateau
from qkform.training.saving import load_weights_, save_model

if TYPE_CHECKING:
    from qkform.training.watch import Progress

Say = Callable[[str], None]


@dataclass(frozen=True)
class Finished:
    """How a run ended.

    reason     "finished", or "stop_at_loss"
    held_out   last held-out loss, nats
    unigram    loss of the held-out tokens if each were guessed by its frequency in training, nats
    plateau    the held-out loss was never well below `unigram` (`reach.on_plateau`): attention had learnt nothing yet
    """

    folder: Path
    step: int
    reason: str
    held_out: float
    unigram: float
    plateau: bool


def run(
    experiment: Experiment,
    out: str | Path,
    *,
    resume: bool = False,
    say: Say | None = None,
    progress: Callable[[Progress], None] | None = None,
) -> Finished:
    """Train an experiment in the folder `out`: `model/`, `record.jsonl`, `checkpoints/`, `experiment.yaml`.

    resume     go on from the newest checkpoint: with the same versions and number of threads on a CPU, the final
               weights and the record are those of a run that was never broken
    say        called with messages for a person, on the first process
    progress   called with `Progress` after every step, on the first process

    Under torchrun every process calls it. While it trains, in the main thread, the first Ctrl-C (or SIGTERM) saves a
    checkpoint after the step that runs and raises KeyboardInterrupt; a second one raises it at once.

    TrainingError, ExperimentError and the errors of the data name what was found and what would work; whatever
    happens, what was saved stays whole.
    """
    _refuse_early(experiment)
    args = _arguments(experiment, Path(out))
    from qkform.dynamics.processes import by_first

    first = args.process_index == 0
    quiet: Say = lambda _: None  # noqa: E731
    tell = say if say is not None and first else quiet
    where = Path(out)
    with ExitStack() as held:

        def claim() -> Checkpoint | None:
            held.enter_context(folder.held(where))
            return folder.claim(where, experiment, resume)

        point = by_first(claim, args.device)
        return _trained(experiment, where, args, point, resume, tell, progress if first else None)


def _refuse_early(experiment: Experiment) -> None:
    """What can be said before anything that takes its time is imported."""
    from qkform.training.data.sources import corpus
    from qkform.training.strict_yaml import LARGEST

    if len(experiment.to_yaml()) > LARGEST:
        raise ExperimentError(
            f"data and config: more than {LARGEST:,} characters of YAML, which could not be read back; name the folder "
            "of the files"
        )
    if experiment.data != ("sotu",):
        corpus(_named(experiment), on_error=experiment.on_error)


def _named(experiment: Experiment) -> str | list[str]:
    return experiment.data[0] if len(experiment.data) == 1 else list(experiment.data)


def _arguments(experiment: Experiment, out: Path) -> Any:
    try:
        import accelerate  # type: ignore[import-untyped]  # noqa: F401
        import transformers  # noqa: F401
    except ModuleNotFoundError as error:
        raise MissingExtra(
            f"training needs {error.name}, which is not installed: pip install 'qkform[train]'"
        ) from None
    from qkform.training.engine import arguments

    return arguments(experiment, str(out))


@contextmanager
def _stopping() -> Iterator[Callable[[], bool]]:
    """Whether Ctrl-C or SIGTERM came meanwhile; a second one interrupts at once."""
    came: list[int] = []

    def note(number: int, frame: Any) -> None:
        if came:
            raise KeyboardInterrupt
        came.append(number)

    if threading.current_thread() is not threading.main_thread():
        yield lambda: False
        return
    before = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield lambda: bool(came)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _trained(
    experiment: Experiment,
    out: Path,
    args: Any,
    point: Checkpoint | None,
    resume: bool,
    tell: Say,
    progress: Callable[[Progress], None] | None,
) -> Finished:
    from qkform.dynamics.environment import changed, environment
    from qkform.training.models import build_model, check

    check(experiment)
    tokenizer, batches = _data(experiment, tell)
    unigram = batches.tokens.unigram(experiment.objective).held_out
    tell(
        f"{batches.tokens.info['n_tokens']:,} tokens of training text; guessing each by its frequency has a held-out "
        f"loss of {unigram:.3f} nats, the unigram entropy"
    )
    if experiment.warmup_steps >= experiment.steps:
        tell(
            f"warning: the rate still rises at the last step: warmup_steps is {experiment.warmup_steps} and steps "
            f"{experiment.steps}; fewer warm-up steps would let it learn"
        )
    if point is not None:
        before = {"key": point.facts["data"], "made_of": point.facts.get("made_of")}
        batches.tokens.check_same({**before, "seq_len": experiment.seq_len}, f"the run in {out} began")
    model = build_model(experiment, tokenizer)
    now = environment(model)
    facts = {
        "experiment": experiment.to_dict(),
        "environment": now,
        "data": batches.tokens.key,
        "made_of": batches.tokens.manifest["made_of"],
    }
    batches.tokens.check_vocabulary(model.config.vocab_size, experiment.model)
    if point is not None:
        problems = list(point.passed_over)
    else:
        problems = checkpoints.checkpoints(out / folder.CHECKPOINTS)[1] if resume else []
    for problem in problems:
        tell(f"warning: a checkpoint is passed over: {problem}")
    if point is None:
        if resume:
            tell(f"{out} was left before its first checkpoint; beginning anew")
    else:
        load_weights_(model, point.path)
        if point.facts["reason"] in ("finished", "stop_at_loss"):
            tell(f"the run in {out} has ended already, at step {point.step}")
            if args.process_index == 0:
                folder.end(out, point)
                checkpoints.tidy(out / folder.CHECKPOINTS, experiment.keep)
                model.config.use_cache = args.use_cache  # as Trainer leaves it
                if not (out / folder.MODEL).exists():
                    _save(model, tokenizer, out)
            return _finished(out, point.step, point.facts["reason"], point.facts, unigram, tell)
        difference = changed(point.facts["environment"], now)
        tell(f"not exact: {difference}" if difference is not None else "everything is as it was: exact")
        tell(f"going on from step {point.step}")
    watch = _watch(experiment, out, args, point, model, tokenizer, batches, facts, unigram, progress)
    if args.process_index == 0:
        folder.begin(out, experiment, point)
    try:
        with _stopping() as watch.asked_to_stop:
            watch.engine.train(resume_from_checkpoint=str(point.path) if point else None)
        whole = watch.engine.whole_model()
    except BaseException as error:
        watch.broke(error)
        raise
    step = watch.engine.state.global_step
    if watch.reason == "interrupted":
        watch.broke(KeyboardInterrupt())
        raise KeyboardInterrupt
    watch.tracker.close(watch.reason)
    if whole is not None:
        _save(whole, tokenizer, out)
    return _finished(out, step, watch.reason or "finished", watch.facts_of_loss(), unigram, tell)


def _data(experiment: Experiment, tell: Say) -> tuple[Any, Any]:
    """The tokenizer and the batches of an experiment."""
    from qkform.training import data, objectives

    corpus = data.corpus(
        _named(experiment),
        field=experiment.text_field,
        split=experiment.split,
        config=experiment.dataset_config,
        revision=experiment.revision,
        on_error=experiment.on_error,
        on_progress=tell,
    )
    if experiment.tokenizer is None:
        tokenizer = data.tokenizer("trained", corpus, vocab_size=experiment.vocabulary)
    else:
        tokenizer = data.tokenizer(experiment.tokenizer)
    tokens = data.prepare(corpus, tokenizer, seq_len=experiment.seq_len, on_progress=tell)
    objective = objectives.objective(experiment.objective, tokenizer, mask_rate=experiment.mask_rate)
    return tokenizer, data.Batches(tokens, objective, seed=experiment.seed, batch=experiment.batch_size)


def _watch(
    experiment: Experiment,
    out: Path,
    args: Any,
    point: Checkpoint | None,
    model: Any,
    tokenizer: Any,
    batches: Any,
    facts: dict[str, Any],
    unigram: float,
    progress: Callable[[Progress], None] | None,
) -> Any:
    """Engine and tracker, and what ties them together."""
    from qkform.dynamics import Tracker
    from qkform.training.engine import Engine
    from qkform.training.watch import Watch

    try:
        engine = Engine(experiment, model, batches, args)
    except (ImportError, RuntimeError, ValueError) as error:
        if isinstance(error, QKFormError) or not experiment.report_to:
            raise
        raise ExperimentError(f"report_to: {error}") from error
    tracker = Tracker(
        engine.model,
        every=experiment.track_every,
        path=out / folder.RECORD,
        probe=next(batches.held_out(batch=min(experiment.batch_size, 64))),
        experiment=experiment.to_dict(),
        conflict=experiment.conflict,
        resume=point.step if point else None,
    )
    data = {
        "key": batches.tokens.key,
        "tokens": batches.tokens.info["n_tokens"],
        "sequences": batches.tokens.info["n_sequences"],
        "held_out_sequences": min(batches.tokens.info["held_out_sequences"], experiment.held_out),
        "vocabulary": len(tokenizer),
        "skipped": batches.tokens.info.get("skipped", {}),
        "unigram": unigram,
    }
    watch = Watch(engine, tracker, out, facts, data, tokenizer, progress)
    if point is not None:
        tracker.load_state_dict(point.facts["tracker"])
        watch.held_out, watch.best = point.facts["held_out"], point.facts["best"]
    engine.add_callback(watch)
    return watch


def _save(model: Any, tokenizer: Any, out: Path) -> None:
    with checkpoints.written(out, folder.MODEL) as aside:
        save_model(model, tokenizer, aside)


def _finished(out: Path, step: int, reason: str, facts: Any, unigram: float, tell: Say) -> Finished:
    lowest = facts["best"]
    plateau = lowest is None or on_plateau(lowest, unigram)
    if plateau:
        said = (
            "it had no held-out loss" if lowest is None else f"its lowest held-out loss is {lowest:.3f} nats"
        )
        tell(
            f"warning: this run never left the unigram plateau: {said}, and the unigram entropy {unigram:.3f}; "
            "attention has learnt nothing yet, and what its form became says nothing about language"
        )
    return Finished(out, step, reason, facts["held_out"], unigram, plateau)
