"""What differs between two checkpoints of one shape, as plain rows with a versioned schema: the record alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, ClassVar

from qkform.records import Row, Table, checked_rows, notebook_table, plain_row

SCHEMA = "qkform.diff/1"

# Every column of a row, in order, with its Python type. `None` is allowed everywhere: "not defined here".
DIFF_COLUMNS: dict[str, type] = {
    "component": str,
    "module": str,
    "layer": int,
    "head": int,  # query head, from 0; null in the row of the whole layer (the sum over heads)
    "attention": str,  # "self" or "cross"
    "part": str,  # one term of a score that has several; null: the whole score
    "d_model": int,
    "d_head": int,
    "symmetry_a": float,  # [-1, 1]
    "symmetry_b": float,  # [-1, 1]
    "symmetry_change": float,  # [-2, 2], b - a
    "null_low": float,  # noise on W_Q and W_K that turns W as far puts symmetry_change here: mean - 2 std
    "null_high": float,  # mean + 2 std
    "symmetry_change_z": float,  # standard deviations from what such noise does on average
    "directionality_a": float,  # [-1, 1]; negative: columns (key side) dominate
    "directionality_b": float,
    "directionality_change": float,  # [-2, 2], b - a
    "relative_change": float,  # >= 0: ||W_b - W_a|| / ||W_a||
    "cosine": float,  # [-1, 1], of W_a and W_b as vectors
    "norm_a": float,  # >= 0, Frobenius
    "norm_b": float,
    "change_symmetry": float,  # [-1, 1], of W_b - W_a
    "change_effective_rank": float,  # >= 1, of W_b - W_a
    "flags": list,  # words
    "reason": str,  # why a value in this row is null; null where none is
}
# What tells one difference from another: columns of the flat rows, in front of the others.
_OF_DIFF: dict[str, type] = {
    "source_a": str,
    "revision_a": str,
    "source_b": str,
    "revision_b": str,
    "model_type": str,
    "offset": int,
}
_LATER = ("revision_a", "revision_b", "offset")  # fields that records of earlier versions do not have


@dataclass(frozen=True)
class DiffTable(Table):
    """How the forms of checkpoint b differ from those of checkpoint a, layer by layer and head by head.

    Saved by `save` (.json, .csv, .parquet), read back by `load` (.json), shown in a notebook as it is.
    """

    schema: ClassVar[str] = SCHEMA
    shown: ClassVar[Sequence[str]] = (
        "component",
        "layer",
        "attention",
        "part",
        "symmetry_a",
        "symmetry_b",
        "symmetry_change",
        "symmetry_change_z",
        "directionality_change",
        "relative_change",
        "cosine",
    )

    source_a: str
    source_b: str
    model_type: str | None
    conventions: Mapping[str, Any]
    rows: Sequence[Row] = ()
    only_in_a: Sequence[str] = ()  # attention modules that b does not have, or has in another shape
    only_in_b: Sequence[str] = ()
    wall_seconds: float = 0.0
    bytes_read: int = 0
    revision_a: str | None = None  # the commit that a hub id was read at
    revision_b: str | None = None
    offset: int | None = None  # relative distance i - j that both rotary forms were taken at

    def __len__(self) -> int:
        return len(self.rows)

    def __repr__(self) -> str:
        size = f"{len(self.layers)} layers, {len(self.heads)} heads"
        return f"DiffTable({self.source_a} -> {self.source_b}: {size})"

    def to_dict(self) -> dict[str, Any]:
        """The document that JSON holds: {"schema", then the fields}; undefined values are None."""
        return {
            "schema": SCHEMA,
            "source_a": self.source_a,
            "source_b": self.source_b,
            "revision_a": self.revision_a,
            "revision_b": self.revision_b,
            "model_type": self.model_type,
            "offset": self.offset,
            "conventions": dict(self.conventions),
            "only_in_a": list(self.only_in_a),
            "only_in_b": list(self.only_in_b),
            "wall_seconds": self.wall_seconds,
            "bytes_read": self.bytes_read,
            "rows": [plain_row(row, DIFF_COLUMNS) for row in self.rows],
        }

    @classmethod
    def columns(cls) -> dict[str, type]:
        """Both sources with their revisions, model_type and offset, then `DIFF_COLUMNS`."""
        return {**_OF_DIFF, **DIFF_COLUMNS}

    def _flat(self) -> list[Row]:
        names = {name: getattr(self, name) for name in _OF_DIFF}
        return [{**names, **{n: row.get(n) for n in DIFF_COLUMNS}} for row in self.rows]

    @classmethod
    def _from_document(cls, document: Mapping[str, Any]) -> DiffTable:
        document = {**dict.fromkeys(_LATER), **document}
        found = {one.name: document[one.name] for one in fields(cls)}
        checked_rows(found["rows"], DIFF_COLUMNS)
        return cls(**found)

    def _repr_html_(self) -> str:
        """A small table of layers, for notebooks."""
        title = f"{self.source_a} → {self.source_b}: {len(self.layers)} layers, {len(self.heads)} heads"
        return notebook_table(
            title, [{**dict.fromkeys(self.shown), **row} for row in self.layers], self.shown
        )
