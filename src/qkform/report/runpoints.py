"""The points of run charts: plain rows with numbers or None, thinned so that a page of a long run stays small.

A record may come from a file that someone else wrote: what is no finite number where one belongs is None.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from statistics import fmean, median
from typing import Any

from qkform.form.null import median_spread
from qkform.records import Row, values
from qkform.report.reading import is_number
from qkform.report.rows import text
from qkform.report.runreading import spread
from qkform.report.runset import Run

POINTS = 4000  # of one chart, about
FEWEST = 30  # steps of a curve, however many curves there are
LAYERS = 12  # that have a chart of their own
# Widths of bands within this factor have a median as if they were one: 512 beside 768 features has.
ALIKE = 1.6
MEASURES = ("symmetry", "symmetry_z", "directionality", "norm", "normalised_entropy", "largest", "self_norm")
CONFLICT = ("cosine", "null_mean", "null_sd", "excess")


def number(value: Any) -> float | None:
    """A finite number of five digits, or None."""
    if not is_number(value) or isinstance(value, bool):
        return None
    short = float(f"{value:.5g}")
    return short if is_number(short) else None  # the largest floats round to infinity


def steps_drawn(run: Run, curves: int) -> list[Mapping[str, Any]]:
    """The tracked steps that a chart of so many curves draws: evenly spread, first and last among them."""
    return spread(run.record.steps, max(POINTS // max(curves, 1), FEWEST))


def losses(runs: Sequence[Run]) -> list[Row]:
    """{"run", "step", "kind", "loss"}: the training loss and the held-out loss of every run."""
    return [
        {"run": run.name, "step": step["step"], "kind": kind, "loss": found}
        for run in runs
        for step in steps_drawn(run, 2 * len(runs))
        for kind, name in (("training", "loss"), ("held-out", "held_out"))
        if (found := number(step.get(name))) is not None
    ]


def layers(run: Run, steps: Sequence[Mapping[str, Any]]) -> list[Row]:
    """A row per step and whole layer: `MEASURES`, where random weights lie (mean +/- 2 std), and the step's loss."""
    held = whose_loss([run]) == "held_out"
    out = []
    for step in steps:
        loss = number(step.get("held_out" if held else "loss"))
        for place, (about, row) in enumerate(zip(run.record.start["layers"], step["layers"], strict=False)):
            out.append(
                {
                    "run": run.name,
                    "step": step["step"],
                    "layer": place,
                    "module": _module(about),
                    "loss": loss,
                }
                | {name: number(row.get(name)) for name in MEASURES}
                | {"self_norm": _mean_self_norm(row)}
                | _band(about, row.get("null_sd"))
            )
    return out


def heads(run: Run, place: int, steps: Sequence[Mapping[str, Any]]) -> list[Row]:
    """A row per step and head of one layer, and one for the whole layer, head null."""
    out = []
    for step in steps:
        if place >= len(step["layers"]):
            continue
        row, about = step["layers"][place], run.record.start["layers"][place]
        shared = {"run": run.name, "step": step["step"], "layer": place}
        out.append(
            shared
            | {"head": None}
            | {name: number(row.get(name)) for name in MEASURES}
            | _band(about, row.get("null_sd"))
        )
        found = row.get("heads")
        found = found if isinstance(found, Mapping) else {}
        for head in range(head_count(run, place)):
            out.append(shared | {"head": head} | {name: at(found.get(name), head) for name in MEASURES})
    return out


def middles(runs: Sequence[Run]) -> list[Row]:
    """A row per run and step: the median of the whole layers in every measure, and where that of random layers lies."""
    out = []
    for run in runs:
        for step in steps_drawn(run, len(runs)):
            rows = layers(run, [step])
            if not rows:
                continue
            out.append(
                {
                    "run": run.name,
                    "step": step["step"],
                    "loss": rows[0]["loss"],
                    "layer": None,
                    "module": None,
                }
                | {name: _median(rows, name) for name in MEASURES}
                | band_of_median(rows)
            )
    return out


def band_of_median(rows: Sequence[Row]) -> dict[str, float | None]:
    """{"low", "high"}: where the median of layers with random weights lies (mean +/- 2 std), as if all had one band.

    None where their bands differ much, as those of two widths do. docs/math.md#symmetry_z says where it is rough.
    """
    bands = [(row["low"], row["high"]) for row in rows if row["low"] is not None and row["high"] is not None]
    widths = [high - low for low, high in bands]
    if not bands or max(widths) > ALIKE * min(widths):
        return {"low": None, "high": None}
    middle = median(low + high for low, high in bands) / 2
    reach = median(widths) / 2 * median_spread(len(bands))
    return {"low": number(middle - reach), "high": number(middle + reach)}


def conflicts(runs: Sequence[Run]) -> list[Row]:
    """A row per run, step, layer and head whose conflict was recorded: `CONFLICT`."""
    out = []
    curves = sum(head_count(run, i) for run in runs for i in range(len(run.record.start["layers"])))
    for run in runs:
        known = [step for step in run.record.steps if any(row.get("conflict") for row in step["layers"])]
        for step in spread(known, max(POINTS // max(curves, 1), FEWEST)):
            for place, row in enumerate(step["layers"]):
                found = row.get("conflict")
                if not isinstance(found, Mapping):
                    continue
                for head in range(head_count(run, place)):
                    values_ = {name: at(found.get(name), head) for name in CONFLICT}
                    if values_["cosine"] is not None:
                        where = {"run": run.name, "step": step["step"], "layer": place, "head": head}
                        out.append(where | values_)
    return out


def excesses(points: Sequence[Row]) -> list[Row]:
    """A row per run, step and layer: the mean excess of its heads, and the null's 2 std for one head, on both sides."""
    groups: dict[tuple[Any, ...], list[Row]] = {}
    for row in points:
        groups.setdefault((row["run"], row["step"], row["layer"]), []).append(row)
    out = []
    for (run, step, layer), rows in groups.items():
        found, sd = values(rows, "excess"), values(rows, "null_sd")
        if found:
            one_std = _mean(sd)
            wide = None if one_std is None or not is_number(2 * one_std) else 2 * one_std
            out.append(
                {"run": run, "step": step, "layer": layer, "excess": _mean(found)}
                | {"low": None if wide is None else -wide, "high": wide}
            )
    return out


def whose_loss(runs: Sequence[Run]) -> str:
    """ "held_out" where every run has it twice or more, else "loss"."""
    known = [sum(number(s.get("held_out")) is not None for s in run.record.steps) for run in runs]
    return "held_out" if known and min(known) >= 2 else "loss"


def resumes(runs: Sequence[Run]) -> list[Row]:
    """{"run", "step", "said"} of every time that a run went on after a stop."""
    return [
        {"run": run.name, "step": event["step"], "said": _said(event)}
        for run in runs
        for event in run.resumes
        if is_number(event.get("step"))
    ]


def head_count(run: Run, place: int) -> int:
    """How many heads a layer has; 0 where its description does not say."""
    found = run.record.start["layers"][place]
    n = found.get("n_heads") if isinstance(found, Mapping) else None
    return n if isinstance(n, int) and 0 < n <= 4096 else 0


def charted(run: Run) -> list[int]:
    """The places of the layers that have a chart of their own: all, or `LAYERS` of them, evenly spread."""
    return spread(range(len(run.record.start["layers"])), LAYERS)


def last_rows(run: Run) -> Iterator[Row]:
    """Whole layers and heads at the last tracked step, as rows of scores have them."""
    if run.last is None:
        return
    for place, about in enumerate(run.record.start["layers"]):
        for row in heads(run, place, [run.last]):
            width = about.get("d_model") if isinstance(about, Mapping) else None
            yield row | {
                "source": run.name,
                "module": _module(about),
                "d_model": width,
                "flags": [],
                "reason": None,
            }


def at(listed: Any, head: int) -> float | None:
    return number(listed[head]) if isinstance(listed, list) and head < len(listed) else None


def _band(about: Any, sd: Any) -> dict[str, float | None]:
    width = number(about.get("d_model")) if isinstance(about, Mapping) else None
    if width is None or width < 1 or not is_number(sd):
        return {"low": None, "high": None}
    return {"low": number(1 / width - 2 * sd), "high": number(1 / width + 2 * sd)}


def _mean_self_norm(row: Mapping[str, Any]) -> float | None:
    """The mean over heads: a layer's heads have self scores, the sum over them has none."""
    listed = row["heads"].get("self_norm") if isinstance(row.get("heads"), Mapping) else None
    found = [v for v in map(number, listed) if v is not None] if isinstance(listed, list) else []
    return number(_mean(found))


def _module(about: Any) -> str:
    return text(about.get("module") or "") if isinstance(about, Mapping) else ""


def _mean(found: Sequence[float]) -> float | None:
    """None for a mean of nothing, and for one that is beyond every float."""
    try:
        return fmean(found) if found else None
    except OverflowError:
        return None


def _median(rows: Sequence[Row], name: str) -> float | None:
    found = values(rows, name)
    middle = median(found) if found else None
    return middle if is_number(middle) else None


def _said(event: Mapping[str, Any]) -> str:
    if event.get("exact") is not False:
        return "resumed exactly"
    reason = event.get("reason")
    return f"resumed, not exact{f': {text(reason)[:200]}' if reason else ''}"
