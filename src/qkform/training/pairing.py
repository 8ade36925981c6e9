"""Pairs of runs of one seed, and the mean of their differences with a bootstrap interval over seeds."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import numpy as np

from qkform.comparisons import CLOCKS, PAIR_COLUMNS, PUBLISHED
from qkform.records import Row

LEAST_SEEDS = 3  # fewer have no interval
INTERVAL = 0.95
RESAMPLES = 10_000
BOOTSTRAP_SEED = 0


@dataclass(frozen=True)
class Value:
    """A value of one run, or why there is none; `never` where the run does not get to where it would be taken."""

    value: float | None
    reason: str | None = None
    never: bool = False


def seed_row(at: str, measure: str, seed: int | None, arm: Value, baseline: Value) -> Row:
    """The row of one pair."""
    row: Row = dict.fromkeys(PAIR_COLUMNS)
    row |= {
        "at": at,
        "measure": measure,
        "seed": seed,
        "arm_value": arm.value,
        "baseline_value": baseline.value,
        "arm_never": int(arm.never),
        "baseline_never": int(baseline.never),
        "reason": "; ".join(dict.fromkeys(r for r in (arm.reason, baseline.reason) if r)) or None,
    }
    if arm.value is not None and baseline.value is not None:
        row["difference"] = arm.value - baseline.value
        if measure in CLOCKS and arm.value > 0 and baseline.value > 0:
            row["speed_up"] = baseline.value / arm.value
    return row


def mean_row(rows: Sequence[Row]) -> Row:
    """The mean over the rows of seeds of one measure, with its interval; what never happened is counted, not averaged.

    Of times there is no mean where a run never gets there: the mean of the others would flatter it.
    """
    first = rows[0]
    both = [row for row in rows if row["difference"] is not None]
    never = {side: sum(row[f"{side}_never"] for row in rows) for side in ("arm", "baseline")}
    out: Row = dict.fromkeys(PAIR_COLUMNS)
    out |= {"at": first["at"], "measure": first["measure"], "n": len(both)}
    out |= {f"{side}_never": count for side, count in never.items()}
    reasons = _never_words(never, len(rows), first["measure"])
    if first["measure"] in (*CLOCKS, PUBLISHED) and any(never.values()):
        if both:
            reasons.append("no mean, since that of the others would flatter it")
        for side in ("arm", "baseline"):  # the side that always gets there has one
            found = [row[f"{side}_value"] for row in rows]
            out[f"{side}_value"] = None if None in found else fmean(found)
    elif both:
        for name in ("arm_value", "baseline_value", "difference"):
            out[name] = fmean(row[name] for row in both)
        out["low"], out["high"] = _both(interval([row["difference"] for row in both]))
        ratios = [math.log(row["speed_up"]) for row in both if row["speed_up"] is not None]
        if len(ratios) < len(both) and first["measure"] in CLOCKS:
            reasons.append("no ratio: a loss that is reached at the start of a run takes no time")
        elif ratios:
            out["speed_up"] = math.exp(fmean(ratios))
            ends = interval(ratios)
            out["speed_up_low"], out["speed_up_high"] = _both(ends and (math.exp(ends[0]), math.exp(ends[1])))
        if len(both) < LEAST_SEEDS:
            reasons.append(f"no interval: {_seeds(len(both))}, and {LEAST_SEEDS} are the least")
    else:
        reasons += dict.fromkeys(row["reason"] for row in rows if row["reason"] and not row["arm_never"])
    out["reason"] = "; ".join(dict.fromkeys(reasons)) or None
    return out


def interval(differences: Sequence[float]) -> tuple[float, float] | None:
    """Percentile bootstrap interval (`INTERVAL`) of the mean over seeds; None for fewer than `LEAST_SEEDS`.

    It lies between the least and the greatest of the n differences, and so holds the true mean with a probability of
    at most 1 - 2^(1-n) where differences are symmetric about it. docs/comparing.md has how often it does.
    """
    if len(differences) < LEAST_SEEDS:
        return None
    values = np.asarray(differences, dtype=np.float64)
    drawn = np.random.default_rng(BOOTSTRAP_SEED).integers(0, len(values), (RESAMPLES, len(values)))
    tail = 50 * (1 - INTERVAL)
    low, high = np.percentile(values[drawn].mean(axis=1), [tail, 100 - tail])
    return float(low), float(high)


def spread(values: Sequence[float]) -> dict[str, float | None]:
    """Mean and standard deviation (ddof 1) over seeds; the latter None for one seed."""
    if not values:
        return {"mean": None, "sd": None}
    sd = float(np.std(values, ddof=1)) if len(values) > 1 else None
    return {"mean": fmean(values), "sd": sd}


def _never_words(never: Mapping[str, int], of: int, measure: str) -> list[str]:
    last = {"arm": "the baseline's last loss", "baseline": "its own last loss"}
    found = []
    for side, count in never.items():
        if count:
            what = f"is never below {last[side]}" if measure == PUBLISHED else "never gets there"
            found.append(f"the {side} {what} in {count} of {_seeds(of)}")
    if found and measure == PUBLISHED:
        found.append("for never, the published notebook prints 100 %")
    return found


def _seeds(count: int) -> str:
    return f"{count} seed{'s' if count != 1 else ''}"


def _both(ends: tuple[float, float] | None) -> tuple[Any, Any]:
    return ends or (None, None)
