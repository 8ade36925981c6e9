"""What the page shows of a `RunSet`, ready for its template: words, numbers, charts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from qkform.records import Row, values
from qkform.report import charts, runcharts, runpoints
from qkform.report.flowsection import FlowSection
from qkform.report.look import MODEL_COLOURS
from qkform.report.rows import Points, points, text
from qkform.report.runscreen import layer_lines, rate_words, time_words
from qkform.report.runset import Run, RunSet, options
from qkform.report.sections import Packed
from qkform.report.words import counted

SHOWN = 4  # runs that have a section of their own
COLUMNS = ("source", "module", "layer", "head", "d_model", *runpoints.MEASURES)
WORDS = (
    (
        "symmetry",
        "−1 to 1",
        "The trace of W times W, divided by the squared Frobenius norm of W, of W = W_Q W_Kᵀ; of a layer, of the sum "
        "over its heads. 1: W equals its transpose; −1: W is skew.",
    ),
    (
        "random weights",
        "a band",
        "Mean 1/d, plus and minus two standard deviations of the symmetry of random weights of the same width and of "
        "the spectrum that W has at that step. A score outside is unlikely by chance; that does not make it large.",
    ),
    (
        "directionality",
        "−1 to 1",
        "(R − C) / (R + C) of outlier rows and columns. Negative: columns, the key side, dominate. It scatters widely "
        "in random weights.",
    ),
    ("norm", "0 and up", "The Frobenius norm of W."),
    (
        "normalised entropy",
        "0 to 1",
        "The entropy of attention over the keys that are open, divided by the logarithm of their number; the mean over "
        "rows of the fixed probe batch; of a layer, over its heads. 1 is uniform.",
    ),
    ("largest weight", "0 to 1", "The largest attention weight of a row, the mean over the probe's rows."),
    (
        "loss",
        "nats",
        "Mean over counted tokens: of the training batch of that step, and of the held-out split.",
    ),
    (
        "conflict",
        "−1 to 1",
        "The cosine between the gradient of W from tokens paired with themselves and that from all other pairs. "
        "Softmax alone can make it negative, so the cosine proves nothing: the excess over its null, which permutes "
        "each row's other keys, does where it is clearly below 0.",
    ),
    ("tracker share", "0 to 1", "Time that recording took, over the time of training."),
)


class RunsSection:
    """Runs on the page."""

    def __init__(self, runs: RunSet, packed: Packed) -> None:
        self._packed, self._set = packed, runs
        self._runs = list(runs.runs)
        self.colours = run_colours(runs)
        self.errors = [{"source": text(e.source), "message": text(e.message)} for e in runs.errors]
        self.several = len(self._runs) > 1
        self._marks = runpoints.resumes(self._runs)
        self.flow = None if runs.flow is None else FlowSection(runs.flow, packed)

    @property
    def lines(self) -> list[dict[str, str]]:
        """The facts of every run."""
        return [{"colour": self.colours[run.name], **facts(run)} for run in self._runs]

    @property
    def arms(self) -> list[tuple[str, list[tuple[str, str]]]]:
        """(arm, its runs with their colours)."""
        return [
            (arm, [(run.name, self.colours[run.name]) for run in self._runs if run.arm == arm])
            for arm in self._set.arms
        ]

    @property
    def totals(self) -> str:
        parts = [counted(len(self._runs), "run")]
        if len(self._set.arms) not in (1, len(self._runs)):
            parts.append(counted(len(self._set.arms), "arm"))
        steps = [run.tracked for run in self._runs]
        parts.append(counted(sum(steps), "tracked step"))
        if self.errors:
            parts.append(f"{counted(len(self.errors), 'place')} that could not be read")
        return " · ".join(parts)

    @property
    def thinned(self) -> list[str]:
        """What is not drawn, in sentences."""
        out = []
        for run in self._runs:
            series = len(run.record.start["layers"])
            drawn = min(len(run.record.steps), max(runpoints.POINTS // max(series, 1), runpoints.FEWEST))
            if drawn < run.tracked:
                of = f" of {run.name}" if self.several else ""
                out.append(
                    f"Curves of layers{of} draw {drawn:,} of {run.tracked:,} tracked steps, evenly spread, first and "
                    "last among them; curves of heads may draw fewer. The record has all."
                )
        return out

    @property
    def loss(self) -> dict[str, Any] | None:
        found = runpoints.losses(self._runs)
        return (
            self._packed(runcharts.losses(found, self.colours, self._marks, width="container"), "runs")
            if found
            else None
        )

    @property
    def sharpness(self) -> dict[str, dict[str, Any]]:
        """Sharpness against the loss, by layer for one run, by run for several."""
        found, colours = self._middle
        loss = runpoints.whose_loss(self._runs)
        return {
            measure: self._packed(
                runcharts.against_loss(found, measure, loss, colours, width="container"), "runs"
            )
            for measure in ("normalised_entropy", "largest")
            if any(row[measure] is not None and row["loss"] is not None for row in found)
        }

    @property
    def compared(self) -> dict[str, dict[str, Any]]:
        """The median layer of every run, a chart per measure; empty for one run."""
        if not self.several:
            return {}
        found = runpoints.middles(self._runs)
        return {
            measure: self._packed(
                runcharts.over_steps(found, measure, self.colours, self._marks, width="container"), "runs"
            )
            for measure in ("symmetry", "directionality", "norm", "normalised_entropy")
            if values(found, measure)
        }

    @property
    def by_layer(self) -> list[dict[str, Any]]:
        """Symmetry of one layer in every run, a chart per layer; empty for one run, or for runs of other layers."""
        shapes = {len(run.record.start["layers"]) for run in self._runs}
        if not self.several or len(shapes) != 1 or not shapes.issubset(range(1, 10**6)):
            return []
        places = runpoints.charted(self._runs[0])
        found = [
            row
            for run in self._runs
            for row in runpoints.layers(run, runpoints.steps_drawn(run, len(self._runs) * len(places)))
            if row["layer"] in places
        ]
        return [
            {
                "layer": place,
                "chart": self._packed(
                    runcharts.over_steps(rows, "symmetry", self.colours, width="container", height=190),
                    "runs",
                ),
            }
            for place in places
            if values(rows := [row for row in found if row["layer"] == place], "symmetry")
        ]

    @property
    def own(self) -> Iterator[dict[str, Any]]:
        """One per run that has a section: its charts over steps, those of its heads, and its layers in a table."""
        for index, run in enumerate(self._shown):
            marks = runpoints.resumes([run])
            found = runpoints.layers(run, runpoints.steps_drawn(run, len(run.record.start["layers"])))
            yield {
                "index": index,
                "name": run.name,
                "colour": self.colours[run.name],
                "form": {
                    measure: self._packed(
                        runcharts.over_steps(found, measure, None, marks, width="container"), "runs"
                    )
                    for measure in ("symmetry", "directionality", "norm", "normalised_entropy", "self_norm")
                    if values(found, measure)
                },
                "heads": list(self._heads(run, marks)),
                "charted": len(runpoints.charted(run)),
                "of": len(run.record.start["layers"]),
                "at": f"{run.last['step']:,}" if run.last else "–",
                "maps": self._maps(run),
                "lines": layer_lines(run),
            }

    @property
    def more(self) -> int:
        """Runs without a section of their own."""
        return len(self._runs) - len(self._shown)

    @property
    def conflict(self) -> dict[str, dict[str, Any]]:
        found = runpoints.conflicts(self._runs)
        colours = self.colours if self.several else None
        drawn = {}
        over = runpoints.excesses(found)
        if over:
            drawn["excess"] = self._packed(
                runcharts.excess(over, colours, self._marks, width="container"), "runs"
            )
        if values(found, "null_mean"):
            drawn["null"] = self._packed(runcharts.against_null(found, colours, width="container"), "runs")
        return drawn

    @property
    def conventions(self) -> list[tuple[list[str], list[tuple[str, str]]]]:
        """The options and environments: what all runs share, and of each run what they do not."""
        every = [
            options(run.experiment) | options({"environment": run.record.start.get("environment") or {}})
            for run in self._runs
        ]
        shared = {
            name: value
            for name, value in (every[0] if every else {}).items()
            if all(o.get(name) == value for o in every)
        }
        out = [(["every run" if self.several else "this run"], list(shared.items()))]
        for run, one in zip(self._runs[:24], every, strict=False):
            out.append(([run.name], [(name, value) for name, value in one.items() if name not in shared]))
        return out

    def store(self) -> list[dict[str, Any]]:
        """The rows of the last tracked step of every run, for the table."""
        from qkform.report.page import packed_rows

        return [
            {"name": f"r{i}", "entry": i, "part": ""} | packed_rows({}, rows, COLUMNS)
            for i, run in enumerate(self._runs)
            if (rows := [{name: row.get(name) for name in COLUMNS} for row in runpoints.last_rows(run)])
        ]

    @property
    def _shown(self) -> list[Run]:
        """The runs that have a section: the first of every arm, or those of the only arm."""
        arms = self._set.arms
        if len(arms) > 1:
            return [next(run for run in self._runs if run.arm == arm) for arm in arms[:SHOWN]]
        return self._runs[:SHOWN]

    @property
    def _middle(self) -> tuple[list[Row], Mapping[str, str] | None]:
        if self.several:
            return runpoints.middles(self._runs), self.colours
        return [
            row
            for run in self._runs
            for row in runpoints.layers(run, runpoints.steps_drawn(run, len(run.record.start["layers"])))
        ], None

    def _heads(self, run: Run, marks: list[Row]) -> Iterator[dict[str, Any]]:
        places = runpoints.charted(run)
        each = {
            place: runpoints.heads(
                run, place, runpoints.steps_drawn(run, runpoints.head_count(run, place) + 1)
            )
            for place in places
        }
        for measure in ("symmetry",):
            domain = runcharts.shared_domain([row for rows in each.values() for row in rows], measure)
            for place, rows in each.items():
                if any(row["head"] is not None and row[measure] is not None for row in rows):
                    chart = runcharts.of_heads(rows, measure, marks, domain=domain, width="container")
                    yield {"layer": place, "measure": measure, "chart": self._packed(chart, "runs")}

    def _maps(self, run: Run) -> dict[str, dict[str, Any]]:
        """Every head at the last tracked step, as maps of colours."""
        rows: Points = points(runpoints.last_rows(run))
        return {
            axis: self._packed(charts.heatmap(rows, axis, width="container"), "runs")
            for axis in ("symmetry", "directionality")
            if any(row["head"] is not None and row[axis] is not None for row in rows)
        }


def facts(run: Run) -> dict[str, str]:
    """The facts of a run, as text."""
    last: Mapping[str, Any] = run.last or {}
    seconds, tracker = (runpoints.number(last.get(name)) for name in ("seconds", "tracker_seconds"))
    tokens = runpoints.number(last.get("tokens"))
    rate = runpoints.number(last.get("tokens_per_second"))
    shown = [f"{mark['said']} at {mark['step']:,}" for mark in runpoints.resumes([run])]
    return {
        "name": run.name,
        "state": run.state,
        "tracked": f"{run.tracked:,}",
        "step": f"{last['step']:,}" if last else "–",
        "loss": _four(last.get("loss")),
        "held_out": _four(last.get("held_out")),
        "tokens": "–" if tokens is None else f"{last['tokens']:,}",
        "seconds": time_words(seconds),
        "speed": "–" if rate is None else f"{rate:,.0f}",
        "tracker": f"{tracker / seconds:.2%}" if seconds and tracker is not None else "–",
        "rates": rate_words(last.get("rates")),
        "resumed": "; ".join(shown[-3:]) + (f" and {len(shown) - 3} more before" if len(shown) > 3 else ""),
    }


def run_colours(runs: RunSet) -> dict[str, str]:
    """A colour for every run: one for each arm, its seeds lighter one by one."""
    out = {}
    for i, arm in enumerate(runs.arms):
        of_arm = [run for run in runs.runs if run.arm == arm]
        for j, run in enumerate(of_arm):
            out[run.name] = lighter(MODEL_COLOURS[i % len(MODEL_COLOURS)], 0.55 * j / max(len(of_arm) - 1, 2))
    return out


def lighter(colour: str, share: float) -> str:
    """A colour with so much white in it."""
    parts = [int(colour[i : i + 2], 16) for i in (1, 3, 5)]
    return "#" + "".join(f"{round(part + share * (255 - part)):02x}" for part in parts)


def _four(value: Any) -> str:
    found = runpoints.number(value)
    return "–" if found is None else f"{found:.4f}"
