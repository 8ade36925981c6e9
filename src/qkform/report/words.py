"""What the page says in words: the summary of a model, what is not defined and why, what the scores mean.

Nothing here concludes from a score to a mask, an architecture or a training history.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from qkform.records import ModelScores, Row, median_of, values
from qkform.report.rows import Group, text

# (name, range, formula in words). The rows of a table on the page.
SCORES = (
    (
        "symmetry",
        "−1 to 1",
        "The trace of W times W, divided by the squared Frobenius norm of W. 1: W equals its transpose; "
        "−1: W is skew; random weights give 1/d on average, d being the width of the model.",
    ),
    (
        "directionality",
        "−1 to 1",
        "(R − C) / (R + C). R sums how far the longest rows of W stand above a threshold, the mean plus "
        "gamma standard deviations of all row norms; C is the same for columns. Negative: columns, the key "
        "side, dominate; positive: rows, the query side. 0 with the flag no_outliers: no row and no column "
        "stands out.",
    ),
    (
        "random weights",
        "a band",
        "Mean 1/d, plus and minus two standard deviations of the symmetry of random weights of the same "
        "width and spectrum. A score outside is unlikely by chance; that alone does not make it large.",
    ),
    (
        "std from random",
        "any",
        "symmetry_z: symmetry minus 1/d, in those standard deviations. Read it beside symmetry itself.",
    ),
    ("norm", "0 and up", "The Frobenius norm of W."),
    (
        "effective rank",
        "1 and up",
        "How many directions carry W: the squared sum of its squared singular values, divided by the sum of "
        "their fourth powers.",
    ),
    (
        "attracting share",
        "0 to 1",
        "positive_energy: of the squared eigenvalues of the symmetric part (W + Wᵀ)/2, the share that "
        "belongs to positive ones: directions in which like attracts like. The rest repel.",
    ),
    (
        "bias share",
        "0 to 1",
        "The share of the form, extended by a constant input, that comes from the biases.",
    ),
)
DIFF_SCORES = (
    (
        "symmetry a, b",
        "−1 to 1",
        "The trace of W times W, divided by the squared Frobenius norm of W, in checkpoint a and in checkpoint b.",
    ),
    ("change", "−2 to 2", "Symmetry in b minus symmetry in a."),
    (
        "noise on the weights",
        "a band",
        "Where the change of symmetry would lie if independent noise on W_Q and W_K had turned W by the same angle as "
        "the real change: mean plus and minus two standard deviations. Inside the band, the change says nothing about "
        "symmetry in particular; outside, noise rarely goes there. That alone does not make it large.",
    ),
    (
        "std from noise",
        "any",
        "The change, minus the mean of that band, in its standard deviations.",
    ),
    (
        "directionality a, b",
        "−1 to 1",
        "(R − C) / (R + C) of outlier rows and columns. Negative: columns, the key side, dominate.",
    ),
    (
        "relative change",
        "0 and up",
        "The Frobenius norm of W in b minus W in a, divided by the norm of W in a.",
    ),
    ("cosine", "−1 to 1", "Of the two forms taken as vectors: 1, they differ at most in scale."),
    ("symmetry of the change", "−1 to 1", "The symmetry of the matrix by which W changed."),
    ("effective rank of the change", "1 and up", "How many directions carry the change."),
)
FLAGS = {
    "no_outliers": "no row and no column stands out, so directionality is 0 by convention",
    "qk_norm": "queries and keys are normalised after projection; their gains are in the form with --qk-norm alone",
}
_LISTED = 12


@dataclass(frozen=True)
class Spread:
    """Median, least and most of one score, for a line of text and a bar on a track from -1 to 1."""

    name: str
    count: int
    median: float
    low: float
    high: float

    @property
    def track(self) -> dict[str, float]:
        """Places on the track in per cent from its left end."""
        low, middle, high = (50.0 + 50.0 * min(max(v, -1.0), 1.0) for v in (self.low, self.median, self.high))
        return {"left": round(low, 2), "width": round(high - low, 2), "median": round(middle, 2)}


def spread(name: str, rows: Iterable[Row], column: str) -> Spread | None:
    """The spread of a column; None where no row has a value."""
    rows = list(rows)
    found, middle = values(rows, column), median_of(rows, column)
    if middle is None:
        return None
    return Spread(name, len(found), middle, min(found), max(found))


def shape(groups: Sequence[Group]) -> str:
    """Layers and heads per layer, "12 layers × 8 heads"; of several components "6 + 6 layers × 8 heads"."""
    n_layers, per_layer = [], set()
    for group in groups:
        heads = Counter(row["layer"] for row in group.heads)
        n_layers.append(max(len(group.layers), len(heads)))
        per_layer |= set(heads.values())
    layers = " + ".join(f"{n:,}" for n in n_layers) + (" layer" if n_layers == [1] else " layers")
    if not per_layer:
        return layers
    low, high = min(per_layer), max(per_layer)
    return f"{layers} × {counted(high, 'head') if low == high else f'{low} to {high} heads'}"


def null_means(layers: Iterable[Row]) -> str:
    """1/d of every width that occurs, "0.0013"."""
    widths = sorted({row["d_model"] for row in layers if row["d_model"]}, reverse=True)
    return ", ".join(f"{1 / d:.2g}" for d in widths[:3]) + (", …" if len(widths) > 3 else "")


def undefined(group: Group, scores: Sequence[str] = ("symmetry", "directionality")) -> list[str]:
    """Every reason for a missing score, with the rows it holds for."""
    found: dict[str, list[Row]] = {}
    for row in group.rows:
        missing = [c for c in scores if row[c] is None]
        if missing or row["reason"]:
            lacks = " and ".join(missing) or "a score"
            found.setdefault(
                f"{lacks.replace('_', ' ')} not defined: {row['reason'] or 'no reason recorded'}", []
            ).append(row)
    return [f"{why} ({places(rows, group.rows)})" for why, rows in found.items()]


def flagged(group: Group) -> list[str]:
    """Every flag, what it means, and the rows that carry it."""
    found: dict[str, list[Row]] = {}
    for row in group.rows:
        for flag in (row["flags"] or "").split(", "):
            if flag:
                found.setdefault(flag, []).append(row)
    return [
        f"{flag}: {FLAGS[flag] + ' ' if flag in FLAGS else ''}({places(rows, group.rows)})"
        for flag, rows in found.items()
    ]


def places(rows: Sequence[Row], every: Sequence[Row]) -> str:
    """Which rows, in words: "layer 3 head 2, layer 5 as a whole", or how many where they are many."""
    of = len(every)
    if len(rows) == of:
        return f"all {of} rows" if of > 1 else "the only row"
    named = [
        f"layer {row['layer']} "
        + ("as a whole" if row["head"] is None else f"head {row['head']}")
        + _when(row, every)
        for row in rows[: _LISTED + 1]
    ]
    more = f" and {len(rows) - _LISTED} more of {of} rows" if len(rows) > _LISTED else ""
    return ", ".join(named[:_LISTED]) + more


def _when(row: Row, every: Sequence[Row]) -> str:
    """ " at step 500" where `every` row is one of several models."""
    if len({other.get("stop") for other in every}) < 2:
        return ""
    if len({other["offset"] for other in every}) > 1:
        return f" at distance {row['offset']}"
    return f" at step {row['step']}"


def conventions(recorded: Iterable[tuple[str, Any]]) -> list[tuple[list[str], list[tuple[str, str]]]]:
    """The conventions of (name, conventions) as (names of those that share them, [(key, value), ...])."""
    found: dict[tuple[tuple[str, str], ...], list[str]] = {}
    for label, given in recorded:
        pairs = tuple((text(key), _value(value)) for key, value in _items(given))
        found.setdefault(pairs, []).append(label)
    return [(names, list(pairs)) for pairs, names in found.items()]


def counted(n: int, noun: str) -> str:
    """ "1 layer", "2 layers"."""
    return f"{n:,} {noun}" if n == 1 else f"{n:,} {noun}s"


def in_common(models: Sequence[ModelScores], unit: str) -> dict[Any, Any]:
    """The conventions of a series; of what is not the same in all of its models, that it differs."""
    every = [dict(_items(model.conventions)) for model in models]
    keys = dict.fromkeys(key for one in every for key in one)
    return {
        key: every[0].get(key)
        if all(one.get(key) == every[0].get(key) for one in every)
        else f"differs with the {unit}"
        for key in keys
    }


def _items(mapping: Any) -> list[tuple[Any, Any]]:
    return list(mapping.items()) if isinstance(mapping, Mapping) else []


def _value(value: Any) -> str:
    if isinstance(value, str):
        return text(value)
    if isinstance(value, bool):
        return "yes" if value else "no"
    return text(json.dumps(value, ensure_ascii=False, default=str))
