"""How arms of an experiment differ, paired by seed, as plain rows with a versioned schema: the record alone."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from qkform.records import Row, Table, checked_rows, plain_row

SCHEMA = "qkform.compare/1"

# What is compared. Of several layers, the median over them; of several heads, what the record has for the layer.
MEASURES = ("loss", "held_out", "symmetry", "directionality", "normalised_entropy", "largest")
CLOCKS = ("step", "tokens", "seconds")  # how far training was when something was first reached
PUBLISHED = "published_speed_up"
# When a value was taken: at the last step; when the smoothed held-out loss first reaches a given one; or the final one
# of the baseline of the same seed.
MOMENTS = ("end", "at_loss", "to_baseline")

# Every column of a pair's row, in order, with its Python type. `None` is allowed everywhere: "not defined here".
PAIR_COLUMNS: dict[str, type] = {
    "at": str,  # one of MOMENTS
    "measure": str,  # one of MEASURES or CLOCKS, or PUBLISHED
    "seed": int,  # null in the row of the mean over seeds
    "n": int,  # pairs with both values, which a mean is over; null in the row of a seed
    "arm_value": float,
    "baseline_value": float,
    "difference": float,  # arm - baseline, of one seed or the mean over pairs
    "low": float,  # of the mean difference; null in the row of a seed
    "high": float,
    "interval": str,  # what low and high are: a bootstrap interval, or the range of so few differences
    "p": float,  # of the difference, by flipping signs: how often chance alone gives a mean at least as far from zero
    "speed_up": float,  # CLOCKS alone: baseline / arm, above 1 where the arm is faster; the geometric mean over pairs
    "speed_up_low": float,
    "speed_up_high": float,
    "arm_never": int,  # how many pairs in which the arm never gets there: of one seed 0 or 1
    "baseline_never": int,
    "arm_broke": int,  # how many pairs in which the arm's loss became no number, and so has no value here
    "baseline_broke": int,
    "reason": str,  # why a value in this row is null; null where none is
}
_LATER = ("interval", "p", "arm_broke", "baseline_broke")  # what the first records of this schema had not
_OF_PAIR: dict[str, type] = {"arm": str, "baseline": str}


@dataclass(frozen=True)
class CompareTable(Table):
    """Arms of an experiment, and how each differs from the baseline, seed by seed and on average.

    An arm is {"name", "baseline", "differs", "seeds", "runs", "broke", "mean", "sd"}; a pair is {"arm", "baseline",
    "seeds", "only_arm", "only_baseline", "refused", "rows"}, its rows have `PAIR_COLUMNS`. `settings` says how the
    numbers were made, `notes` what was left out and why. Saved by `save` (.json, .csv, .parquet), read back by `load`
    (.json).
    """

    schema: ClassVar[str] = SCHEMA

    settings: Mapping[str, Any]
    arms: Sequence[Mapping[str, Any]] = ()
    pairs: Sequence[Mapping[str, Any]] = ()
    notes: Sequence[str] = ()
    # Curves of every run, for pictures: {"arm", "seed", "step", ...}. They follow from the records and are not saved.
    curves: Sequence[Row] = field(default=(), repr=False, compare=False)

    def __len__(self) -> int:
        return sum(len(pair["rows"]) for pair in self.pairs)

    @property
    def rows(self) -> list[Row]:
        """The rows of every pair, with the names of the arm and of the baseline in front."""
        return [
            {name: pair[name] for name in _OF_PAIR} | {name: row[name] for name in PAIR_COLUMNS}
            for pair in self.pairs
            for row in pair["rows"]
        ]

    @property
    def means(self) -> list[Row]:
        """The rows of means over seeds."""
        return [row for row in self.rows if row["seed"] is None]

    def to_dict(self) -> dict[str, Any]:
        """The document that JSON holds: {"schema", "settings", "arms", "pairs", "notes"}; undefined values are None."""
        return {
            "schema": SCHEMA,
            "settings": dict(self.settings),
            "arms": [dict(arm) for arm in self.arms],
            "pairs": [
                {**pair, "rows": [plain_row(row, PAIR_COLUMNS) for row in pair["rows"]]}
                for pair in self.pairs
            ],
            "notes": list(self.notes),
        }

    @classmethod
    def columns(cls) -> dict[str, type]:
        """arm and baseline, then `PAIR_COLUMNS`."""
        return {**_OF_PAIR, **PAIR_COLUMNS}

    @classmethod
    def _from_document(cls, document: Mapping[str, Any]) -> CompareTable:
        found = {name: document[name] for name in ("settings", "arms", "pairs", "notes")}
        for name, kind in (("settings", dict), ("arms", list), ("pairs", list), ("notes", list)):
            if not isinstance(found[name], kind):
                raise TypeError(f"{name} is no {kind.__name__}")
        for arm in found["arms"]:
            for name in ("name", "baseline", "differs", "seeds", "runs", "mean", "sd"):
                arm[name]
        for pair in found["pairs"]:
            for name in (*_OF_PAIR, "seeds", "only_arm", "only_baseline", "refused"):
                pair[name]
            checked_rows(pair["rows"], PAIR_COLUMNS, _LATER)
        return cls(**found)

    def _repr_html_(self) -> str:
        """A small table of the mean differences, for notebooks."""
        names = ("arm", "at", "measure", "n", "difference", "low", "high", "speed_up", "arm_never")
        head = "".join(f"<th>{html.escape(name)}</th>" for name in names)
        body = "".join(
            "<tr>" + "".join(f"<td>{html.escape(_cell(row[name]))}</td>" for name in names) + "</tr>"
            for row in self.means
        )
        return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def _cell(value: Any) -> str:
    if value is None:
        return "–"
    return f"{value:.4g}" if isinstance(value, float) else str(value)
