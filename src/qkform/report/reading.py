"""One or two plain sentences about a model's scores, which say no more than the scores do."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from qkform.records import ModelScores, Row, median_of, null_band, values


def reading(model: ModelScores) -> str:
    """What the whole-layer rows of one model show, in words. Never what the model is or how it was trained:
    a real encoder can score as low as a decoder.
    """
    rows = [row for row in model.layers if row["attention"] == "self"]
    scored = values(rows, "symmetry")
    if not scored:
        return "No layer has a symmetry score; the reasons stand beside the rows."
    above, below = _beyond(rows)
    parts = [_symmetry(len(scored), above, below, median_of(rows, "symmetry") or 0.0)]
    heads = median_of((r for r in model.heads if r["attention"] == "self"), "symmetry")
    if heads is not None:
        parts.append(f"The median head scores {decimals(heads)}.")
    parts.append(_direction(values(rows, "directionality")))
    return " ".join(p for p in parts if p)


def mask_words(rows: Iterable[Row]) -> str:
    """The masks that occur in some rows, in order of appearance: "causal", or "mask unknown"."""
    masks = dict.fromkeys(row["mask"] for row in rows)
    return ", ".join("mask unknown" if mask == "unknown" else mask for mask in masks)


def decimals(value: float | None, digits: int = 3) -> str:
    """A score with `digits` decimals; a dash for what is not defined."""
    return "–" if value is None else f"{round(value, digits) + 0.0:.{digits}f}"  # + 0.0: no minus zero


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
