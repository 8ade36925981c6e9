"""The words of a comparison: what its measures and moments are called, and its numbers as a person reads them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from qkform.comparisons import CLOCKS, PUBLISHED
from qkform.records import Row
from qkform.report.reading import is_number
from qkform.report.terminal import number

LEVEL = 0.05  # of the star
NAMES = {
    "loss": "training loss",
    "held_out": "held-out loss",
    "symmetry": "symmetry",
    "directionality": "directionality",
    "normalised_entropy": "entropy",
    "largest": "largest weight",
    "step": "steps",
    "tokens": "tokens",
    "seconds": "seconds",
    PUBLISHED: "published rule",
}
MEANINGS = (
    ("training loss", "nats", "Of the last tracked step, as recorded."),
    ("held-out loss", "nats", "On the fixed held-out split at the last tracked step, as recorded."),
    (
        "symmetry",
        "−1 to 1",
        "tr(W W) / ‖W‖² of a layer's query–key form, summed over heads; the median over layers.",
    ),
    ("directionality", "−1 to 1", "Negative: columns (the key side) dominate; the median over layers."),
    (
        "entropy",
        "0 to 1",
        "Of the attention, over the log of the number of open keys: 1 is uniform. Mean over heads, median over layers.",
    ),
    ("largest weight", "0 to 1", "Of a row of the attention, mean over rows and heads, median over layers."),
    (
        "steps, tokens, seconds",
        "0 and up",
        "When the smoothed held-out loss first is at or below a loss, between tracked steps by a straight line.",
    ),
    (
        "times faster",
        "above 0",
        "Baseline over arm, both at their own first reach, so that the baseline has 1. Geometric mean over seeds.",
    ),
    (
        "published rule",
        "to 100 %",
        "1 − i/n: i the first of n logged training losses below the baseline's last one, as in the released notebook "
        "of arXiv 2502.10927. Where none is, that notebook prints 100 %; here it is never. It does not count from the "
        "baseline's own first reach, so that noise alone gives a baseline a gain on itself.",
    ),
    (
        "difference",
        "",
        "Arm minus baseline of the same seed, then the mean over seeds. The interval is a percentile bootstrap "
        "over seeds; of fewer than six seeds, which cannot hold 95 %, it is the range of the differences, and "
        "says how much that holds at most. With few seeds the bootstrap promises too much: of normal differences "
        "it holds the true mean 86 % of the time for six seeds, 91 % for ten. So the star, a difference from "
        "zero at 5 %, is Fisher's randomization test: of all choices of signs of the differences, few enough have "
        "a mean as far from zero.",
    ),
)  # fmt: skip


def moment(at: Any, settings: Mapping[str, Any]) -> str:
    """ "at the end", "at held-out loss 5.2", "when the baseline's final held-out loss is first reached"."""
    if at == "at_loss":
        loss: Any = settings.get("at_loss")
        return f"at held-out loss {number(float(loss)) if is_number(loss) else '–'}"
    return {
        "end": "at the end",
        "to_baseline": "when the baseline's final held-out loss is first reached",
    }.get(str(at), str(at))


def value(measure: str, found: Any, never: Any = 0) -> str:
    """A value of one side; "never" where it never came to be."""
    if not is_number(found):
        return "never" if is_number(never) and never > 0 else "–"
    if measure == PUBLISHED:
        return f"{100 * found:.0f} %"
    return _amount(found) if measure in CLOCKS else f"{found:.3f}"


def difference(measure: str, found: Any) -> str:
    """A difference with its sign."""
    if not is_number(found):
        return "–"
    if measure == PUBLISHED:
        return f"{100 * found:+.0f} %"
    if measure in CLOCKS:
        return ("+" if found >= 0 else "-") + _amount(abs(found))
    return f"{found:+.3f}" if abs(found) >= 0.001 or found == 0 else f"{found:+.0e}"


def _amount(found: float) -> str:
    """1.23 M, 12.3 k, 576, 4.56."""
    for size, name in ((1e9, " G"), (1e6, " M"), (1e4, " k")):
        if found >= size:
            return f"{found / (1e3 if size == 1e4 else size):.3g}{name}"
    return f"{found:,.0f}" if found >= 100 else f"{found:.3g}"


def interval(row: Row) -> str:
    """ "-0.131 to -0.116 *", the star where the difference is one from zero at 5 %, by its `p`."""
    low, high = row["low"], row["high"]
    if not (is_number(low) and is_number(high)):
        return ""
    beyond = " *" if is_number(row["p"]) and row["p"] <= LEVEL else "  "
    return f"{difference(row['measure'], low)} to {difference(row['measure'], high)}{beyond}"


def faster(row: Row, *, ends: bool = True) -> str:
    """ "1.97 x (1.90 to 2.05)"."""
    if not is_number(row["speed_up"]):
        return ""
    low, high = row["speed_up_low"], row["speed_up_high"]
    told = f" ({_times(low)} to {_times(high)})" if ends and is_number(low) and is_number(high) else ""
    return f"{_times(row['speed_up'])} x{told}"


def _times(found: float) -> str:
    return f"{found:.2f}" if 0.1 <= found < 10 else f"{found:.2g}"


def never(row: Row) -> str:
    """ "2 of 3 never", of the arm."""
    count = row["arm_never"]
    return f"{count} never" if is_number(count) and count > 0 else ""


def remarks(rows: Iterable[Row], at: str) -> list[str]:
    """Why values of means are missing, each reason once, with the measures that it is about in front unless all are."""
    found: dict[str, list[str]] = {}
    means = [row for row in rows if row["at"] == at and row["seed"] is None]
    for row in means:
        for reason in str(row["reason"] or "").split("; "):
            if reason:
                found.setdefault(reason, []).append(NAMES.get(row["measure"], str(row["measure"])))
    return [
        reason if len(names) == len(means) else f"{', '.join(names)}: {reason}"
        for reason, names in found.items()
    ]


def interval_name(rows: Iterable[Row]) -> str:
    """What the intervals of these means are, "range of 3 differences, at most 75 %"; of several kinds all of them."""
    kinds = dict.fromkeys(str(row["interval"]) for row in rows if row["seed"] is None and row["interval"])
    return "; ".join(kinds) or "interval"
