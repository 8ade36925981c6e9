"""safetensors: one file, or shards with an index, read by positioned reads, from a disk or from the hub.

Each header is checked here at least as strictly as the `safetensors` package checks it (truncated, overlapping,
holed, negative, unknown dtype): that package maps the file into memory, and a file that shrinks while it is mapped
kills the process. The bytes of a tensor are at 8 + header + offset.
Source: https://github.com/huggingface/safetensors#format
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Mapping
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any, NoReturn, Protocol

import numpy as np
from numpy.typing import NDArray

from qkform.checkpoints.base import (
    CODES,
    FLOATS,
    ByteReader,
    Local,
    TensorInfo,
    as_codes,
    as_floats,
    check_floats,
    opening,
    read_json,
    refuse_pointer,
    regular_file,
)
from qkform.errors import CheckpointError

MAX_HEADER_BYTES = 100_000_000  # the limit of the format's own library
MAX_SHARDS = 10_000  # the largest models have a few hundred

BITS = {
    **dict.fromkeys(("F64", "I64", "U64", "C64"), 64),
    **dict.fromkeys(("F32", "I32", "U32"), 32),
    **dict.fromkeys(("F16", "BF16", "I16", "U16"), 16),
    **dict.fromkeys(("BOOL", "I8", "U8", "F8_E4M3", "F8_E5M2", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"), 8),
    **dict.fromkeys(("F6_E2M3", "F6_E3M2"), 6),
    "F4": 4,
}
_FIELDS = {"dtype", "shape", "data_offsets"}


class Incomplete(CheckpointError):
    """A shard that an index names is not there."""


class Reader(Protocol):
    """Where the bytes come from: a disk, or the hub."""

    @property
    def bytes_read(self) -> int: ...

    def read(self, path: Path, offset: int, nbytes: int) -> NDArray[np.uint8]: ...


class SafetensorsCheckpoint(Local):
    """Tensors of one or several .safetensors files, by name."""

    format = "safetensors"

    def __init__(
        self,
        source: str,
        files: list[Path],
        reader: ByteReader,
        config: Mapping[str, Any] | None,
        config_path: Path | None,
        expected: Mapping[str, Path] | None = None,
    ) -> None:
        self.source, self.config, self.config_path = source, config, config_path
        self._reader: Reader = reader
        headers = {file: read_header(file, reader) for file in files}
        self.tensors: Mapping[str, TensorInfo] = united(headers, expected)

    @property
    def bytes_read(self) -> int:
        return self._reader.bytes_read

    def read(self, name: str, rows: int | None = None) -> NDArray[Any]:
        info = self.tensors[name].head(rows)
        check_floats(name, info)
        return as_floats(self._reader.read(info.file, info.offset, info.nbytes), info)

    def stored(self, name: str, rows: int | None = None) -> NDArray[Any]:
        """The tensor, or its first rows, as it is stored: codes and scales too."""
        info = self.tensors[name].head(rows)
        if info.dtype not in FLOATS and info.dtype not in CODES:
            raise CheckpointError(
                f"tensor {name!r} in {info.file} is stored as {info.dtype}, which is not read"
            )
        return as_codes(self._reader.read(info.file, info.offset, info.nbytes), info)


def united(
    headers: Mapping[Path, Mapping[str, TensorInfo]], expected: Mapping[str, Path] | None
) -> dict[str, TensorInfo]:
    """The tensors of several files; with an index (`expected`), those that it places, each where it says."""
    if expected is not None:
        return {name: placed(name, file, headers[file]) for name, file in expected.items()}
    tensors: dict[str, TensorInfo] = {}
    for file, header in headers.items():
        for name, info in header.items():
            if name in tensors:
                raise CheckpointError(f"tensor {name[:200]!r} is in both {tensors[name].file} and {file}")
            tensors[name] = info
    return tensors


def placed(name: str, file: Path, header: Mapping[str, TensorInfo]) -> TensorInfo:
    """The tensor that an index places in `file`, whose header this is."""
    if name not in header:
        raise CheckpointError(f"the index places tensor {name[:200]!r} in {file}, which does not hold it")
    return header[name]


def read_header(path: Path, reader: ByteReader) -> dict[str, TensorInfo]:
    """Names, types, shapes and places of every tensor in one file; CheckpointError where the file is not sound."""
    with opening(path) as file:
        head = file.read(64)
        size = os.fstat(file.fileno()).st_size
    refuse_pointer(path, head)
    length = header_length(head, size, path)
    return parse_header(reader.read(path, 8, length).tobytes(), size, path)


def header_length(head: bytes, size: int, path: Path) -> int:
    """Bytes of the header, from the first 8 bytes of a file of `size` bytes."""
    if len(head) < 8 or size < 8:
        raise CheckpointError(f"{path} has {size} bytes: too short for a safetensors file (empty download?)")
    (length,) = struct.unpack("<Q", head[:8])
    if length > MAX_HEADER_BYTES or length > size - 8:
        raise CheckpointError(
            f"{path} announces a header of {length:,} bytes and has {size:,} in all: "
            "truncated, or not a safetensors file"
        )
    return int(length)


def parse_header(raw: bytes, size: int, path: Path) -> dict[str, TensorInfo]:
    """The header `raw` of a file of `size` bytes: every tensor where the format allows it, and nothing else.

    Tensors fill the file without gap or overlap from the end of the header to the end of the file.
    """
    try:
        entries = _parse(raw)
        start = 8 + len(raw)
        tensors = {name: _info(name, entry, start, path) for name, entry in entries.items()}
        end = start
        for name, info in sorted(tensors.items(), key=lambda item: (item[1].offset, item[1].nbytes)):
            if info.offset != end:
                what = "overlaps the tensor before it" if info.offset < end else "leaves a hole before it"
                raise _Unsound(f"tensor {name[:200]!r} starts at byte {info.offset - start:,} and {what}")
            end += info.nbytes
        if end != size:
            what = "truncated" if end > size else "it has bytes that belong to no tensor"
            raise _Unsound(f"its tensors run to byte {end:,}, and it has {size:,}: {what}")
    except _Unsound as error:
        raise CheckpointError(f"{path} is not a sound safetensors file: {error}") from None
    return tensors


class _Unsound(Exception):
    """What is wrong with a header; the caller adds the file."""


def _parse(raw: bytes) -> dict[str, Any]:
    """The entries of a header, without its metadata. Stricter than `json`: no NaN, no key twice, UTF-8 alone."""
    if not raw.startswith(b"{"):
        raise _Unsound(f"its header starts with {raw[:8]!r}, not with {{")
    try:
        header = json.loads(
            raw.decode("utf-8"),
            object_pairs_hook=_without_duplicates,
            parse_int=_whole_number,
            parse_float=_no_number,
            parse_constant=_no_number,
        )
    except RecursionError:
        raise _Unsound("its header is nested too deeply") from None
    except ValueError as error:
        raise _Unsound(f"its header is not JSON: {error}") from None
    metadata = header.pop("__metadata__", None)
    if metadata is not None and not (
        isinstance(metadata, dict) and all(isinstance(value, str) for value in metadata.values())
    ):
        raise _Unsound("its __metadata__ is not a table of strings")
    _no_surrogates(metadata or {})
    _no_surrogates(header)
    return dict(header)


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        seen: set[str] = set()
        twice = next(name for name, _ in pairs if name in seen or seen.add(name))  # type: ignore[func-returns-value]
        raise _Unsound(f"its header has {twice[:200]!r} twice")
    return found


def _whole_number(text: str) -> int:
    if text.startswith("-") or len(text) > 20 or int(text) >= 2**64:
        _no_number(text)
    return int(text)


def _no_number(text: str) -> NoReturn:
    raise _Unsound(f"its header has the number {text[:40]}; sizes and places are whole and not negative")


def _no_surrogates(table: Mapping[str, Any]) -> None:
    """Half a surrogate pair (a \\ud800 alone) is no text: it could not be printed or saved."""
    try:
        for key, value in table.items():
            key.encode()
            if isinstance(value, str):
                value.encode()
    except UnicodeEncodeError:
        raise _Unsound("its header has a name that is not Unicode text") from None


def _info(name: str, entry: Any, start: int, path: Path) -> TensorInfo:
    short = name[:200]
    if not isinstance(entry, dict) or entry.keys() != _FIELDS:
        what = sorted(entry) if isinstance(entry, dict) else type(entry).__name__
        raise _Unsound(f"tensor {short!r} is described by {str(what)[:200]}, not by {sorted(_FIELDS)}")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in BITS:
        raise _Unsound(f"tensor {short!r} has dtype {repr(dtype)[:80]}, which the format does not have")
    if not _whole_numbers(shape):
        raise _Unsound(f"tensor {short!r} has shape {repr(shape)[:80]}, which is not a list of whole numbers")
    if not _whole_numbers(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise _Unsound(f"tensor {short!r} has data_offsets {repr(offsets)[:80]}, not [begin, end]")
    bits = BITS[dtype]
    for side in shape:
        bits *= side
        if bits >= 2**64:
            raise _Unsound(f"tensor {short!r} has shape {str(shape)[:80]}: more bytes than a file can have")
    begin, end = offsets
    if bits % 8 or bits // 8 != end - begin:
        raise _Unsound(
            f"tensor {short!r} has shape {str(shape)[:80]} of {dtype}, which is {bits:,} bits, "
            f"and {end - begin:,} bytes are stored"
        )
    return TensorInfo(tuple(shape), dtype, path, start + begin, end - begin)


def _whole_numbers(value: Any) -> bool:
    return isinstance(value, list) and all(type(item) is int for item in value)


def read_index(path: Path, reader: ByteReader) -> dict[str, Path]:
    """Where each tensor is, from an index.json; every shard it names must be in the same folder."""
    places = parse_index(read_json(path, reader), path)
    for shard_path in sorted(set(places.values())):
        try:
            exists = shard_path.exists()
        except OSError:  # a name too long for the file system
            exists = False
        if not exists:
            raise Incomplete(
                f"{path} names {shard_path.name[:200]}, which is not in {path.parent}: the download is incomplete"
            )
        regular_file(shard_path)
    return places


def parse_index(index: Any, path: Path) -> dict[str, Path]:
    """Tensor -> file in the folder of the index at `path`; CheckpointError for a name that leads out of it."""
    weight_map = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{path} has no weight_map: it does not say which file holds which tensor")
    shards: dict[str, Path] = {}
    places = {}
    for name, shard in weight_map.items():
        if not isinstance(shard, str) or (shard not in shards and not plain_name(shard)):
            raise CheckpointError(
                f"{path} places tensor {name[:200]!r} in {repr(shard)[:200]}: a shard is "
                "a plain file name in the same folder"
            )
        if shard not in shards:
            if len(shards) == MAX_SHARDS:
                raise CheckpointError(f"{path} spreads its tensors over more than {MAX_SHARDS:,} files")
            shards[shard] = path.parent / shard
        places[name] = shards[shard]
    return places


def plain_name(name: str) -> bool:
    """Whether `name` is one file in a folder, on any system: no separator, drive, or step upwards."""
    return (
        name not in ("", ".", "..")
        and "\0" not in name
        and PurePosixPath(name).name == name
        and PureWindowsPath(name).name == name
    )
