"""What the terminal prints of training runs: a line per run, and per run a line for every layer, from first to last."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from qkform.records import Row, values
from qkform.report.reading import decimals
from qkform.report.rows import shortened
from qkform.report.runpoints import layers, number
from qkform.report.runreading import spread
from qkform.report.runset import Run, RunSet
from qkform.report.terminal import Column, heading, one_line, table_of
from qkform.report.terminal import number as short

LINES = 60  # layers of a run that have a line
_COLUMNS = ("symmetry", "symmetry_z", "directionality", "norm", "normalised_entropy", "largest")


def runs_screen(runs: RunSet, *, width: int, unicode: bool) -> Iterator[Any]:
    """What rich prints: from 120 columns on every measure, below 76 symmetry alone."""
    from rich.text import Text

    if len(runs.runs) > 1:
        yield table_of("", _run_columns(width, unicode), list(runs.runs), unicode=unicode)
    for run in runs.runs:
        yield from _one(run, width=width, unicode=unicode)
    if runs.runs:
        yield Text(
            "From the first tracked step to the last. z: of the last symmetry, standard deviations from random "
            "weights, whose mean is 1/d. entropy: of attention on the probe, 1 is uniform.",
            style="dim",
        )
        yield Text("")


def _one(run: Run, *, width: int, unicode: bool) -> Iterator[Any]:
    from rich.text import Text

    model = run.record.start.get("model")
    kind = model.get("model_type") or model.get("class") if isinstance(model, Mapping) else None
    yield heading(one_line(run.name), None if kind is None else str(kind), one_line(run.state))
    last: Mapping[str, Any] = run.last or {}
    said = [f"{run.tracked:,} tracked {'step' if run.tracked == 1 else 'steps'}"]
    if last:
        said = [f"step {last['step']:,}", *_losses(last), *said]
        seconds, tracker = number(last.get("seconds")), number(last.get("tracker_seconds"))
        if seconds is not None:
            said.append(time_words(seconds))
        if seconds and tracker is not None:
            said.append(f"{tracker / seconds:.2%} of it for the record")
    for event in run.resumes:
        said.append(
            f"resumed at {event.get('step')}{'' if event.get('exact') is not False else ', not exactly'}"
        )
    yield Text(one_line(", ".join(said), 400), style="dim")
    lines = layer_lines(run)
    kept = spread(lines, LINES)
    if kept:
        title = f"{len(kept)} of {len(lines)} layers" if len(kept) < len(lines) else ""
        yield table_of(title, _layer_columns(kept, width, unicode), kept, unicode=unicode)
    elif not run.last:
        yield Text("no step was tracked yet")
        yield Text("")


def layer_lines(run: Run) -> list[Row]:
    """A row per layer: {"layer", "module"} and of every measure "NAME_first" and "NAME_last", of the tracked steps."""
    if not run.record.steps:
        return []
    first, last = (layers(run, [step]) for step in (run.record.steps[0], run.record.steps[-1]))
    return [
        {"layer": b["layer"], "module": b["module"]}
        | {f"{name}_first": a[name] for name in _COLUMNS}
        | {f"{name}_last": b[name] for name in _COLUMNS}
        for a, b in zip(first, last, strict=False)
    ]


def rate_words(rates: Any) -> str:
    """ "0.003", or by group "qk 0.012, rest 0.003"."""
    if not isinstance(rates, Mapping):
        return "–"
    found = {str(name)[:40]: number(rate) for name, rate in rates.items()}
    shown = {name: "–" if rate is None else f"{rate:.3g}" for name, rate in found.items()}
    if not shown:
        return "–"
    if len(set(shown.values())) == 1:
        return next(iter(shown.values()))
    more = f" and {len(shown) - 6} more" if len(shown) > 6 else ""
    return ", ".join(f"{name} {rate}" for name, rate in list(shown.items())[:6]) + more


def time_words(seconds: float | None) -> str:
    """ "41 s", "12 min", "3.4 h"."""
    if seconds is None:
        return "–"
    if seconds < 100:
        return f"{seconds:.3g} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"


def _losses(last: Mapping[str, Any]) -> list[str]:
    found = [("loss", number(last.get("loss"))), ("held-out", number(last.get("held_out")))]
    return [f"{name} {value:.4f}" for name, value in found if value is not None]


def _run_columns(width: int, unicode: bool) -> list[Column]:
    arrow = "→" if unicode else ">"

    def loss(name: str, title: str) -> Column:
        return Column(title, "", lambda run: decimals(number((run.last or {}).get(name)), 4))

    def middle(name: str, title: str, digits: int = 3) -> Column:
        def cell(run: Run) -> str:
            lines = layer_lines(run)
            ends = [_median(lines, f"{name}_{end}") for end in ("first", "last")]
            return f"{decimals(ends[0], digits)} {arrow} {decimals(ends[1], digits)}"

        return Column(title, "", cell)

    room = max(14, min(48, width - (106 if width >= 120 else 50 if width >= 76 else 30)))
    columns = [
        # the middle of a long name goes: its end is the seed
        Column("run", "", lambda run: shortened(one_line(run.name, 1000), room), justify="left"),
        Column("step", "", lambda run: f"{run.last['step']:,}" if run.last else "–"),
        loss("held_out", "held-out"),
    ]
    if width >= 60:
        columns.insert(2, loss("loss", "loss"))
    if width >= 76:
        columns.append(middle("symmetry", "symmetry"))
    if width >= 120:
        columns += [middle("directionality", "directionality"), middle("normalised_entropy", "entropy")]
        columns.append(
            Column("state", "", lambda run: one_line(run.state.partition(":")[0], 28), justify="left")
        )
    return columns


def _layer_columns(lines: Sequence[Row], width: int, unicode: bool) -> list[Column]:
    arrow = "→" if unicode else ">"

    def both(name: str, title: str, shown: Any = decimals) -> Column:
        def cell(row: Row) -> str:
            return f"{shown(row[f'{name}_first'])} {arrow} {shown(row[f'{name}_last'])}"

        ends = [_median(lines, f"{name}_{end}") for end in ("first", "last")]
        return Column(title, f"{shown(ends[0])} {arrow} {shown(ends[1])}", cell)

    columns = [
        Column("layer", "median", lambda row: str(row["layer"])),
        both("symmetry", "symmetry"),
        Column(
            "z",
            decimals(_median(lines, "symmetry_z_last"), 0),
            lambda row: decimals(row["symmetry_z_last"], 0),
        ),
    ]
    if width >= 60:
        columns.append(both("directionality", "directionality"))
    if width >= 76:
        columns.append(both("normalised_entropy", "entropy"))
    if width >= 104:
        columns += [both("largest", "largest weight"), both("norm", "norm", short)]
    if width >= 130:
        columns.append(
            Column("module", "", lambda row: one_line(row["module"], max(width - 112, 20)), justify="left")
        )
    return columns


def _median(rows: Sequence[Row], name: str) -> float | None:
    from statistics import median

    found = values(rows, name)
    return median(found) if found else None
