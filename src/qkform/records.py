"""What a scan found, as plain rows with a versioned schema: saved, loaded, and turned into frames on request."""

from __future__ import annotations

import csv
import html
import io
import json
import math
import os
import stat
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any, ClassVar, Self

from qkform.errors import MissingExtra, RecordError
from qkform.plain import plain_table, short

SCHEMA = "qkform.scan/1"
Row = dict[str, Any]

# Every column of a row, in order, with its Python type. `None` is allowed everywhere: "not defined here".
COLUMNS: dict[str, type] = {
    "component": str,  # path up to the layer list, as in the checkpoint: "encoder.layer"
    "module": str,  # full path of the attention module: "encoder.layer.3.attention.self"
    "layer": int,  # position in the layer list, from 0
    "shared_by": list,  # numbers of all layers that share these weights; null where nothing is shared
    "head": int,  # query head, from 0; null in the row of the whole layer (the sum over heads)
    "kv_head": int,  # the key head it reads; null in the row of the whole layer
    "attention": str,  # "self" or "cross"
    "part": str,  # "nope", "rope", ...: one term of a score that has several; null: the whole score
    "mask": str,  # "causal", "bidirectional" or "unknown": from family and config, never from a score
    "d_model": int,
    "d_head": int,
    "symmetry": float,  # [-1, 1]
    "symmetry_z": float,  # standard deviations from random weights
    "directionality": float,  # [-1, 1]; negative: columns (key side) dominate
    "row_excess": float,  # >= 0
    "column_excess": float,  # >= 0
    "norm": float,  # >= 0, Frobenius
    "effective_rank": float,  # >= 1
    "bias_share": float,  # [0, 1]
    "positive_directions": int,
    "negative_directions": int,
    "positive_energy": float,  # [0, 1]
    "self_norm": float,  # >= 0, of v in a token's own score x diag(v) x^T; null where that score is W's
    "self_sign": float,  # [-1, 1], sum of v over sum of |v|
    "self_share": float,  # [0, 1], |v|^2 / (|v|^2 + norm^2)
    "flags": list,  # words, listed in docs/getting-started.md: "no_outliers", "qk_norm", "by_names", ...
    "reason": str,  # why a score in this row is null; null where none is
}
# What tells the models of a table apart: columns of its flat rows, in front of the others.
_OF_MODEL: dict[str, type] = {
    "source": str,
    "model_type": str,
    "revision": str,
    "step": int,
    "offset": int,
    "form": str,  # "raw", or what was changed in it: "fold_norm bias"
}
_LATER = (
    "part",
    "self_norm",
    "self_sign",
    "self_share",
)  # columns that records of earlier versions do not have


def whole_layers(rows: Iterable[Row]) -> list[Row]:
    return [row for row in rows if row["head"] is None]


def single_heads(rows: Iterable[Row]) -> list[Row]:
    return [row for row in rows if row["head"] is not None]


@dataclass(frozen=True)
class ModelScores:
    """One scanned model: where it came from, what was assumed, and its rows (`COLUMNS`).

    `bytes_read` and `wall_seconds` of several models from one source (distances, an adapter) add up to those of the
    source: the first has all seconds, the others 0.
    """

    source: str
    format: str
    model_type: str | None
    bytes_read: int
    wall_seconds: float
    conventions: Mapping[str, Any]
    skipped: Sequence[Mapping[str, str]] = ()  # {"module", "reason"}: attention that was seen and not scored
    rows: Sequence[Row] = ()
    revision: str | None = None  # the commit that a hub id was read at
    step: int | None = None  # training step of a checkpoint in a trajectory
    offset: int | None = (
        None  # relative distance i - j that the rotary form was taken at; null: not asked for
    )
    form: str = "raw"  # what is scored: "raw", or the options that changed it: "fold_norm bias qk_norm"

    @property
    def layers(self) -> list[Row]:
        """The rows of whole layers (the sum over heads)."""
        return whole_layers(self.rows)

    @property
    def heads(self) -> list[Row]:
        """The rows of single heads."""
        return single_heads(self.rows)

    def to_dict(self) -> dict[str, Any]:
        return {
            "source": self.source,
            "format": self.format,
            "model_type": self.model_type,
            "revision": self.revision,
            "step": self.step,
            "offset": self.offset,
            "form": self.form,
            "bytes_read": self.bytes_read,
            "wall_seconds": self.wall_seconds,
            "conventions": dict(self.conventions),
            "skipped": [dict(s) for s in self.skipped],
            "rows": [plain_row(row, COLUMNS) for row in self.rows],
        }


@dataclass(frozen=True)
class SourceFault:
    """A source that could not be scanned, with the message a person needs."""

    source: str
    message: str

    def to_dict(self) -> dict[str, str]:
        return {"source": self.source, "message": self.message}


class Table:
    """What every record of rows can do: be saved by `save`, read back by `load`, become text or a frame.

    A subclass has `schema`, `to_dict`, `rows`, `columns` (name -> Python type, in order) and `_from_document`.
    """

    schema: ClassVar[str]
    shown: ClassVar[Sequence[str]] = ()  # the columns of `print`, and of a notebook
    rows: Any  # a field of one record, computed by another

    @property
    def layers(self) -> list[Row]:
        """The rows of whole layers."""
        return whole_layers(self.rows)

    @property
    def heads(self) -> list[Row]:
        """The rows of single heads."""
        return single_heads(self.rows)

    def to_dict(self) -> dict[str, Any]:
        raise NotImplementedError

    @classmethod
    def columns(cls) -> dict[str, type]:
        """The columns of the flat rows that go into CSV and frames, with their Python types."""
        raise NotImplementedError

    @classmethod
    def _from_document(cls, document: Mapping[str, Any]) -> Self:
        """The table of a document of this schema; KeyError or TypeError where it is not complete."""
        raise NotImplementedError

    def __str__(self) -> str:
        """The rows of whole layers as plain text, under a line that says of what; heads are in `rows`."""
        rows = self.layers if self.shown else ()
        return f"{self!r}\n{plain_table(rows, self.shown)}" if rows else repr(self)

    def _flat(self) -> list[Row]:
        """Rows with a value, or None, for every one of `columns`."""
        return list(self.rows)

    def to_json(self, *, indent: int | None = None) -> str:
        return json.dumps(self.to_dict(), indent=indent, allow_nan=False)

    def to_csv(self) -> str:
        """Flat rows with a header line; null is empty, a list is joined by spaces."""
        out = io.StringIO()
        writer = csv.writer(out, lineterminator="\n")
        writer.writerow(self.columns())
        for row in self._flat():
            writer.writerow([_csv_cell(row[name]) for name in self.columns()])
        return out.getvalue()

    def to_polars(self) -> Any:
        """A polars DataFrame of `rows`, typed also where a column is all null. Needs the extra `frames`."""
        pl = extra("polars")
        types = {str: pl.String, int: pl.Int64, float: pl.Float64}
        schema = {name: types.get(kind, pl.List(pl.String)) for name, kind in self.columns().items()}
        if "shared_by" in schema:
            schema["shared_by"] = pl.List(pl.Int64)
        rows = [{k: _finite(v) for k, v in row.items()} for row in self._flat()]
        return pl.DataFrame(rows, schema=schema)

    def to_pandas(self) -> Any:
        """A pandas DataFrame of `rows`; whole numbers keep their type beside nulls. Needs the extra `frames`."""
        pd = extra("pandas")
        types = {str: "string", int: "Int64", float: "float64"}
        frame = pd.DataFrame(self._flat(), columns=list(self.columns()))
        return frame.astype({n: types[kind] for n, kind in self.columns().items() if kind in types})

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write the table to `path` (.json, .csv or .parquet), whole or not at all; returns the path.

        Raises RecordError for another suffix or a place that cannot be written, MissingExtra for parquet
        without the extra `frames`.
        """
        target = Path(path)
        writer = self._writer(target)
        write_whole(target, writer)
        return target

    def _writer(self, target: Path) -> Callable[[Path], Any]:
        match target.suffix.lower():
            case ".json":
                return lambda to: to.write_text(self.to_json(indent=1) + "\n", encoding="utf-8")
            case ".csv":
                text = self.to_csv()
                return lambda to: to.write_text(text, encoding="utf-8", errors="backslashreplace", newline="")
            case ".parquet":
                frame = self.to_polars()
                return lambda to: frame.write_parquet(to)
        raise RecordError(f"cannot save to {target}: the name must end in .json, .csv or .parquet")

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Self:
        """Read a table that `save` wrote as .json. Raises RecordError for anything else."""
        try:
            document = json.loads(Path(path).read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError) as error:
            raise RecordError(
                f"cannot read a table from {path}: {error}; what `save` wrote as .json can be read"
            ) from None
        found = document.get("schema") if isinstance(document, dict) else None
        if found != cls.schema:
            raise RecordError(f"{path} has schema {found!r}; this version reads {cls.schema!r}")
        try:
            return cls._from_document(document)
        except (KeyError, TypeError) as error:
            raise RecordError(f"{path} says it is {cls.schema!r} but is not complete: {error}") from None


def checked_rows(rows: Iterable[Row], columns: Mapping[str, type], later: Iterable[str] = ()) -> None:
    """Every row has exactly these columns, those of `later` added as null; KeyError or TypeError otherwise."""
    for row in rows:
        for name in later:
            row.setdefault(name, None)
        if set(row) != set(columns):
            raise KeyError(f"a row has the columns {sorted(row)[:5]}...")


def plain_row(row: Mapping[str, Any], columns: Iterable[str]) -> Row:
    """The columns of a row as JSON can hold them: None for what is absent or not finite."""
    return {name: _finite(row.get(name)) for name in columns}


@dataclass(frozen=True)
class ScoreTable(Table):
    """Scores of one or more models. `models` keeps them apart, `rows` lists every row of all of them.

    Saved by `save` (.json, .csv, .parquet), read back by `load` (.json), shown in a notebook as it is.
    """

    schema: ClassVar[str] = SCHEMA
    shown: ClassVar[Sequence[str]] = (
        "component",
        "layer",
        "attention",
        "part",
        "mask",
        "symmetry",
        "symmetry_z",
        "directionality",
        "norm",
    )

    models: Sequence[ModelScores] = ()
    errors: Sequence[SourceFault] = field(default=())

    @property
    def rows(self) -> list[Row]:
        """Every row, as a dict of plain values: what tells its model from others, then the columns of `COLUMNS`."""
        return [
            {**{n: getattr(model, n) for n in _OF_MODEL}, **{n: row.get(n) for n in COLUMNS}}
            for model in self.models
            for row in model.rows
        ]

    def __len__(self) -> int:
        return sum(len(model.rows) for model in self.models)

    def __repr__(self) -> str:
        models = ", ".join(f"{_told(m)} ({len(m.layers)} layers, {len(m.heads)} heads)" for m in self.models)
        failed = f"; {len(self.errors)} sources failed" if self.errors else ""
        return f"ScoreTable({models or 'empty'}{failed})"

    def to_dict(self) -> dict[str, Any]:
        """The document that `--format json` prints: {"schema", "models", "errors"}; undefined scores are None."""
        return {
            "schema": SCHEMA,
            "models": [model.to_dict() for model in self.models],
            "errors": [error.to_dict() for error in self.errors],
        }

    @classmethod
    def columns(cls) -> dict[str, type]:
        """source, model_type, revision, step, offset and form, so that models can be told apart, then `COLUMNS`."""
        return {**_OF_MODEL, **COLUMNS}

    @classmethod
    def _from_document(cls, document: Mapping[str, Any]) -> ScoreTable:
        models = [ModelScores(**model) for model in document["models"]]
        checked_rows((row for model in models for row in model.rows), COLUMNS, _LATER)
        return cls(models, [SourceFault(**error) for error in document["errors"]])

    def __str__(self) -> str:
        """A table of layers per model, under a line that says of what; heads are in `rows`."""
        blocks = [f"{_title(model)}\n{plain_table(model.layers, self.shown)}" for model in self.models]
        blocks += [f"{error.source}: {error.message}" for error in self.errors]
        return "\n\n".join(blocks) or repr(self)

    def _repr_html_(self) -> str:
        """A small table of layers per model, for notebooks."""
        blocks = []
        for model in self.models:
            blocks.append(notebook_table(_title(model), model.layers, self.shown))
        for error in self.errors:
            blocks.append(f"<p>{html.escape(error.source)}: {html.escape(error.message)}</p>")
        return "".join(blocks) or "<p>empty ScoreTable</p>"


def _title(model: ModelScores) -> str:
    return f"{_told(model)}: {len(model.layers)} layers, {len(model.heads)} heads"


def _told(model: ModelScores) -> str:
    """The source, with the revision and the distance where there are any."""
    at = f" at {model.revision[:12]}" if isinstance(model.revision, str) else ""
    return f"{model.source}{at}" + ("" if model.offset is None else f" at distance {model.offset}")


def notebook_table(title: str, rows: Sequence[Row], columns: Iterable[str]) -> str:
    """Rows as an HTML table with a title, without the columns in which no row has a value."""
    shown = [n for n in columns if any(row[n] is not None for row in rows)]
    head = "".join(f"<th>{html.escape(n)}</th>" for n in shown)
    body = "".join(
        "<tr>" + "".join(f"<td>{html.escape(short(row[n]))}</td>" for n in shown) + "</tr>" for row in rows
    )
    return (
        f"<p><b>{html.escape(title)}</b></p>"
        f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
    )


def merged(tables: Iterable[ScoreTable]) -> ScoreTable:
    """Several tables as one, models and errors in order."""
    tables = list(tables)
    return ScoreTable([m for t in tables for m in t.models], [e for t in tables for e in t.errors])


def values(rows: Iterable[Row], column: str) -> list[float]:
    """The defined values of one column."""
    return [row[column] for row in rows if row.get(column) is not None and not _is_nan(row[column])]


def median_of(rows: Iterable[Row], column: str) -> float | None:
    """Median of the defined values of a column; None where there is none."""
    found = values(rows, column)
    return median(found) if found else None


def null_band(row: Row, deviations: float = 2.0) -> tuple[float, float] | None:
    """Where the symmetry of random weights of this row's size and spectrum lies: mean -+ `deviations` std.

    None for rows without a symmetry. docs/math.md#symmetry_z.
    """
    symmetry, z, d = row["symmetry"], row["symmetry_z"], row["d_model"]
    if symmetry is None or z is None or _is_nan(symmetry) or _is_nan(z):
        return None
    mean = 1.0 / d
    std = (symmetry - mean) / z if abs(z) > 1e-9 else math.sqrt(2.0) / d
    return mean - deviations * std, mean + deviations * std


def write_whole(target: Path, write: Callable[[Path], Any]) -> None:
    """Let `write` fill a file beside `target`, then rename it: a kill leaves the old file or the new one.

    A target that is no regular file (a pipe, /dev/stdout) is written straight.
    """
    try:
        if target.is_dir():
            raise RecordError(f"cannot write {target}: it is a folder")
        if target.exists() and not target.is_file():
            write(target)
            return
        target = target.resolve()  # beside the file itself, not beside a link to it
        mode = stat.S_IMODE(target.stat().st_mode) if target.exists() else 0o666 & ~_umask()
        handle, name = tempfile.mkstemp(
            prefix=f".{target.name[:50]}.", suffix=target.suffix, dir=target.parent
        )
        os.close(handle)
        temporary = Path(name)
        try:
            write(temporary)
            temporary.chmod(mode)
            os.replace(temporary, target)
        finally:
            with suppress(FileNotFoundError):
                temporary.unlink()
    except (OSError, RuntimeError) as error:
        raise RecordError(f"cannot write {target}: {getattr(error, 'strerror', None) or error}") from None


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def _is_nan(value: Any) -> bool:
    return isinstance(value, float) and math.isnan(value)


def _finite(value: Any) -> Any:
    """What JSON and frames can hold: no NaN for "not defined" but None, no halves of surrogate pairs."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, str) and not value.isascii():
        return value.encode("utf-8", "backslashreplace").decode()
    return value


def _csv_cell(value: Any) -> Any:
    value = _finite(value)
    if isinstance(value, list):
        return " ".join(str(v) for v in value)
    return "" if value is None else value


def extra(package: str) -> Any:
    """A package of the extra `frames`, or a MissingExtra that names the command."""
    import importlib

    try:
        return importlib.import_module(package)
    except ImportError:
        raise MissingExtra(
            f'{package} is not installed; it comes with: pip install "qkform[frames]"'
        ) from None
