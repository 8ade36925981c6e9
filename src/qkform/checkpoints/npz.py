"""numpy's .npz: arrays by name in a zip archive, their headers parsed here; no pickle is ever loaded.

What is stored is read by position, what is packed is unpacked in a stream, up to the rows that are asked for.
Source: https://numpy.org/doc/stable/reference/generated/numpy.lib.format.html
"""

from __future__ import annotations

import math
import re
import zipfile
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qkform.checkpoints.archive import data_offset, members
from qkform.checkpoints.base import (
    CODES,
    FLOATS,
    ByteReader,
    Local,
    TensorInfo,
    as_codes,
    check_floats,
    opening,
)
from qkform.errors import CheckpointError

MAX_HEADER_BYTES = 2**16  # what numpy writes is below 200 bytes
MAX_DIMS = 32
MAX_HEADERS_BYTES = 64 * 2**20  # of all arrays together
MAX_PACKED_BYTES = 2**26  # an array above this that packs more than MAX_RATIO times is a bomb
MAX_RATIO = 20  # random weights pack to nine tenths, 16-bit ones stored as 32 to a half
_CHUNK = 2**20
_HEADER = re.compile(  # what numpy and everyone after it writes, records (a list for the type) included
    r"\{'descr': (?:'(?P<descr>[<>|=]?[a-zA-Z][0-9]{0,9})(?:\[[a-zA-Z0-9]{1,9}\])?'|\[[^\n]*\]), "
    r"'fortran_order': (?P<order>True|False), 'shape': \((?P<shape>[0-9L, ]*)\),? ?\} *\n?"
)
_WORDS = {word: name for name, word in {**FLOATS, **CODES}.items() if word[0] == "<"}


class NpzCheckpoint(Local):
    """The arrays of one .npz file, by name (without the .npy that the archive adds)."""

    format = "npz"

    def __init__(
        self,
        source: str,
        path: Path,
        reader: ByteReader,
        config: Mapping[str, Any] | None,
        config_path: Path | None,
    ) -> None:
        self.source, self.config, self.config_path = source, config, config_path
        self._path, self._reader = path, reader
        with opening(path) as file:
            if file.read(6) == b"\x93NUMPY":
                raise CheckpointError(
                    f"{path} is one array (.npy), and a model has several by name: numpy.savez"
                )
        self._members: dict[str, zipfile.ZipInfo] = {}
        self._arrays: dict[str, _Array] = {}
        tensors: dict[str, TensorInfo] = {}
        spent = 0
        for member, info in members(path, reader).items():
            if not member.endswith(".npy"):
                continue
            name = member.removesuffix(".npy")
            array = _header(path, info, reader)
            spent += array.start
            if spent > MAX_HEADERS_BYTES:
                raise CheckpointError(f"{path}: the headers of its arrays exceed {MAX_HEADERS_BYTES:,} bytes")
            self._members[name], self._arrays[name] = info, array
            tensors[name] = TensorInfo(array.shape, array.word, path, info.header_offset, array.nbytes)
        self._refuse_bomb()
        if not tensors:
            raise CheckpointError(f"{path} is a zip archive that holds no arrays (members that end in .npy)")
        self.tensors: Mapping[str, TensorInfo] = tensors

    def _refuse_bomb(self) -> None:
        """Refuse a file that packs beyond what weights do, all of it together: many small arrays make a bomb too."""
        packed = [name for name, info in self._members.items() if info.compress_type != zipfile.ZIP_STORED]
        stored = sum(self._members[name].compress_size for name in packed)
        whole = sum(self._arrays[name].nbytes for name in packed)
        if whole > MAX_RATIO * stored + MAX_PACKED_BYTES:
            largest = max(packed, key=lambda name: self._arrays[name].nbytes)
            raise CheckpointError(
                f"{self._path} unpacks {stored:,} bytes to {whole:,}, above {MAX_RATIO} times and "
                f"{MAX_PACKED_BYTES:,} more (the largest array is {largest[:200]!r}): no weights pack so well; "
                "numpy.savez saves what must be read unpacked"
            )

    @property
    def bytes_read(self) -> int:
        """Bytes taken from the file: of packed arrays, what is packed."""
        return self._reader.bytes_read

    def read(self, name: str, rows: int | None = None) -> NDArray[Any]:
        check_floats(name, self.tensors[name], "F64, F32 and F16")
        return self.stored(name, rows)

    def stored(self, name: str, rows: int | None = None) -> NDArray[Any]:
        """The array, or its first rows, in its own type."""
        info, array = self.tensors[name], self._arrays[name]
        if info.dtype not in FLOATS and info.dtype not in CODES:
            raise CheckpointError(
                f"tensor {name!r} in {self._path} is {info.dtype}, which holds no plain numbers"
            )
        head = info if array.fortran else info.head(rows)  # columns first: rows are scattered over all of it
        member = self._members[name]
        if head.nbytes > MAX_PACKED_BYTES and info.nbytes > MAX_RATIO * member.compress_size:
            raise CheckpointError(
                f"tensor {name!r} in {self._path} unpacks {member.compress_size:,} bytes to {info.nbytes:,}: "
                "no weights pack so well"
            )
        if member.compress_type == zipfile.ZIP_STORED:
            start = data_offset(self._path, member, self._reader) + array.start
            raw = self._reader.read(self._path, start, head.nbytes)
        else:
            raw = np.frombuffer(
                _unpacked(self._path, member, array.start, head.nbytes, self._reader), np.uint8
            )
        if array.swapped:
            size = array.nbytes // max(math.prod(array.shape), 1)
            raw = np.ascontiguousarray(raw.reshape(-1, size)[:, ::-1]).reshape(-1)
        if not array.fortran:
            return as_codes(raw, head)
        turned = TensorInfo(info.shape[::-1], info.dtype, info.file, info.offset, info.nbytes)
        return np.ascontiguousarray(as_codes(raw, turned).T[:rows])


class _Array:
    """What the header of one .npy member says."""

    def __init__(self, shape: tuple[int, ...], word: str, nbytes: int, start: int) -> None:
        self.shape, self.word, self.nbytes, self.start = shape, word, nbytes, start
        self.fortran = self.swapped = False


def _header(path: Path, info: zipfile.ZipInfo, reader: ByteReader) -> _Array:
    """Parse the header of a member; the data behind it is not touched."""
    where = f"{path}: array {info.filename[:120]!r}"
    if info.flag_bits & 1:
        raise CheckpointError(f"{where} is encrypted")
    if info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        raise CheckpointError(
            f"{where} is packed by method {info.compress_type}; numpy writes stored or deflated"
        )
    start = _start(path, info, 12, reader)
    if start[:6] != b"\x93NUMPY" or len(start) < 12:
        raise CheckpointError(f"{where} is not in numpy's format: it starts with {start[:8]!r}")
    if start[6] == 1:
        prefix, length = 10, int.from_bytes(start[8:10], "little")
    elif start[6] in (2, 3):
        prefix, length = 12, int.from_bytes(start[8:12], "little")
    else:
        raise CheckpointError(f"{where} is of version {start[6]} of numpy's format; 1 to 3 are read")
    if length > MAX_HEADER_BYTES:
        raise CheckpointError(
            f"{where} has a header of {length:,} bytes; at most {MAX_HEADER_BYTES:,} are read"
        )
    raw = _start(path, info, prefix + length, reader)
    if len(raw) < prefix + length:
        raise CheckpointError(f"{where} ends inside its header: truncated")
    return _parsed(raw[prefix:], prefix + length, info, where)


def _parsed(text: bytes, start: int, info: zipfile.ZipInfo, where: str) -> _Array:
    found = _HEADER.fullmatch(text.decode("latin1"))
    if found is None:
        raise CheckpointError(f"{where} has no header that numpy would write: {text[:80]!r}")
    sides = [side.strip().removesuffix("L") for side in found["shape"].split(",")]
    sides = sides[:-1] if sides[-1] == "" else sides
    if len(sides) > MAX_DIMS or not all(side.isdigit() and len(side) < 19 for side in sides):
        raise CheckpointError(f"{where} has the shape ({found['shape'][:80]})")
    shape = tuple(int(side) for side in sides)
    kind = found["descr"]
    if kind is None:
        return _Array(shape, "of records", 0, start)
    try:
        dtype = np.dtype(kind)
    except (TypeError, ValueError):
        raise CheckpointError(f"{where} has the type {kind!r}, which numpy does not know") from None
    if dtype.hasobject:  # a pickle lies behind it, and stays there
        return _Array(shape, "of Python objects", 0, start)
    nbytes = math.prod(shape) * dtype.itemsize
    if start + nbytes != info.file_size:
        raise CheckpointError(
            f"{where} of shape {str(shape)[:80]} and type {kind} takes {nbytes:,} bytes, and the archive "
            f"holds {max(info.file_size - start, 0):,}: truncated or damaged"
        )
    little = dtype.newbyteorder("<").str
    word = _WORDS.get(little.replace("|", "<"), f"of type {dtype.str}")
    array = _Array(shape, word, nbytes, start)
    array.fortran = found["order"] == "True" and len(shape) > 1
    array.swapped = dtype.str[0] == ">"
    return array


def _start(path: Path, info: zipfile.ZipInfo, nbytes: int, reader: ByteReader) -> bytes:
    """The first bytes of a member: fewer where it is shorter."""
    nbytes = min(nbytes, info.file_size)
    if info.compress_type == zipfile.ZIP_STORED:
        return reader.read(path, data_offset(path, info, reader), nbytes).tobytes()
    return _unpacked(path, info, 0, nbytes, reader)


def _unpacked(path: Path, info: zipfile.ZipInfo, skip: int, nbytes: int, reader: ByteReader) -> bytes:
    """`nbytes` bytes of a packed member behind the first `skip`; never more than that is kept.

    Memory is filled as the stream yields, so that a size which only the directory claims costs nothing.
    """
    at, end = data_offset(path, info, reader), 0
    end = at + info.compress_size
    stream = zlib.decompressobj(-15)
    out, wanted = bytearray(), skip + nbytes
    done = 0
    pending = b""
    while done < wanted:
        if not pending:
            if at >= end:
                break
            pending = reader.read(
                path, at, min(_CHUNK, end - at, 2**12 if wanted < 2**12 else _CHUNK)
            ).tobytes()
            at += len(pending)
        try:
            part = stream.decompress(pending, min(_CHUNK, wanted - done))
        except zlib.error as error:
            raise CheckpointError(
                f"{path}: array {info.filename[:120]!r} cannot be unpacked: {error}"
            ) from None
        pending = stream.unconsumed_tail
        if not part and (stream.eof or not pending) and at >= end:
            break
        if stream.eof and done + len(part) < wanted:
            done += len(part)
            break
        if done + len(part) > skip:
            out += part[max(skip - done, 0) :]
        done += len(part)
    if done < wanted:
        raise CheckpointError(
            f"{path}: array {info.filename[:120]!r} unpacks to {done:,} bytes of {wanted:,}: truncated or damaged"
        )
    return bytes(out)
