"""What every checkpoint format offers: named tensors with shapes, read one at a time, and a config."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO, Protocol

import numpy as np
from numpy.typing import NDArray

from qkform.errors import CheckpointError, ConfigError, SourceError

MAX_JSON_BYTES = 64 * 2**20  # no config or index comes near; a hostile one must not fill memory


@dataclass(frozen=True)
class TensorInfo:
    """One stored tensor: `shape` as numpy gives it (rows first), `dtype` in the format's own word."""

    shape: tuple[int, ...]
    dtype: str
    file: Path
    offset: int  # bytes from the start of the file
    nbytes: int  # as stored

    def head(self, rows: int | None) -> TensorInfo:
        """The first `rows` rows alone; all of it for None."""
        if rows is None or not self.shape or rows >= self.shape[0]:
            return self
        return replace(self, shape=(rows, *self.shape[1:]), nbytes=self.nbytes // self.shape[0] * rows)


FLOATS = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": "bfloat16"}  # both formats use these words


CODES = {  # what quantised weights and their scales are stored as, in safetensors' words
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "F8_E8M0": "float8_e8m0fnu",
    "I8": "<i1",
    "U8": "<u1",
    "I16": "<i2",
    "I32": "<i4",
    "I64": "<i8",
}


def check_floats(name: str, info: TensorInfo, known: str = "F64, F32, F16 and BF16") -> None:
    """CheckpointError for a tensor that is not stored as plain numbers; `known` are those that its format has."""
    if info.dtype not in FLOATS:
        raise CheckpointError(
            f"tensor {name!r} in {info.file} is stored as {info.dtype}; Q and K are read from {known} (quantised codes "
            "mean nothing without their scales)"
        )


def as_floats(raw: NDArray[np.uint8], info: TensorInfo) -> NDArray[Any]:
    """Bytes as the array of a plain floating type that they store; `info.dtype` is one of `FLOATS`."""
    return _viewed(raw, info, FLOATS[info.dtype])


def as_codes(raw: NDArray[np.uint8], info: TensorInfo) -> NDArray[Any]:
    """Bytes as the array that they store; `info.dtype` is one of `FLOATS` or `CODES`."""
    return _viewed(raw, info, FLOATS.get(info.dtype) or CODES[info.dtype])


def _viewed(raw: NDArray[np.uint8], info: TensorInfo, word: str) -> NDArray[Any]:
    if word[0] == "<":
        dtype = np.dtype(word)
    else:
        import ml_dtypes

        dtype = np.dtype(getattr(ml_dtypes, word))
    array: NDArray[Any] = raw.view(dtype).reshape(info.shape)
    return array


Array = NDArray[Any]
Need = tuple[str, int | None]  # (tensor, how many of its first rows; None: all)


class Local:
    """What every checkpoint of local files has in common."""

    revision: str | None = None

    def plan(self, needs: Sequence[Need]) -> None:
        """Nothing: local files are read when they are asked for."""


class Checkpoint(Protocol):
    """An opened checkpoint. Nothing but headers is read until `read` asks for a tensor."""

    source: str
    format: str
    tensors: Mapping[str, TensorInfo]
    config: Mapping[str, Any] | None
    config_path: Path | None

    @property
    def bytes_read(self) -> int:
        """Bytes taken from the files so far, headers and configs included."""

    @property
    def revision(self) -> str | None:
        """The commit that a hub id is read at; None for files."""

    def plan(self, needs: Sequence[Need]) -> None:
        """What will be read, in order: a remote checkpoint fetches ahead, a local one has nothing to do."""

    def read(self, name: str, rows: int | None = None) -> NDArray[Any]:
        """The tensor, or its first `rows` rows, as numpy of a floating type (bfloat16 as ml_dtypes')."""


class Coded(Protocol):
    """A checkpoint that also hands out codes and scales as they are stored."""

    def stored(self, name: str, rows: int | None = None) -> NDArray[Any]:
        """The tensor, or its first `rows` rows, in its own type: whole numbers and 8-bit floats included."""


class ByteReader:
    """Positioned reads from regular files, counted. A memory map would keep every touched page resident."""

    def __init__(self) -> None:
        self.bytes_read = 0

    def read(self, path: Path, offset: int, nbytes: int) -> NDArray[np.uint8]:
        """`nbytes` bytes of `path` from `offset`, or a CheckpointError that says how many are missing."""
        with opening(path) as file:
            size = os.fstat(file.fileno()).st_size
            if offset + nbytes > size:
                raise CheckpointError(
                    f"{path} ends at byte {size}, and a tensor runs to byte {offset + nbytes}: truncated"
                )
            out = np.empty(nbytes, dtype=np.uint8)
            view = memoryview(out)  # type: ignore[arg-type]
            file.seek(offset)
            filled = 0
            while filled < nbytes:
                got = file.readinto(view[filled : filled + 2**26])  # type: ignore[attr-defined]
                if not got:
                    raise CheckpointError(f"{path} ended at byte {offset + filled} while it was being read")
                filled += got
        self.bytes_read += nbytes
        return out


@contextmanager
def opening(path: Path) -> Iterator[BinaryIO]:
    """An unbuffered regular file; anything else (a folder, a pipe, a device) is refused before it is opened."""
    regular_file(path)
    try:
        with path.open("rb", buffering=0) as file:
            yield file
    except OSError as error:
        raise SourceError(f"cannot read {path}: {error.strerror or error}") from None


def regular_file(path: Path) -> Path:
    try:
        if path.is_file():
            return path
        exists = path.exists()
    except (OSError, ValueError) as error:  # a name too long, or with a null byte
        raise SourceError(
            f"cannot read {str(path)[:200]!r}: {getattr(error, 'strerror', None) or error}"
        ) from None
    if not exists:
        broken = " (a link to a file that is gone)" if path.is_symlink() else ""
        raise SourceError(f"no such file: {path}{broken}")
    raise SourceError(f"{path} is not a regular file")


def read_json(path: Path, reader: ByteReader) -> Any:
    """A JSON file of bounded size and nesting; ConfigError says what is wrong with it, and where."""
    with opening(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size > MAX_JSON_BYTES:
            raise ConfigError(
                f"{path} is {size:,} bytes; a config or index above {MAX_JSON_BYTES:,} is not read"
            )
        data = b"".join(iter(lambda: file.read(2**20), b""))
    reader.bytes_read += len(data)
    refuse_pointer(path, data[:64])
    return parse_json(data, str(path))


def parse_json(data: bytes, where: str) -> Any:
    try:
        return json.loads(data)
    except RecursionError:
        raise ConfigError(f"{where} is nested too deeply to be a config") from None
    except (ValueError, UnicodeDecodeError) as error:
        raise ConfigError(f"{where} is not JSON: {error}") from None


def refuse_pointer(path: Path, head: bytes) -> None:
    """A Git LFS pointer stands in for a file that was never fetched."""
    if head.startswith(b"version https://git-lfs"):
        raise CheckpointError(
            f"{path} is a Git LFS pointer, not the file itself; fetch it with `git lfs pull` "
            "or download the repository again"
        )


def read_config(path: Path, reader: ByteReader) -> Mapping[str, Any]:
    config = read_json(path, reader)
    if not isinstance(config, dict):
        raise ConfigError(f"{path} holds a JSON {type(config).__name__}; a model config is an object")
    return config
