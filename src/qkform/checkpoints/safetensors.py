"""safetensors: one file, or shards with an index, read by positioned reads.

The `safetensors` package validates each header (truncated, overlapping, holed, negative, unknown dtype); the bytes
of a tensor are then read at 8 + header + offset.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any

from numpy.typing import NDArray

from qkform.checkpoints.base import (
    CODES,
    FLOATS,
    ByteReader,
    Local,
    TensorInfo,
    as_codes,
    as_floats,
    opening,
    parse_json,
    read_json,
    refuse_pointer,
    regular_file,
)
from qkform.errors import CheckpointError, ConfigError

MAX_HEADER_BYTES = 100_000_000  # the limit of the format's own library


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
        self._reader = reader
        tensors: dict[str, TensorInfo] = {}
        for file in files:
            for name, info in read_header(file, reader).items():
                if name in tensors and expected is None:
                    raise CheckpointError(f"tensor {name!r} is in both {tensors[name].file} and {file}")
                if expected is None or expected.get(name) == file:
                    tensors[name] = info
        if expected is not None:
            for name, file in expected.items():
                if name not in tensors:
                    raise CheckpointError(
                        f"the index places tensor {name[:200]!r} in {file}, which does not hold it"
                    )
        self.tensors: Mapping[str, TensorInfo] = tensors

    @property
    def bytes_read(self) -> int:
        return self._reader.bytes_read

    def read(self, name: str, rows: int | None = None) -> NDArray[Any]:
        info = self.tensors[name].head(rows)
        if info.dtype not in FLOATS:
            raise CheckpointError(
                f"tensor {name!r} in {info.file} is stored as {info.dtype}; Q and K are read from "
                "F64, F32, F16 and BF16 (quantised codes mean nothing without their scales)"
            )
        return as_floats(self._reader.read(info.file, info.offset, info.nbytes), info)

    def stored(self, name: str, rows: int | None = None) -> NDArray[Any]:
        """The tensor, or its first rows, as it is stored: codes and scales too."""
        info = self.tensors[name].head(rows)
        if info.dtype not in FLOATS and info.dtype not in CODES:
            raise CheckpointError(
                f"tensor {name!r} in {info.file} is stored as {info.dtype}, which is not read"
            )
        return as_codes(self._reader.read(info.file, info.offset, info.nbytes), info)


def read_header(path: Path, reader: ByteReader) -> dict[str, TensorInfo]:
    """Names, types, shapes and places of every tensor in one file; CheckpointError where the file is not sound."""
    from safetensors import SafetensorError, safe_open

    with opening(path) as file:
        head = file.read(64)
        size = path.stat().st_size
        refuse_pointer(path, head)
        if len(head) < 8:
            raise CheckpointError(
                f"{path} has {size} bytes: too short for a safetensors file (empty download?)"
            )
        (length,) = struct.unpack("<Q", head[:8])
        if length > MAX_HEADER_BYTES or length > size - 8:
            raise CheckpointError(
                f"{path} announces a header of {length:,} bytes and has {size:,} in all: "
                "truncated, or not a safetensors file"
            )
    try:
        with safe_open(path, framework="numpy"):
            pass
    except SafetensorError as error:
        raise CheckpointError(f"{path} is not a sound safetensors file: {error}") from None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be opened: {error}") from None
    raw = reader.read(path, 8, length).tobytes()
    try:
        header = parse_json(raw, f"the header of {path}")
    except ConfigError as error:
        raise CheckpointError(str(error)) from None
    start = 8 + length
    tensors = {}
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        try:
            begin, end = entry["data_offsets"]
            info = TensorInfo(tuple(entry["shape"]), entry["dtype"], path, start + begin, end - begin)
        except (KeyError, TypeError, ValueError):
            raise CheckpointError(f"{path} changed while it was being read") from None
        tensors[name] = info
    return tensors


def read_index(path: Path, reader: ByteReader) -> dict[str, Path]:
    """Where each tensor is, from an index.json; every shard it names must be in the same folder."""
    index = read_json(path, reader)
    weight_map = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{path} has no weight_map: it does not say which file holds which tensor")
    places = {}
    for name, shard in weight_map.items():
        if not isinstance(shard, str) or not _plain_name(shard):
            raise CheckpointError(
                f"{path} places tensor {name[:200]!r} in {repr(shard)[:200]}: a shard is "
                "a plain file name in the same folder"
            )
        places[name] = path.parent / shard
    for shard_path in sorted(set(places.values())):
        try:
            exists = shard_path.exists()
        except OSError:  # a name too long for the file system
            exists = False
        if not exists:
            raise CheckpointError(
                f"{path} names {shard_path.name[:200]}, which is not in {path.parent}: the download is incomplete"
            )
        regular_file(shard_path)
    return places


def _plain_name(name: str) -> bool:
    return (
        name not in ("", ".", "..")
        and "\0" not in name
        and PurePosixPath(name).name == name
        and PureWindowsPath(name).name == name
    )
