"""Text files, JSON lines and parquet as documents: one file, one line, one row each.

A plain text is read by stretches of whole lines, so that its size does not matter. What is no text (a byte that is
not UTF-8, NUL) names its file and line, or that line is left out and counted.
"""

from __future__ import annotations

import bz2
import gzip
import io
import json
import lzma
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, cast

from qkform.errors import DataError
from qkform.training.data.documents import Faults, Piece
from qkform.training.data.extras import imported

KINDS = {
    ".txt": "text",
    ".text": "text",
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "jsonl",
    ".parquet": "parquet",
}
COMPRESSED = (".gz", ".bz2", ".xz")
STRETCH = 2**20  # bytes of a text file in one piece, about
_BROKEN = (EOFError, gzip.BadGzipFile, zlib.error, lzma.LZMAError)


def kind_of(path: Path) -> str | None:
    """text, jsonl or parquet by the name, compression aside; None for a name that says nothing."""
    suffixes = [suffix.lower() for suffix in path.suffixes]
    if suffixes and suffixes[-1] in COMPRESSED:
        suffixes.pop()
    return KINDS.get(suffixes[-1]) if suffixes else None


def read_pieces(path: Path, field: str, faults: Faults) -> Iterator[Piece]:
    """The documents of one file; a file whose name says nothing is read as a text."""
    kind = kind_of(path) or "text"
    try:
        if kind == "parquet":
            yield from _parquet(path, field, faults)
        elif kind == "jsonl":
            yield from _json_lines(path, field, faults)
        else:
            yield from _text(path, faults)
    except OSError as error:
        if isinstance(error, gzip.BadGzipFile) or error.errno is None:
            faults(str(path), "a damaged file", str(error))
            return
        raise DataError(f"{path}: cannot be read: {error.strerror or error}") from None


def _opened(path: Path) -> IO[bytes]:
    match path.suffix.lower():
        case ".gz":
            return cast("IO[bytes]", gzip.open(path, "rb"))
        case ".bz2":
            return bz2.open(path, "rb")
        case ".xz":
            return lzma.open(path, "rb")
        case _:
            return path.open("rb")


def _stretches(path: Path, faults: Faults) -> Iterator[tuple[int, list[bytes]]]:
    """(number of the first line, whole lines of about STRETCH bytes), a damaged compression reported."""
    number = 1
    with _opened(path) as raw, io.BufferedReader(raw, 2**18) as file:  # type: ignore[type-var]
        while True:
            try:
                lines = file.readlines(STRETCH)
            except _BROKEN as error:
                faults(f"{path}:{number}", "a damaged file", f"its compression breaks off: {error}")
                return
            if not lines:
                return
            if number == 1:
                lines[0] = lines[0].removeprefix(b"\xef\xbb\xbf")
            yield number, lines
            number += len(lines)


def _decoded(where: str, line: bytes, faults: Faults) -> str | None:
    try:
        text = line.decode("utf-8")
    except UnicodeDecodeError as error:
        faults(where, "not UTF-8", f"byte 0x{line[error.start]:02x} at column {error.start + 1}")
        return None
    if "\0" in text:
        faults(where, "a NUL byte, which no text has", "UTF-16, or not a text at all")
        return None
    return text


def _text(path: Path, faults: Faults) -> Iterator[Piece]:
    """One document, in pieces of whole lines."""
    begins = True
    for first, lines in _stretches(path, faults):
        try:
            text = b"".join(lines).decode("utf-8")
        except UnicodeDecodeError:
            text = "\0"
        if "\0" in text:
            read = (_decoded(f"{path}:{first + i}", line, faults) for i, line in enumerate(lines))
            text = "".join(line for line in read if line is not None)
        text = text.replace("\r\n", "\n")
        if begins and not text.strip():
            continue
        if text:
            yield Piece(text, f"{path}:{first}", begins)
            begins = False
    if begins:
        faults(f"{path}:1", "no text in the file")


def _json_lines(path: Path, field: str, faults: Faults) -> Iterator[Piece]:
    """A document a line, in `field` of its object; blank lines are none."""
    found = False
    for first, lines in _stretches(path, faults):
        for i, line in enumerate(lines):
            if not line.strip():
                continue
            found = True
            where = f"{path}:{first + i}"
            text = _decoded(where, line, faults)
            if text is None:
                continue
            try:
                value = json.loads(text.rstrip("\r\n"))
            except (ValueError, RecursionError) as error:
                at = (
                    f"{error.msg} at column {error.colno}"
                    if isinstance(error, json.JSONDecodeError)
                    else str(error)
                )
                faults(where, "not JSON", at, "one JSON object a line is wanted")
                continue
            yield from checked_text(value, field, where, faults)
    if not found:
        faults(f"{path}:1", "no text in the file")


def checked_text(value: Any, field: str, where: str, faults: Faults) -> Iterator[Piece]:
    """The text of a row, if it is one."""
    if not isinstance(value, dict):
        faults(where, "not an object", f"{type(value).__name__} found", "one JSON object a line is wanted")
    elif field not in value:
        known = ", ".join(map(str, value))[:200] or "nothing"
        faults(where, f"no field {field!r}", f"it has {known}", "name the field of the text with field=")
    elif not isinstance(value[field], str):
        faults(where, f"field {field!r} is no text", f"{type(value[field]).__name__} found")
    elif not value[field].strip():
        faults(where, "an empty text")
    elif any("\ud800" <= c <= "\udfff" for c in value[field]) if not value[field].isascii() else False:
        faults(where, "half of a surrogate pair, which is no text")
    else:
        yield Piece(value[field], where)


def _parquet(path: Path, field: str, faults: Faults) -> Iterator[Piece]:
    """A document a row, in column `field`; row numbers count from 1."""
    pa = imported("pyarrow", f"{path}: parquet")
    parquet = imported("pyarrow.parquet", f"{path}: parquet")
    try:
        with parquet.ParquetFile(path) as file:
            names = file.schema_arrow.names
            if field not in names:
                known = ", ".join(names)[:200] or "nothing"
                faults(
                    str(path),
                    f"no column {field!r}",
                    f"it has {known}",
                    "name the column of the text with field=",
                )
                return
            if file.metadata.num_rows == 0:
                faults(str(path), "no text in the file")
            row = 0
            for batch in file.iter_batches(batch_size=1024, columns=[field]):
                for value in batch.column(0).to_pylist():
                    row += 1
                    yield from checked_text({field: value}, field, f"{path}, row {row}", faults)
    except (pa.ArrowInvalid, pa.ArrowException, UnicodeDecodeError) as error:
        faults(str(path), "a damaged file", " ".join(str(error).split())[:300])
