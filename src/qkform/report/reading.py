"""One or two plain sentences about a model's scores, which say no more than the scores do."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

from qkform.differences import DiffTable
from qkform.records import ModelScores, Row, median_of, null_band, values


def reading(model: ModelScores) -> str:
    """What the whole-layer rows of one model show, in words. Never what the model is or how it was trained:
    a real encoder can score as low as a decoder.
    """
    rows = [row for row in model.layers if row["attention"] == "self" and row.get("part") is None]
    scored = values(rows, "symmetry")
    if not scored:
        return "No layer has a symmetry score; the reasons stand beside the rows."
    above, below = _beyond(rows)
    parts = [_symmetry(len(scored), above, below, median_of(rows, "symmetry") or 0.0)]
    heads = median_of(
        (r for r in model.heads if r["attention"] == "self" and r.get("part") is None), "symmetry"
    )
    if heads is not None:
        parts.append(f"The median head scores {decimals(heads)}.")
    parts.append(_direction(values(rows, "directionality")))
    return " ".join(p for p in parts if p)


def movement(unit: str, values_of: Sequence[int], models: Sequence[ModelScores]) -> str:
    """How the median symmetry of whole layers went over a series, first and last value: "step 0", "step 500"."""
    found = [
        (
            value,
            median_of(
                (r for r in model.layers if r["attention"] == "self" and r.get("part") is None), "symmetry"
            ),
        )
        for value, model in zip(values_of, models, strict=True)
    ]
    known = [(value, middle) for value, middle in found if middle is not None]
    if not known:
        return "No layer has a symmetry score; the reasons stand beside the rows."
    (first, begin), (last, end) = known[0], known[-1]
    return f"Median symmetry of the layers: {decimals(begin)} at {unit} {first:,}, {decimals(end)} at {unit} {last:,}."


def change(diff: DiffTable) -> str:
    """What the whole-layer rows of a diff show, in words."""
    rows = [row for row in diff.layers if row["part"] is None]
    found = values(rows, "symmetry_change")
    moved = values(rows, "relative_change")
    parts = []
    if found:
        banded = [
            r for r in rows if all(is_number(r[c]) for c in ("symmetry_change", "null_low", "null_high"))
        ]
        above = sum(r["symmetry_change"] > r["null_high"] for r in banded)
        below = sum(r["symmetry_change"] < r["null_low"] for r in banded)
        parts.append(
            f"Symmetry changed by {signed(median_of(rows, 'symmetry_change'))} (median over layers)."
        )
        if banded:
            parts.append(
                f"Of {len(banded)} layers, {above} rose and {below} fell by more than noise on the weights would "
                "make them."
            )
    else:
        parts.append("No layer has a change of symmetry; the reasons stand beside the rows.")
    if moved:
        parts.append(
            f"The layers' forms changed by {decimals(100 * min(moved), 1)} to {decimals(100 * max(moved), 1)} % of "
            "their norm."
        )
    return " ".join(parts)


def is_number(value: Any) -> bool:
    """Whether a value of a row is there and a number."""
    return isinstance(value, int | float) and math.isfinite(value)


def mask_words(rows: Iterable[Row]) -> str:
    """The masks that occur in some rows, in order of appearance: "causal", or "mask unknown"."""
    masks = dict.fromkeys(row["mask"] for row in rows)
    return ", ".join("mask unknown" if mask == "unknown" else mask for mask in masks)


def decimals(value: float | None, digits: int = 3) -> str:
    """A score with `digits` decimals; a dash for what is not defined."""
    return "–" if value is None else f"{round(value, digits) + 0.0:.{digits}f}"  # + 0.0: no minus zero


def signed(value: float | None, digits: int = 3) -> str:
    """A change with its sign; one that three decimals would not show, in powers of ten."""
    if value is not None and 0.0 < abs(value) < 0.01:
        return f"{value:+.1e}"
    text = decimals(value, digits)
    return text if value is None or text.startswith("-") or not text.strip("0.") else f"+{text}"


def _beyond(rows: Sequence[Row]) -> tuple[int, int]:
    """How many layers lie above and below two standard deviations of random weights."""
    above = below = 0
    for row in rows:
        band = null_band(row)
        if band is not None:
            above += row["symmetry"] > band[1]
            below += row["symmetry"] < band[0]
    return above, below


def _symmetry(n: int, above: int, below: int, median: float) -> str:
    which = "the only layer" if n == 1 else f"{above} of {n} layers"
    if n == 1 and not above:
        which = "no layer"
    text = f"Symmetry (median {decimals(median)}): {which} above what random weights give"
    if below:
        text += f", {below} below"
    return text + "."


def _direction(found: Sequence[float]) -> str:
    keys, queries = sum(v < 0 for v in found), sum(v > 0 for v in found)
    if not found:
        return ""
    if not keys and not queries:
        return "No layer has outlier rows or columns."
    return f"Outlier columns (key side) outweigh rows in {keys} of {len(found)} layers."
