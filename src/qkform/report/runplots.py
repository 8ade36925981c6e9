"""The charts of runs as files: (parts of the name, lines of the title, chart) for each."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from qkform.records import values
from qkform.report import runcharts, runpoints
from qkform.report.rows import clean
from qkform.report.runsection import run_colours
from qkform.report.runset import Run, RunSet

_WIDE = 720


def plots(given: RunSet) -> Iterator[tuple[list[str], list[str], Any]]:
    """The loss, sharpness and conflict of all runs, then every run over steps, layer by layer, and its heads."""
    found = [replace(run, name=clean(run.name), arm=clean(run.arm)) for run in given.runs]
    runs = replace(given, runs=found)
    colours, marks, several = run_colours(runs), runpoints.resumes(found), len(found) > 1
    of = f"{len(found)} runs" if several else found[0].name if found else ""
    losses = runpoints.losses(found)
    if losses:
        chart: Any = runcharts.losses(losses, colours, marks, width=_WIDE, legend=True)
        yield ["runs", "loss"], ["Loss over steps", "thick: held-out; thin: training", of], chart
    rows, by = (runpoints.middles(found), colours) if several else (_layers(found), None)
    loss = runpoints.whose_loss(found)
    for measure in ("normalised_entropy", "largest"):
        if any(row[measure] is not None and row["loss"] is not None for row in rows):
            title = f"{runcharts.HEADINGS[measure]} against the loss"
            chart = runcharts.against_loss(rows, measure, loss, by, width=_WIDE, legend=True)
            yield ["runs", measure, "loss"], [title, of], chart
    if several:
        for measure in ("symmetry", "directionality", "norm"):
            if values(rows, measure):
                title = f"{runcharts.HEADINGS[measure]}, the median layer"
                chart = runcharts.over_steps(rows, measure, colours, marks, width=_WIDE, legend=True)
                yield ["runs", measure, "median"], [title, of], chart
    for i, run in enumerate(found):
        yield from _own(run, f"{i + 1:02d}")
    conflicts = runpoints.conflicts(found)
    if values(conflicts, "null_mean"):
        by = colours if several else None
        chart = runcharts.against_null(conflicts, by, width=_WIDE, height=420, legend=True)
        yield (
            ["runs", "conflict"],
            ["Conflict cosine against its null", "below the line: conflict", of],
            chart,
        )
    over = runpoints.excesses(conflicts)
    if over:
        chart = runcharts.excess(over, colours if several else None, marks, width=_WIDE, legend=True)
        yield ["runs", "excess"], ["Excess of the conflict cosine over its null", of], chart


def _own(run: Run, prefix: str) -> Iterator[tuple[list[str], list[str], Any]]:
    marks, name = runpoints.resumes([run]), [prefix, run.name]
    rows = _layers([run])
    for measure in ("symmetry", "directionality", "norm", "normalised_entropy"):
        if values(rows, measure):
            chart = runcharts.over_steps(rows, measure, None, marks, width=_WIDE, height=320)
            yield [*name, measure], [f"{runcharts.HEADINGS[measure]} over steps", run.name], chart
    for place in runpoints.charted(run):
        of_heads = runpoints.heads(
            run, place, runpoints.steps_drawn(run, runpoints.head_count(run, place) + 1)
        )
        if any(row["head"] is not None and row["symmetry"] is not None for row in of_heads):
            chart = runcharts.of_heads(of_heads, "symmetry", marks, width=_WIDE, height=300)
            title = f"Symmetry of the heads of layer {place}"
            yield [*name, f"layer-{place}", "heads"], [title, run.name], chart


def _layers(runs: list[Run]) -> list[dict[str, Any]]:
    return [
        row
        for run in runs
        for row in runpoints.layers(run, runpoints.steps_drawn(run, len(run.record.start["layers"])))
    ]
