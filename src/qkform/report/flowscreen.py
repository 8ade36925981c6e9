"""What the terminal prints of a one-layer flow: its task, and a line per ratio of learning rates."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from qkform.flows import FlowTable, ratio_name
from qkform.records import Row
from qkform.report.reading import is_number
from qkform.report.terminal import Column, heading, one_line, table_of

_BAR = 16  # cells


def flow_screen(table: FlowTable, *, width: int, unicode: bool) -> Iterator[Any]:
    """What rich prints: every measure as simulated too from 92 columns on, a bar of the sharpness from 104 on."""
    from rich.text import Text

    task = table.task
    yield heading("one-layer flow", *circuit_words(task))
    yield Text(task_words(task), style="dim")
    yield table_of("", list(_columns(table, width, unicode)), table.rows, unicode=unicode)
    yield Text(
        "ratio: learning rate of W_QK over that of W_OV. sharpness: attention on the relevant tokens when the loss is "
        "reached. gap: of their score over a distractor's. gain: from attended tokens to the right logit."
        + (" In brackets: measured on the full matrices." if _simulated(table) and width >= 60 else ""),
        style="dim",
    )
    yield Text("")


def circuit_words(task: Mapping[str, Any]) -> list[str]:
    """ "attention collapsed", "output factorized", "cross-entropy 0.1"."""
    goal = {"ce": "cross-entropy", "squared": "squared loss"}.get(str(task.get("objective")), "loss")
    return [
        f"attention {one_line(str(task.get('attention')))}",
        f"output {one_line(str(task.get('output')))}",
        f"{goal} {one_line(str(task.get('loss')))}",
    ]


def task_words(task: Mapping[str, Any]) -> str:
    """The task in a sentence."""
    said = {name: one_line(str(value), 40) for name, value in task.items()}
    given = said.get
    return (
        f"{given('classes')} classes of {given('per_class')} tokens, {given('common')} common tokens; a sequence has "
        f"{given('relevant')} relevant among {given('distractors')} distracting ones"
    )


def shown(value: Any) -> str:
    """A number to five digits."""
    return f"{value:.5g}" if is_number(value) else "–"


def _simulated(table: FlowTable) -> bool:
    return any(row["simulated"] for row in table.rows)


def _columns(table: FlowTable, width: int, unicode: bool) -> Iterator[Column]:
    def both(name: str, measured: bool) -> Column:
        def cell(row: Row) -> str:
            run = row["simulated"]
            return shown(row[name]) + (f" ({shown(run[name])})" if measured and run else "")

        return Column(name, "", cell)

    def bar(row: Row) -> str:
        filled = round(_BAR * row["sharpness"]) if is_number(row["sharpness"]) else 0
        return ("█" if unicode else "#") * min(max(filled, 0), _BAR)

    told = _simulated(table)
    yield Column("ratio", "", lambda row: ratio_name(row["ratio"]) if is_number(row["ratio"]) else "–")
    yield both("sharpness", told and width >= 60)
    if width >= 104:
        yield Column("", "", bar, justify="left")
    yield both("entropy", told and width >= 72)
    yield both("gap", told and width >= 92)
    yield both("gain", told and width >= 92)
