"""`compare`: arms of an experiment against a baseline, seed by seed: at the end, at one loss, at its first reach."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qkform.comparisons import CLOCKS, MEASURES, PUBLISHED, CompareTable
from qkform.errors import RecordError
from qkform.records import Row
from qkform.training import gathering, pairing, reach
from qkform.training.arms import Arm, apart, apart_in, arms_of, baseline_of
from qkform.training.gathering import BROKE, FINISHED, Run
from qkform.training.pairing import Value
from qkform.training.reach import Curve

_MACHINE = (
    "processor",
    "device",
    "threads",
    "world_size",
    "torch",
)  # of the environment: what a second depends on
COARSE = 0.5  # nats between two tracked steps above which what lies between them is not known
_OF_LOSS = ("loss", "held_out")  # what another objective makes incomparable


@dataclass(frozen=True)
class _Told:
    """A run that takes part, with its curve."""

    run: Run
    curve: Curve
    broke: str | None  # why it has no values at its end

    @property
    def held_out(self) -> bool:
        return any(value is not None for value in self.curve.smoothed)

    @property
    def on_plateau(self) -> bool:
        """Whether it never left the unigram plateau; False where its record does not say."""
        losses = [value for value in self.curve.values["held_out"] if value is not None]
        unigram = self.run.unigram
        return bool(losses) and unigram is not None and reach.on_plateau(min(losses), unigram)


def compare(
    paths: Iterable[str | os.PathLike[str]],
    *,
    at_loss: float | None = None,
    baseline: str | None = None,
    window: int = reach.WINDOW,
) -> CompareTable:
    """How the runs under `paths` differ from those of the baseline arm: pairs by seed, means, intervals.

    Runs that differ in the seed alone are one arm. `baseline` is the name of one; without it, it is the only arm
    without an intervention. `at_loss` is the held-out loss, in nats, at which values are compared: where the running
    median of `window` tracked steps first reaches it; without it, the least loss that every run of a pair reaches. Runs
    that are not finished are left out, and `notes` says so.

    Raises RecordError for a loss or a window that cannot be, where there is no run that can be used, an arm has two
    runs of one seed, or which arm is the baseline is not clear.
    """
    if window < 1 or window % 2 == 0:
        raise RecordError(f"--window {window}: a centred median is over 1, 3, 5, ... tracked steps")
    if at_loss is not None and not (math.isfinite(at_loss) and at_loss > 0):
        raise RecordError(f"--at-loss {at_loss}: expected a held-out loss above 0, in nats")
    notes: list[str] = []
    runs = list(_usable(list(_loaded(gathering.find(paths), notes)), notes))
    if not runs:
        raise RecordError("no run is finished, or none says what it trained: " + "; ".join(notes))
    arms = arms_of(runs)
    chosen = baseline_of(arms, baseline)
    told = {run.path: _tell(run, window, notes) for run in runs}
    notes += _plateau_words([one for one in told.values() if one.on_plateau])
    loss = at_loss if at_loss is not None else _shared_loss(arms, chosen, told)
    if not any(one.held_out for one in told.values()):
        notes.append(
            "no record has a held-out loss, so that nothing is compared at one, nor by when it is reached"
        )
    pairs = [_pair(arm, chosen, told, loss, notes) for arm in arms if arm is not chosen]
    return CompareTable(
        settings={
            "baseline": chosen.name,
            "at_loss": loss,
            "at_loss_from": "given" if at_loss is not None else "the least that every run of a pair reaches",
            "smoothing": f"held-out loss as a running median of {window} tracked steps, centred",
            "window": window,
            "layers": "median over layers",
            "interval": pairing.INTERVAL,
            "interval_kind": "percentile bootstrap of the mean over seeds; of fewer than six the range, and less",
            "p": "two-sided, of the mean difference over all choices of signs",
            "least_seeds": pairing.LEAST_SEEDS,
            "resamples": pairing.RESAMPLES,
            "bootstrap_seed": pairing.BOOTSTRAP_SEED,
        },
        arms=[_arm_row(arm, chosen, told) for arm in arms],
        pairs=pairs,
        notes=notes,
        curves=list(_curves(arms, told)),
    )


def _loaded(folders: Iterable[Path], notes: list[str]) -> Iterator[Run]:
    """The runs in these folders; one whose record cannot be read, or has just begun, does not cost the others."""
    for folder in folders:
        try:
            yield gathering.load(folder)
        except RecordError as error:
            notes.append(f"left out: {error}")


def _usable(runs: Sequence[Run], notes: list[str]) -> Iterator[Run]:
    for run in runs:
        steps = run.experiment.get("steps")
        if not run.experiment:
            notes.append(f"left out: {run.path}: its record does not say what was trained (no experiment)")
        elif run.seed is None:
            notes.append(f"left out: {run.path}: its experiment has no seed to pair by")
        elif not isinstance(run.seed, int) or isinstance(run.seed, bool):
            notes.append(
                f"left out: {run.path}: its seed is {run.seed!r:.60}; expected a whole number to pair by"
            )
        elif not run.record.steps:
            notes.append(f"left out: {run.path}: it has no tracked step yet")
        elif run.ending not in (*FINISHED, BROKE) and not (run.ending is None and run.last_step == steps):
            of = f" of {steps}" if steps is not None else ""
            why = f" ({run.ending})" if run.ending else ""
            notes.append(
                f"left out: {run.path}: not finished{why}, its last tracked step is {run.last_step}{of}"
            )
        else:
            yield run


def _tell(run: Run, window: int, notes: list[str]) -> _Told:
    curve = Curve.of(run.record.steps, window)
    broke = None
    if run.ending == BROKE:
        broke = f"it ended at step {run.last_step}: {run.ending}"
        notes.append(
            f"{run.path}: {broke}; it has no values at its end, and losses it had not reached are never"
        )
    if inexact := [event for event in run.record.events if event.get("exact") is False]:
        notes.append(
            f"{run.path}: resumed, and not exactly: {inexact[-1].get('reason') or 'no reason recorded'}"
        )
    told = _Told(run, curve, broke)
    if not told.held_out:
        notes.append(f"{run.path}: its record has no held-out loss")
    return told


def _plateau_words(told: Sequence[_Told]) -> list[str]:
    """One note on the runs that learnt frequencies and nothing else; none where there are none."""
    if not told:
        return []
    listed = ", ".join(str(one.run.path) for one in told[:4])
    more = f" and {len(told) - 4} more" if len(told) > 4 else ""
    return [
        f"{listed}{more} never left the unigram plateau: attention had learnt nothing yet, and what the form became "
        "says little about language"
    ]


def _shared_loss(arms: Sequence[Arm], baseline: Arm, told: Mapping[Any, _Told]) -> float | None:
    """The highest of the least smoothed losses: every run reaches it that did not break, of the pairs that have losses.

    What takes no part has no say: arms that are refused, those of another objective, seeds without a partner.
    """
    paired = {
        run.path
        for arm in arms
        if arm is not baseline and apart(arm, baseline) == (None, None)
        for seed in arm.by_seed.keys() & baseline.by_seed.keys()
        for run in (arm.by_seed[seed], baseline.by_seed[seed])
    }
    least = [
        min(value for value in told[path].curve.smoothed if value is not None)
        for path in paired
        if told[path].held_out and told[path].broke is None
    ]
    return max(least) if least else None


def _pair(
    arm: Arm, baseline: Arm, told: Mapping[Any, _Told], loss: float | None, notes: list[str]
) -> dict[str, Any]:
    mine, theirs = arm.by_seed, baseline.by_seed
    seeds = [seed for seed in mine if seed in theirs]
    refused, no_loss = apart(arm, baseline)
    pair: dict[str, Any] = {
        "arm": arm.name,
        "baseline": baseline.name,
        "seeds": seeds,
        "only_arm": [seed for seed in mine if seed not in theirs],
        "only_baseline": [seed for seed in theirs if seed not in mine],
        "refused": refused,
        "losses_refused": no_loss,
        "rows": [],
    }
    if refused:
        notes.append(f"{arm.name} is not paired with {baseline.name}: {refused}")
        return pair
    if no_loss:
        notes.append(f"losses of {arm.name} and {baseline.name} are not compared: {no_loss}")
    for side, one in (("only_arm", arm), ("only_baseline", baseline)):
        if pair[side]:
            other = baseline if one is arm else arm
            listed = ", ".join(map(str, pair[side]))
            notes.append(f"seed {listed} of {one.name} has no partner in {other.name}")
    two = [(seed, told[mine[seed].path], told[theirs[seed].path]) for seed in seeds]
    lengths = sorted(
        {(a.run.last_step, b.run.last_step) for _, a, b in two if a.run.last_step != b.run.last_step}
    )
    if lengths:
        listed = ", ".join(f"{a} and {b}" for a, b in lengths)
        notes.append(
            f"{arm.name} and {baseline.name} do not end at the same step ({listed}): compare them at one loss"
        )
    every = sorted({str(one.run.experiment.get("track_every")) for _, a, b in two for one in (a, b)})
    if len(every) > 1:
        notes.append(
            f"{arm.name} and {baseline.name} were not tracked equally often (every {' and '.join(every)} steps): the "
            "median over tracked steps smooths them differently"
        )
    probes = [s for s, a, b in two if _probe(a) != _probe(b)]
    if probes:
        listed = ", ".join(map(str, probes))
        notes.append(f"{arm.name}: entropy was measured on another probe than the baseline's, seed {listed}")
    others = [
        name for name in _MACHINE if any(_environment(a, name) != _environment(b, name) for _, a, b in two)
    ]
    if others:
        notes.append(
            f"{arm.name} and {baseline.name} were not trained with the same {', '.join(others)}: "
            "their seconds say little"
        )
    if loss is not None and not no_loss:
        notes += _coarse([one for _, a, b in two for one in (a, b)], loss)
    if two:
        pair["rows"] = list(_rows(two, loss, no_loss))
    return pair


def _coarse(told: Sequence[_Told], loss: float) -> list[str]:
    """A note where a loss lies between tracked steps that are far apart: all that is said there is a straight line."""
    wide = [
        (one.run.path, around)
        for one in told
        if len(around := one.curve.around(loss)) == 2 and around[0][1] - around[1][1] > COARSE
    ]
    if not wide:
        return []
    path, ((before, high), (after, low)) = wide[0]
    more = f", and so in {len(wide) - 1} more runs" if len(wide) > 1 else ""
    return [
        f"held-out loss {loss:.4g} lies between step {before:,.0f} ({high:.3g}) and step {after:,.0f} ({low:.3g}) of "
        f"{path}{more}: what is said of it is a straight line between the two; track more often, or choose a loss that "
        "is reached later"
    ]


def _rows(two: Sequence[tuple[Any, _Told, _Told]], loss: float | None, no_loss: str | None) -> Iterator[Row]:
    wanted = [("end", name) for name in MEASURES if not (no_loss and name in _OF_LOSS)]
    if not no_loss:
        if loss is not None:
            wanted += [("at_loss", name) for name in (*MEASURES[2:], *CLOCKS)]
        wanted += [("to_baseline", name) for name in (*CLOCKS, PUBLISHED)]
    for at, measure in wanted:
        rows = [
            pairing.seed_row(at, measure, seed, *(_value(at, measure, one, b, loss) for one in (a, b)))
            for seed, a, b in two
        ]
        yield from rows
        yield pairing.mean_row(rows)


def _value(at: str, measure: str, told: _Told, baseline: _Told, loss: float | None) -> Value:
    """What one run has to say; `baseline` is the baseline's run of the same seed, or the run itself."""
    curve = told.curve
    if at == "end":
        if told.broke:
            return Value(None, told.broke, broke=True)
        found = curve.final(measure)
        return Value(found, None if found is not None else f"{measure} is not in {told.run.path}")
    if at == "to_baseline" and baseline.broke:
        return Value(None, f"the baseline has no final loss: {baseline.broke}", broke=told is baseline)
    if measure == PUBLISHED:
        losses = [line for i, line in enumerate(curve.values["loss"]) if curve.values["step"][i]]
        last = baseline.curve.final("loss")
        if last is None:
            return Value(None, f"no last training loss in {baseline.run.path}")
        rule = reach.published_speed_up(losses, last)
        return Value(
            rule, None if rule is not None else "never; the published rule prints 100 %", rule is None
        )
    target = loss if at == "at_loss" else baseline.curve.final_smoothed
    if target is None or not told.held_out:
        lacking = baseline if target is None else told
        return Value(None, f"no held-out loss in {lacking.run.path}")
    reached = curve.first_reach(target)
    if reached is None:
        return Value(None, f"never reaches {target:.4g} in its {told.run.last_step} steps", never=True)
    value = reached[measure]
    return Value(value, None if value is not None else f"{measure} is not defined there")


def _arm_row(arm: Arm, baseline: Arm, told: Mapping[Any, _Told]) -> dict[str, Any]:
    runs = [_run_row(told[run.path]) for run in arm.runs]
    broke = sum(told[run.path].broke is not None for run in arm.runs)
    spreads = {  # where a run broke there is no mean: that of the others would flatter the arm
        name: pairing.spread([] if broke else [run[name] for run in runs if run[name] is not None])
        for name in MEASURES
    }
    names = apart_in(arm, baseline)
    return {
        "name": arm.name,
        "baseline": arm is baseline,
        "interventions": arm.interventions,
        "differs": {name: arm.of(name) for name in names},
        "seeds": [run.seed for run in arm.runs],
        "runs": runs,
        "broke": broke,
        "mean": {name: one["mean"] for name, one in spreads.items()},
        "sd": {name: one["sd"] for name, one in spreads.items()},
    }


def _run_row(told: _Told) -> dict[str, Any]:
    ended = {name: None if told.broke else told.curve.final(name) for name in MEASURES}
    clocks = {name: told.curve.final(name) for name in CLOCKS}
    return {
        "seed": told.run.seed,
        "path": str(told.run.path),
        "ending": told.run.ending or "finished",
        **clocks,
        **ended,
    }


def _curves(arms: Sequence[Arm], told: Mapping[Any, _Told]) -> Iterator[Row]:
    for arm in arms:
        for run in arm.runs:
            curve = told[run.path].curve
            for i in range(len(curve)):
                yield {
                    "arm": arm.name,
                    "seed": run.seed,
                    "smoothed": curve.smoothed[i],
                    **{name: column[i] for name, column in curve.values.items()},
                }


def _environment(told: _Told, name: str) -> Any:
    return _of_start(told, "environment", name)


def _probe(told: _Told) -> Any:
    return _of_start(told, "probe", "sha256")


def _of_start(told: _Told, part: str, name: str) -> Any:
    found = told.run.record.start.get(part)
    return found.get(name) if isinstance(found, Mapping) else None
