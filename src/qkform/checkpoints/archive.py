"""The directory of a zip archive, in bounded memory: what .npz files and PyTorch's files are made of."""

from __future__ import annotations

import os
import struct
import zipfile
from itertools import pairwise
from pathlib import Path

from qkform.checkpoints.base import ByteReader, opening
from qkform.errors import CheckpointError

MAX_DIRECTORY_BYTES = 32 * 2**20  # about 200,000 members
_LOCAL_HEADER = struct.Struct("<4s22xHH")


def members(path: Path, reader: ByteReader) -> dict[str, zipfile.ZipInfo]:
    """Every member by name, each inside the file; CheckpointError where the directory is not sound."""
    with opening(path) as file:
        size = os.fstat(file.fileno()).st_size
        tail = min(size, 65_557 + 76)
        file.seek(size - tail)
        end = b"".join(iter(lambda: file.read(2**16), b""))
    announced = _directory_bytes(end)
    if announced > MAX_DIRECTORY_BYTES:
        raise CheckpointError(
            f"{path} has a zip directory of {announced:,} bytes; at most {MAX_DIRECTORY_BYTES:,} are read"
        )
    try:
        with zipfile.ZipFile(path) as archive:
            infos = archive.infolist()
    except (zipfile.BadZipFile, NotImplementedError, ValueError, EOFError, struct.error, OSError) as error:
        raise CheckpointError(f"{path} is not a sound zip archive: {error} (truncated?)") from None
    reader.bytes_read += announced
    found: dict[str, zipfile.ZipInfo] = {}
    for info in infos:
        if info.filename in found:
            raise CheckpointError(f"{path} holds the member {info.filename[:120]!r} twice")
        if info.header_offset < 0 or info.header_offset + info.compress_size > size:
            raise CheckpointError(
                f"{path} ends at byte {size:,}, and its member {info.filename[:120]!r} runs past it: truncated"
            )
        found[info.filename] = info
    _refuse_overlap(path, infos)
    return found


def _refuse_overlap(path: Path, infos: list[zipfile.ZipInfo]) -> None:
    """Members that share bytes: a small file that unpacks to any size, and two names for one thing."""
    placed = sorted(infos, key=lambda info: info.header_offset)
    for before, after in pairwise(placed):
        if before.header_offset + _LOCAL_HEADER.size + before.compress_size > after.header_offset:
            raise CheckpointError(
                f"{path} is not a sound zip archive: its members {before.filename[:120]!r} and "
                f"{after.filename[:120]!r} overlap"
            )


def _directory_bytes(end: bytes) -> int:
    """The size of the directory that the end of an archive announces; 0 where nothing is announced."""
    at = end.rfind(b"PK\5\6")
    if at < 0 or at + 22 > len(end):
        return 0
    if end[at - 20 : at - 16] == b"PK\6\7" and end[at - 76 : at - 72] == b"PK\6\6":
        return int(struct.unpack_from("<Q", end, at - 76 + 40)[0])
    return int(struct.unpack_from("<I", end, at + 12)[0])


def data_offset(path: Path, info: zipfile.ZipInfo, reader: ByteReader) -> int:
    """Where the bytes of a member begin: behind its own header, whose length the directory does not tell."""
    raw = reader.read(path, info.header_offset, _LOCAL_HEADER.size).tobytes()
    magic, name, extra = _LOCAL_HEADER.unpack(raw)
    if magic != b"PK\3\4":
        raise CheckpointError(f"{path}: the member {info.filename[:120]!r} has no header at its place")
    return info.header_offset + _LOCAL_HEADER.size + int(name) + int(extra)
