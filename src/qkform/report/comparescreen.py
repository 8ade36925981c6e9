"""What the terminal prints of a comparison: the arms, then each arm against the baseline."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from textwrap import wrap
from typing import Any

from qkform.comparisons import CompareTable
from qkform.records import Row
from qkform.report import comparewords as words
from qkform.report.reading import is_number
from qkform.report.terminal import NOTES, Column, heading, one_line, table_of

_OF_ARM = ("held_out", "symmetry", "normalised_entropy", "largest", "directionality", "loss")


def compare_screen(table: CompareTable, *, width: int, unicode: bool) -> Iterator[Any]:
    """What rich prints: differences of every seed from 132 columns on; fewer measures of the arms in narrow windows."""
    from rich.text import Text

    settings = table.settings
    baseline = one_line(str(settings.get("baseline")))
    yield heading(f"Against {baseline}", "paired by seed")
    yield table_of(
        f"Arms, at the end: mean {_sign(unicode)} sd over seeds",
        _arm_columns(width, unicode),
        table.arms,
        unicode=unicode,
    )
    for pair in table.pairs:
        yield from _pair(table, pair, width=width, unicode=unicode)
    if table.pairs:
        yield Text(
            "difference: arm - baseline, mean over pairs of one seed; * p at most 0.05, of all choices of their signs "
            "(none where the baseline's own last loss is the mark: that favours arms that reach it). "
            "times faster: from the baseline's own first reach, so that the baseline against itself is 1. "
            "The published rule counts from the last step instead; beside the arm's stands what it gives the baseline "
            "against itself. "
            f"Losses are reached by the {one_line(str(settings.get('smoothing')))}.",
            style="dim",
        )
    notes = [one_line(str(note), 400) for note in table.notes]
    if len(notes) > NOTES:
        notes[NOTES:] = [f"and {len(notes) - NOTES} more, listed by --format json"]
    yield from (Text(f"note: {note}", style="dim") for note in notes)
    yield Text("")


def _sign(unicode: bool) -> str:
    return "±" if unicode else "+-"


def _arm_columns(width: int, unicode: bool) -> list[Column]:
    def cell(name: str, arm: Mapping[str, Any]) -> str:
        mean, sd = arm["mean"].get(name), arm["sd"].get(name)
        if broke := arm.get("broke"):
            return f"{broke} of {len(arm['seeds'])} broke"
        shown = words.value(name, mean)
        return f"{shown} {_sign(unicode)} {sd:.3f}" if is_number(sd) else shown

    def name(arm: Mapping[str, Any]) -> str:
        return one_line(str(arm["name"]), 40) + (" (baseline)" if arm["baseline"] else "")

    columns = [
        Column("arm", "", name, justify="left"),
        Column("seeds", "", lambda arm: str(len(arm["seeds"]))),
    ]
    room = max(1, min(len(_OF_ARM), (width - 40) // 16))
    return columns + [Column(words.NAMES[one], "", partial(cell, one)) for one in _OF_ARM[:room]]


def _pair(table: CompareTable, pair: Mapping[str, Any], *, width: int, unicode: bool) -> Iterator[Any]:
    from rich.text import Text

    title = f"{one_line(str(pair['arm']))} against {one_line(str(pair['baseline']))}"
    if pair["refused"]:
        yield Text(f"{title}: not paired, since {one_line(str(pair['refused']))}")
        return
    seeds = ", ".join(one_line(str(seed), 20) for seed in pair["seeds"])
    yield Text(f"{title}: seeds {seeds}" if seeds else f"{title}: no seed that both have", style="bold")
    for at in dict.fromkeys(row["at"] for row in pair["rows"]):
        rows = [row for row in pair["rows"] if row["at"] == at]
        means = [row for row in rows if row["seed"] is None]
        yield table_of(words.moment(at, table.settings), _columns(rows, width), means, unicode=unicode)
        yield from (Text(one_line(remark, 400), style="dim") for remark in words.remarks(rows, at))


def _columns(rows: Sequence[Row], width: int) -> list[Column]:
    def sides(side: str, row: Row) -> str:
        return words.value(row["measure"], row[f"{side}_value"], row[f"{side}_never"])

    def each(row: Row) -> str:
        found = [one for one in rows if one["measure"] == row["measure"] and one["seed"] is not None]
        return "  ".join(
            "never" if one["arm_never"] else words.difference(one["measure"], one["difference"])
            for one in found
        )

    columns = [
        Column(
            "", "", lambda row: words.NAMES.get(row["measure"], one_line(str(row["measure"]))), justify="left"
        ),
        Column("arm", "", lambda row: sides("arm", row)),
        Column("baseline", "", lambda row: sides("baseline", row)),
        Column(
            "difference" if width >= 100 else "differs",
            "",
            lambda row: words.difference(row["measure"], row["difference"]),
        ),
    ]
    if any(is_number(row["low"]) for row in rows):  # two seeds have no interval
        heading = "\n".join(wrap(words.interval_name(rows), 14))  # no wider than its numbers
        columns.append(Column(heading, "", words.interval))
    if any(is_number(row["speed_up"]) for row in rows):
        wide = width >= 100
        columns.append(
            Column(
                "times faster" if wide else "faster",
                "",
                lambda row: words.faster(row, ends=wide),
                justify="left",
            )
        )
    if any(row["arm_never"] for row in rows) and width >= 100:
        columns.append(Column("", "", words.never))
    if width >= 132:
        columns.append(Column("each seed", "", each, justify="left"))
    return columns
