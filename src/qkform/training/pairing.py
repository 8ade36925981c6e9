"""Pairs of runs of one seed, and the mean of their differences: how sure it is, by n differences alone."""

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
ALL_SIGNS = 14  # differences up to which every choice of signs is tried, and not RESAMPLES of them
BOOTSTRAP_SEED = 0
# Moments that the baseline's run decides: arms that are alike do not differ by 0 there.
ONE_SIDED = ("to_baseline",)


@dataclass(frozen=True)
class Value:
    """A value of one run, or why there is none; `never` where the run does not get to where it is taken."""

    value: float | None
    reason: str | None = None
    never: bool = False
    broke: bool = False  # it, or the run that says where, ended with a loss that is no number


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
        "arm_broke": int(arm.broke),
        "baseline_broke": int(baseline.broke),
        "reason": "; ".join(dict.fromkeys(r for r in (arm.reason, baseline.reason) if r)) or None,
    }
    if arm.value is not None and baseline.value is not None:
        row["difference"] = arm.value - baseline.value
        if measure in CLOCKS and arm.value > 0 and baseline.value > 0:
            row["speed_up"] = baseline.value / arm.value
    return row


def mean_row(rows: Sequence[Row]) -> Row:
    """The mean over the rows of seeds of one measure, with its interval; what never happened is counted, not averaged.

    Where a run broke, or never gets there, there is no mean: that of the others would flatter it. Where one has no
    value for another reason, the mean is over fewer, and `reason` says so.
    """
    first = rows[0]
    both = [row for row in rows if row["difference"] is not None]
    never, broke = (
        {side: sum(row[f"{side}_{what}"] for row in rows) for side in ("arm", "baseline")}
        for what in ("never", "broke")
    )
    out: Row = dict.fromkeys(PAIR_COLUMNS)
    out |= {"at": first["at"], "measure": first["measure"], "n": len(both)}
    out |= {f"{side}_never": never[side] for side in never} | {f"{side}_broke": broke[side] for side in broke}
    reasons = [f"the {side} broke in {broke[side]} of {_seeds(len(rows))}" for side in broke if broke[side]]
    reasons += _never_words(never, len(rows), first["measure"])
    if any(broke.values()) or any(never.values()):
        if both:
            reasons.append("no mean, since that of the others would flatter it")
        for side in ("arm", "baseline"):  # the side that always gets there has one
            found = [row[f"{side}_value"] for row in rows]
            out[f"{side}_value"] = None if None in found else fmean(found)
    elif both:
        for name in ("arm_value", "baseline_value", "difference"):
            out[name] = fmean(row[name] for row in both)
        differences = [row["difference"] for row in both]
        out["low"], out["high"] = _both(interval(differences))
        out["interval"] = interval_kind(len(both))
        out["p"] = None if first["at"] in ONE_SIDED else sign_flip_p(differences)
        ratios = [math.log(row["speed_up"]) for row in both if row["speed_up"] is not None]
        if len(ratios) < len(both) and first["measure"] in CLOCKS:
            reasons.append("no ratio: a loss that is reached at the start of a run takes no time")
        elif ratios:
            out["speed_up"] = math.exp(fmean(ratios))
            ends = interval(ratios)
            out["speed_up_low"], out["speed_up_high"] = _both(ends and (math.exp(ends[0]), math.exp(ends[1])))
        for reason in dict.fromkeys(row["reason"] for row in rows if row not in both and not _never(row)):
            lacking = sum(row["reason"] == reason for row in rows if row not in both)
            reasons.append(f"{lacking} of {_seeds(len(rows))} left out: {reason}")
        if len(both) < LEAST_SEEDS:
            reasons.append(f"no interval: {_seeds(len(both))}, and {LEAST_SEEDS} are the least")
    else:
        reasons += dict.fromkeys(row["reason"] for row in rows if row["reason"] and not _never(row))
    out["reason"] = "; ".join(dict.fromkeys(reasons)) or None
    return out


def interval(differences: Sequence[float]) -> tuple[float, float] | None:
    """An interval of the mean over seeds, `interval_kind`; None for fewer than `LEAST_SEEDS`.

    A percentile bootstrap interval (`INTERVAL`) lies between the least and the greatest of the n differences, which
    hold the true mean with a probability of 1 - 2^(1-n) where differences are symmetric about it. Where that is less
    than INTERVAL, n < 6, it is this range itself. From six on the bootstrap holds the mean less often than its nominal
    share: docs/comparing.md has how often.
    """
    if len(differences) < LEAST_SEEDS:
        return None
    if most_held(len(differences)) < INTERVAL:
        return min(differences), max(differences)
    values = np.asarray(differences, dtype=np.float64)
    drawn = np.random.default_rng(BOOTSTRAP_SEED).integers(0, len(values), (RESAMPLES, len(values)))
    tail = 50 * (1 - INTERVAL)
    low, high = np.percentile(values[drawn].mean(axis=1), [tail, 100 - tail])
    return float(low), float(high)


def most_held(n: int) -> float:
    """The probability, at most, with which the range of n differences holds what they are symmetric about."""
    return 1 - 2.0 ** (1 - n)


def interval_kind(n: int) -> str | None:
    """What `interval` of n differences is, in words; None where there is none."""
    if n < LEAST_SEEDS:
        return None
    if (most := most_held(n)) < INTERVAL:
        return f"range of {n} differences, at most {100 * most:.3g} %"
    return f"bootstrap interval, nominally {100 * INTERVAL:.0f} %"


def sign_flip_p(differences: Sequence[float]) -> float | None:
    """The two-sided p of Fisher's randomization test of pairs; None for none.

    If arm and baseline are alike, a difference has either sign with equal probability: of all 2^n choices of signs, the
    share whose mean is at least as far from zero. So p is at least 2^(1-n), and no fewer than six seeds come below
    .05. For more than `ALL_SIGNS` differences, `RESAMPLES` choices and the one that was observed.
    """
    if not differences:
        return None
    values, n = np.asarray(differences, dtype=np.float64), len(differences)
    if n <= ALL_SIGNS:
        signs = 1 - 2 * (np.arange(2**n)[:, None] >> np.arange(n) & 1)
    else:
        signs = np.random.default_rng(BOOTSTRAP_SEED).choice([-1, 1], (RESAMPLES + 1, n))
        signs[0] = 1
    observed = abs(values.sum())
    slack = 1e-12 * np.abs(values).sum()  # sums that are the same but for their last bits
    return float((np.abs(signs @ values) >= observed - slack).mean())


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


def _never(row: Row) -> bool:
    return bool(row["arm_never"] or row["baseline_never"])


def _seeds(count: int) -> str:
    return f"{count} seed{'s' if count != 1 else ''}"


def _both(ends: tuple[float, float] | None) -> tuple[Any, Any]:
    return ends or (None, None)
