"""Rows as a table of plain text: what `print` shows of a record."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any


def plain_table(rows: Iterable[Mapping[str, Any]], columns: Sequence[str]) -> str:
    """A head and a line per row; numbers to the right, and no column in which no row has a value, or only empty lists.

    >>> print(plain_table([{"layer": 0, "norm": 1.5}, {"layer": 1, "norm": None}], ["layer", "norm", "mask"]))
    layer   norm
        0  1.500
        1      –
    """
    rows = list(rows)
    shown = [name for name in columns if any(row.get(name) not in (None, (), []) for row in rows)]
    lines = [shown, *([short(row.get(name)) for name in shown] for row in rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(shown))]
    right = [all(isinstance(row.get(name), int | float | None) for row in rows) for name in shown]
    return "\n".join(
        "  ".join(
            text.rjust(width) if to_right else text.ljust(width)
            for text, width, to_right in zip(line, widths, right, strict=True)
        ).rstrip()
        for line in lines
    )


def short(value: Any) -> str:
    """A value in few characters: three decimals, or as many digits where that would show nothing; None as a dash."""
    if value is None:
        return "–"
    if isinstance(value, float):
        return f"{value:.3f}" if value == 0 or 5e-4 <= abs(value) < 1e5 else f"{value:.3g}"
    if isinstance(value, str):
        return " ".join(value.split())  # in one line
    return ", ".join(map(short, value)) if isinstance(value, list | tuple) else str(value)
