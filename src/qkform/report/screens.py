"""What the terminal prints of a table: a screen per model, a line per step of a trajectory, a comparison."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from qkform.comparisons import CompareTable
from qkform.differences import DIFF_COLUMNS, DiffTable
from qkform.flows import FlowTable
from qkform.records import ModelScores, Row, ScoreTable, median_of, single_heads, values, whole_layers
from qkform.report.comparescreen import compare_screen
from qkform.report.flowscreen import flow_screen
from qkform.report.reading import change, decimals, is_number, movement, reading, signed
from qkform.report.runreading import spread
from qkform.report.runscreen import runs_screen
from qkform.report.runset import RunSet
from qkform.report.series import UNITS, Entry, entries
from qkform.report.terminal import (
    NOTES,
    Column,
    bar,
    by_list,
    cost,
    form_words,
    heading,
    heads_by_module,
    list_title,
    model_screen,
    null_words,
    number,
    one_line,
    table_of,
)

LINES = 40  # of a series; a longer one is thinned out, its first and last kept


def renderables(
    table: ScoreTable | DiffTable | FlowTable | CompareTable | RunSet | ModelScores,
    *,
    width: int,
    unicode: bool = True,
) -> Iterator[Any]:
    """What rich prints for a table, a comparison, a flow, runs or one model.

    `width` in columns; from 96 on it holds every column, below 76 the bars go. `unicode=False` draws with ASCII.
    """
    if isinstance(table, ModelScores):
        yield from model_screen(table, width=width, unicode=unicode)
    elif isinstance(table, DiffTable):
        yield from _diff_screen(table, width=width, unicode=unicode)
    elif isinstance(table, FlowTable):
        yield from flow_screen(table, width=width, unicode=unicode)
    elif isinstance(table, CompareTable):
        yield from compare_screen(table, width=width, unicode=unicode)
    elif isinstance(table, RunSet):
        yield from runs_screen(table, width=width, unicode=unicode)
    else:
        for entry in entries(table):
            if entry.kind is None:
                yield from model_screen(entry.last, width=width, unicode=unicode)
            else:
                yield from _series_screen(entry, width=width, unicode=unicode)


def _series_screen(entry: Entry, *, width: int, unicode: bool) -> Iterator[Any]:
    from rich.text import Text

    assert entry.kind is not None
    unit = UNITS[entry.kind]
    models = entry.models
    yield heading(
        one_line(entry.name),
        models[0].model_type,
        f"{len(models)} {unit}s",
        *form_words(models[0], distance=entry.kind != "offset"),
        *cost(sum(m.bytes_read for m in models), sum(m.wall_seconds for m in models)),
    )
    for name in dict.fromkeys(name for model in models for name in by_list(model.rows)):
        lines = [
            (value, by_list(model.rows).get(name, []))
            for value, model in zip(entry.values, models, strict=True)
        ]
        kept = spread(lines, LINES)
        columns = _series_columns(unit, cross=name[1] == "cross", width=width, unicode=unicode)
        title = list_title(*name) + (
            f", {len(kept)} of {len(lines)} {unit}s" if len(kept) < len(lines) else ""
        )
        yield table_of(title, columns, kept, unicode=unicode)
    yield Text(movement(unit, entry.values, models))
    shown = models[entry.start]
    yield Text(f"At {unit} {entry.values[entry.start]:,}: {reading(shown)}")
    yield Text(null_words(shown.layers), style="dim")
    yield Text("")


def _series_columns(unit: str, *, cross: bool, width: int, unicode: bool) -> list[Column]:
    """Columns of lines (value, rows): medians and ranges over whole layers."""

    def middle(name: str, line: tuple[int, list[Row]]) -> str:
        found = median_of(whole_layers(line[1]), name)
        drawn = f" {bar(found, unicode=unicode)}" if bars else ""
        return f"{decimals(found):>6}{drawn}"

    def span(name: str, line: tuple[int, list[Row]]) -> str:
        found = values(whole_layers(line[1]), name)
        return f"{decimals(min(found))} to {decimals(max(found))}" if found else "–"

    bars = width >= 76
    columns = [Column(unit, "", lambda line: f"{line[0]:,}")]
    if width >= 96:
        columns.append(Column("layers", "", lambda line: str(len(whole_layers(line[1])))))
    if not cross:
        columns.append(Column("symmetry", "", lambda line: middle("symmetry", line), justify="left"))
        if width >= 82:
            columns.append(Column("range", "", lambda line: span("symmetry", line)))
        columns.append(
            Column("heads", "", lambda line: decimals(median_of(single_heads(line[1]), "symmetry")))
        )
    columns.append(
        Column(
            "directionality" if bars else "direction",
            "",
            lambda line: middle("directionality", line),
            justify="left",
        )
    )
    if width >= 112:
        columns.append(Column("range", "", lambda line: span("directionality", line)))
    return columns


def _diff_screen(diff: DiffTable, *, width: int, unicode: bool) -> Iterator[Any]:
    from rich.text import Text

    arrow = "→" if unicode else "->"
    yield heading(
        f"{one_line(diff.source_a)} {arrow} {one_line(diff.source_b)}",
        diff.model_type,
        *cost(diff.bytes_read, diff.wall_seconds),
    )
    for name, rows in by_list(diff.rows).items():
        layers = whole_layers(rows)
        columns = _diff_columns(
            layers, heads_by_module(rows), cross=name[1] == "cross", width=width, unicode=unicode
        )
        yield table_of(list_title(*name), columns, layers, unicode=unicode)
    yield Text(change(diff))
    yield Text(
        "noise: where symmetry would move (mean +/- 2 std) if noise on W_Q and W_K turned W as far; inside, the "
        "change says nothing about symmetry. moved: norm of the change over the norm of a.",
        style="dim",
    )
    notes = [
        f"no change: {one_line(row['module'])}: {one_line(row['reason'] or 'no reason recorded')}"
        for row in diff.layers
        if row["relative_change"] is None
    ]
    notes += [f"only in a: {one_line(module)}" for module in diff.only_in_a]
    notes += [f"only in b: {one_line(module)}" for module in diff.only_in_b]
    if len(notes) > NOTES:
        notes[NOTES:] = [f"and {len(notes) - NOTES} more, listed by --format json"]
    yield from (Text(note, style="dim") for note in notes)
    yield Text("")


def _diff_columns(
    layers: list[Row], heads: dict[str, list[Row]], *, cross: bool, width: int, unicode: bool
) -> list[Column]:
    """The columns that fit, with the median over layers as footer."""
    bars, more = width >= 92, width >= 120
    middle = {name: median_of(layers, name) for name, kind in DIFF_COLUMNS.items() if kind is float}

    def score(title: str, name: str) -> Column:
        return Column(title, decimals(middle[name]), lambda row: decimals(row[name]))

    def changed(title: str, name: str) -> Column:
        def cell(row: Row) -> str:
            drawn = f" {bar(row[name], unicode=unicode)}" if bars else ""
            return f"{signed(row[name]):>6}{drawn}"

        return Column(title if bars else title[:9], f"{signed(middle[name]):>6}", cell, justify="left")

    def band(row: Row) -> str:
        low, high, found = row["null_low"], row["null_high"], row["symmetry_change"]
        if not (is_number(low) and is_number(high)):
            return "–"
        outside = is_number(found) and not low <= found <= high
        return f"{signed(low)} to {signed(high)}{' *' if outside else '  '}"

    columns = [Column("layer", "median", lambda row: str(row["layer"]))]
    if not cross:
        columns += [
            score("a", "symmetry_a"),
            score("b", "symmetry_b"),
            changed("symmetry", "symmetry_change"),
        ]
        if width >= 78:
            columns.append(Column("noise", "* outside", band))
        if more:
            columns.append(
                Column(
                    "heads",
                    signed(median_of([row for rows in heads.values() for row in rows], "symmetry_change")),
                    lambda row: signed(median_of(heads.get(row["module"], []), "symmetry_change")),
                )
            )
    if more:
        columns.append(changed("directionality", "directionality_change"))
    columns.append(
        Column("moved", number(middle["relative_change"]), lambda row: number(row["relative_change"]))
    )
    if width >= 60:
        columns.append(score("cosine", "cosine"))
    return columns
