"""GGUF: the header walked here with bounds checks, tensors dequantised by the `gguf` package block by block.

The package's own reader makes an array of every vocabulary word and maps the file into memory; here long
arrays are stepped over. Layout: magic, version, counts, key/values, tensor table, padding, data.
Source: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import math
import os
import re
import struct
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from qkform.checkpoints.base import FLOATS, ByteReader, Local, TensorInfo, as_floats, opening, refuse_pointer
from qkform.errors import CheckpointError, SourceError

MAX_HEADER_BYTES = 100_000_000  # the same bound as safetensors; a vocabulary of 256k words needs about 15 MB
MAX_TENSORS = 100_000  # large mixtures of experts have thousands
MAX_KEYS = 10_000  # models have fewer than a hundred
MAX_NAME_BYTES = 1_024  # of a key or a tensor; real ones stay under 128
MAX_ARRAY = 1_024  # items; a longer array is a vocabulary, not a setting
MAX_PARTS = 1_024  # of a split model; the largest there are have about a hundred
MAX_DIMS = 4  # ggml has no more
MAX_ALIGNMENT = 2**20
BLOCK_ELEMENTS = 2**18  # decoded at a time: 1 MiB as float32, and a few times that inside the package

_STRING, _ARRAY = 8, 9
_LETTERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_SCALARS = {code: struct.Struct("<" + letter) for code, letter in _LETTERS.items()}
_U32, _U64 = _SCALARS[4], _SCALARS[10]
_SKIPPED = object()
_PART = re.compile(r"(?P<stem>.*)-[0-9]{5}-of-(?P<count>[0-9]{5})\.gguf", re.DOTALL)
_Contents = tuple[Mapping[str, Any], Mapping[str, TensorInfo]]


class GGUFCheckpoint(Local):
    """The tensors of one GGUF model, in one file or in the parts that llama-gguf-split makes of it.

    `path` is any of the parts; `config` is the metadata, which the first part holds, without long arrays and lists
    of words.
    """

    format = "gguf"
    config_path: Path | None = None

    def __init__(self, source: str, path: Path, reader: ByteReader) -> None:
        self.source = source
        self._reader = reader
        config, tensors = _read_file(path, reader)
        count = _parts(config, path)
        if count > 1:
            config, tensors = _read_parts(path, count, reader, {path: (config, tensors)})
        self.config: Mapping[str, Any] | None = config
        self.tensors: Mapping[str, TensorInfo] = tensors

    @property
    def bytes_read(self) -> int:
        return self._reader.bytes_read

    def read(self, name: str, rows: int | None = None) -> NDArray[Any]:
        """The tensor as stored for F64, F32, F16 and BF16; float32 for every quantised type."""
        info = self.tensors[name].head(rows)
        if info.dtype in FLOATS:
            return as_floats(self._reader.read(info.file, info.offset, info.nbytes), info)
        return _dequantised(name, info, self._reader)


class _Header:
    """A cursor over the start of the file, read in growing chunks; no step leads out of it unnoticed."""

    def __init__(self, file: BinaryIO, path: Path, reader: ByteReader) -> None:
        self.path, self.size = path, os.fstat(file.fileno()).st_size
        self._file, self._reader = file, reader
        self._buffer, self._start, self._at = b"", 0, 0  # file offset of buffer[0]; cursor inside the buffer
        self._chunk = 2**16

    @property
    def position(self) -> int:
        return self._start + self._at

    def need(self, nbytes: int, what: str) -> None:
        """Have `nbytes` at the cursor in the buffer, or raise."""
        if self._at + nbytes <= len(self._buffer):
            return
        end = self.position + nbytes
        if end > self.size:
            raise CheckpointError(
                f"{self.path} ends at byte {self.size:,}, and {what} runs to byte {end:,}: "
                "truncated or damaged"
            )
        if end > MAX_HEADER_BYTES:
            raise CheckpointError(
                f"{self.path}: {what} lies beyond byte {MAX_HEADER_BYTES:,}; no header is so long"
            )
        kept = self._buffer[self._at :]
        self._start, self._at = self.position, 0
        self._file.seek(self._start + len(kept))
        parts, have = [kept], len(kept)
        while have < nbytes:
            part = self._file.read(max(nbytes - have, self._chunk))
            if not part:
                raise CheckpointError(
                    f"{self.path} ended at byte {self._start + have} while it was being read"
                )
            self._reader.bytes_read += len(part)
            parts.append(part)
            have += len(part)
        self._buffer = b"".join(parts)
        self._chunk = min(2 * self._chunk, 2**20)

    def peek(self, nbytes: int) -> bytes:
        """Up to `nbytes` bytes at the cursor: fewer where the file ends before."""
        self.need(min(nbytes, self.size - self.position), "the magic")
        return self._buffer[self._at : self._at + nbytes]

    def take(self, nbytes: int, what: str) -> bytes:
        self.need(nbytes, what)
        self._at += nbytes
        return self._buffer[self._at - nbytes : self._at]

    def number(self, kind: struct.Struct, what: str) -> Any:
        return kind.unpack(self.take(kind.size, what))[0]

    def skip(self, nbytes: int, what: str) -> None:
        if self.position + nbytes > self.size:
            raise CheckpointError(
                f"{self.path} ends at byte {self.size:,}, and {what} runs {nbytes:,} bytes from byte "
                f"{self.position:,}: truncated or damaged"
            )
        self._at += nbytes
        if self._at > len(self._buffer):
            self._buffer, self._start, self._at = b"", self.position, 0

    def skip_strings(self, count: int, what: str) -> None:
        """Step over `count` strings: a loop over lengths only, some 10 million per second."""
        if count * _U64.size > self.size - self.position:
            raise CheckpointError(
                f"{self.path}: {what} announces {count:,} strings, more than the file can hold"
            )
        unpack = _U64.unpack_from
        while count:
            self.need(_U64.size, what)
            buffer, at, last, done = self._buffer, self._at, len(self._buffer) - _U64.size, 0
            while at <= last and done < count:
                at += 8 + unpack(buffer, at)[0]
                done += 1
            count -= done
            self.skip(at - self._at, what)

    def name(self, what: str) -> str:
        length = self.number(_U64, what)
        if length > MAX_NAME_BYTES:
            raise CheckpointError(
                f"{self.path}: {what} is {length:,} bytes long; at most {MAX_NAME_BYTES:,} are read"
            )
        raw = self.take(length, what)
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError:
            raise CheckpointError(f"{self.path}: {what} is not UTF-8: {raw[:40]!r}") from None


def _read_counts(header: _Header) -> tuple[int, int]:
    """(tensors, key/values), after the magic and the version."""
    path = header.path
    head = header.peek(64)
    refuse_pointer(path, head)
    if head[:4] != b"GGUF":
        raise CheckpointError(
            f"{path} starts with {head[:4]!r}, not b'GGUF': another format, or a bad download"
        )
    header.skip(4, "the magic")
    version = header.number(_U32, "the version")
    swapped = int.from_bytes(version.to_bytes(4, "little"), "big")
    if swapped in (1, 2, 3):
        raise SourceError(
            f"{path} is a big-endian GGUF file (version {swapped}), which is not read; turn it with "
            "`gguf-convert-endian FILE little` (a command of the gguf package)"
        )
    if version == 1:
        raise SourceError(
            f"{path} is GGUF version 1, of 2023; versions 2 and 3 are read: convert the original model again "
            "with a current llama.cpp"
        )
    if version not in (2, 3):
        raise CheckpointError(
            f"{path} says GGUF version {version:,}; versions 2 and 3 are read: "
            "newer than this reader, or damaged"
        )
    n_tensors, n_keys = header.number(_U64, "the tensor count"), header.number(_U64, "the key/value count")
    if n_tensors > MAX_TENSORS:
        raise CheckpointError(f"{path} announces {n_tensors:,} tensors; at most {MAX_TENSORS:,} are read")
    if n_keys > MAX_KEYS:
        raise CheckpointError(f"{path} announces {n_keys:,} key/values; at most {MAX_KEYS:,} are read")
    return n_tensors, n_keys


def _read_metadata(header: _Header, count: int) -> dict[str, Any]:
    config: dict[str, Any] = {}
    seen: set[str] = set()
    for index in range(count):
        key = header.name(f"the name of key/value {index} of {count}")
        if key in seen:
            raise CheckpointError(f"{header.path} has the key {key!r} twice")
        seen.add(key)
        value = _read_value(header, f"the value of {key!r}")
        if value is not _SKIPPED:
            config[key] = value
    return config


def _read_value(header: _Header, what: str) -> Any:
    code = header.number(_U32, what)
    if code in _SCALARS:
        return header.number(_SCALARS[code], what)
    if code == _STRING:
        length = header.number(_U64, what)
        return header.take(length, what).decode("utf-8", errors="replace")
    if code != _ARRAY:
        raise CheckpointError(f"{header.path}: {what} is of type {code}, which GGUF does not have")
    code = header.number(_U32, what)
    length = header.number(_U64, what)
    if code == _STRING:
        header.skip_strings(length, what)
        return _SKIPPED
    if code not in _SCALARS:
        kind = "arrays" if code == _ARRAY else f"type {code}"
        raise CheckpointError(
            f"{header.path}: {what} is an array of {kind}; arrays of numbers and of strings are read"
        )
    item = _SCALARS[code]
    if length > MAX_ARRAY:
        header.skip(length * item.size, what)
        return _SKIPPED
    return [value for (value,) in item.iter_unpack(header.take(length * item.size, what))]


def _read_file(path: Path, reader: ByteReader) -> _Contents:
    """(metadata, tensors) of one file."""
    with opening(path) as file:
        header = _Header(file, path, reader)
        n_tensors, n_keys = _read_counts(header)
        config = _read_metadata(header, n_keys)
        alignment = _alignment(config, path)
        return config, _read_tensor_table(header, n_tensors, alignment)


def _parts(config: Mapping[str, Any], path: Path) -> int:
    """In how many files the model is: 1 where it is not split."""
    count = config.get("split.count", 1)
    if type(count) is not int or not 0 <= count <= MAX_PARTS:
        raise CheckpointError(
            f"{path} has split.count {str(count)[:40]!r}; a number of files up to {MAX_PARTS:,} is needed"
        )
    return max(count, 1)


def _read_parts(path: Path, count: int, reader: ByteReader, read: Mapping[Path, _Contents]) -> _Contents:
    """(metadata of the first part, tensors of all), each part checked against its name."""
    name = _PART.fullmatch(path.name)
    if name is None or int(name["count"]) != count:
        raise SourceError(
            f"{path} is one of {count} parts of a GGUF model, which are found by their names, "
            f"NAME-00001-of-{count:05d}.gguf and so on; give it the name back that it had"
        )
    files = [path.with_name(f"{name['stem']}-{i + 1:05d}-of-{count:05d}.gguf") for i in range(count)]
    missing = [file.name for file in files if not file.exists()]
    if missing:
        raise CheckpointError(
            f"{path} is one of {count} parts of a GGUF model, and {', '.join(missing[:5])}"
            f"{f' and {len(missing) - 5} more' if len(missing) > 5 else ''} "
            f"{'is' if len(missing) == 1 else 'are'} not in {path.parent}: the download is incomplete"
        )
    tensors: dict[str, TensorInfo] = {}
    whole: Mapping[str, Any] = {}
    for number, file in enumerate(files):
        config, found = read.get(file) or _read_file(file, reader)
        if config.get("split.no") != number or config.get("split.count") != count:
            raise CheckpointError(
                f"{file} says that it is part {str(config.get('split.no'))[:40]} (from 0) of "
                f"{str(config.get('split.count'))[:40]}, and its name says {number} of {count}"
            )
        for tensor, info in found.items():
            if tensor in tensors:
                raise CheckpointError(f"tensor {tensor!r} is in both {tensors[tensor].file} and {file}")
            tensors[tensor] = info
        whole = whole or config
    promised = whole.get("split.tensors.count", len(tensors))
    if promised != len(tensors):
        raise CheckpointError(
            f"{files[0]} promises {str(promised)[:40]} tensors, and its {count} parts hold {len(tensors)}"
        )
    return whole, tensors


def _alignment(config: Mapping[str, Any], path: Path) -> int:
    """What tensor data is aligned to, in bytes: 32 where the file does not say."""
    value = config.get("general.alignment", 32)
    if type(value) is not int or not 0 < value <= MAX_ALIGNMENT or value & (value - 1):
        raise CheckpointError(
            f"{path} has general.alignment {str(value)[:40]!r}; "
            f"a power of two up to {MAX_ALIGNMENT:,} is needed"
        )
    return value


def _read_tensor_table(header: _Header, count: int, alignment: int) -> dict[str, TensorInfo]:
    if not count:
        return {}
    from gguf.constants import GGML_QUANT_SIZES

    sizes = {int(kind): (kind.name, *size) for kind, size in GGML_QUANT_SIZES.items()}
    relative: dict[str, TensorInfo] = {}
    for index in range(count):
        name = header.name(f"the name of tensor {index} of {count}")
        if name in relative:
            raise CheckpointError(f"{header.path} has tensor {name!r} twice")
        relative[name] = _read_tensor_entry(header, name, sizes)
    start = -(-header.position // alignment) * alignment
    tensors = {}
    end_before, before = 0, ""
    for name, info in sorted(relative.items(), key=lambda item: item[1].offset):
        if info.offset % alignment:
            raise CheckpointError(
                f"{header.path}: tensor {name!r} is at offset {info.offset:,}, "
                f"which is not a multiple of the alignment, {alignment}"
            )
        if info.offset < end_before:
            raise CheckpointError(f"{header.path}: tensors {before!r} and {name!r} overlap")
        end_before, before = info.offset + info.nbytes, name
        if start + end_before > header.size:
            raise CheckpointError(
                f"{header.path} ends at byte {header.size:,}, and tensor {name!r} runs to byte "
                f"{start + end_before:,}: truncated or damaged"
            )
        tensors[name] = TensorInfo(info.shape, info.dtype, info.file, start + info.offset, info.nbytes)
    return {name: tensors[name] for name in relative}


def _read_tensor_entry(header: _Header, name: str, sizes: Mapping[int, tuple[str, int, int]]) -> TensorInfo:
    """One row of the tensor table; `offset` still counts from the start of the data."""
    what = f"{header.path}: tensor {name!r}"
    n_dims = header.number(_U32, f"the entry of tensor {name!r}")
    if not 1 <= n_dims <= MAX_DIMS:
        raise CheckpointError(f"{what} has {n_dims:,} dimensions; 1 to {MAX_DIMS} are possible")
    dims = struct.unpack(f"<{n_dims}Q", header.take(8 * n_dims, f"the shape of tensor {name!r}"))
    code, offset = struct.unpack("<IQ", header.take(12, f"the entry of tensor {name!r}"))
    if code not in sizes:
        raise CheckpointError(f"{what} has type {code}, which the gguf package installed here does not know")
    dtype, block, block_bytes = sizes[code]
    if 0 in dims:
        raise CheckpointError(f"{what} has shape {dims[::-1]}: a dimension is zero")
    if dims[0] % block:
        raise CheckpointError(f"{what} has rows of {dims[0]:,}, and {dtype} comes in blocks of {block}")
    nbytes = math.prod(dims) // block * block_bytes
    if nbytes > header.size:
        raise CheckpointError(
            f"{what} has shape {dims[::-1]}, {nbytes:,} bytes as {dtype}, and the file has {header.size:,}: "
            "truncated or damaged"
        )
    return TensorInfo(dims[::-1], dtype, header.path, offset, nbytes)


def _dequantised(name: str, info: TensorInfo, reader: ByteReader) -> NDArray[np.float32]:
    """float32, decoded in runs of whole blocks so that only a slice exists besides the result."""
    from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
    from gguf.quants import dequantize

    kind = GGMLQuantizationType[info.dtype]
    block, block_bytes = GGML_QUANT_SIZES[kind]
    if not _is_dequantisable(dequantize, kind, block_bytes):
        works = [
            k.name for k, (_, size) in GGML_QUANT_SIZES.items() if _is_dequantisable(dequantize, k, size)
        ]
        raise CheckpointError(
            f"tensor {name!r} in {info.file} is stored as {info.dtype}, which the gguf package cannot turn "
            f"into weights; what works: F64, {', '.join(works)}"
        )
    out = np.empty(math.prod(info.shape), dtype=np.float32)
    step = max(1, BLOCK_ELEMENTS // block)  # blocks
    n_blocks = info.nbytes // block_bytes
    for first in range(0, n_blocks, step):
        n = min(step, n_blocks - first)
        raw = reader.read(info.file, info.offset + first * block_bytes, n * block_bytes)
        with np.errstate(all="ignore"):  # a scale may be inf or NaN: so are its weights, then
            out[first * block : (first + n) * block] = dequantize(raw.reshape(1, -1), kind)[0]
    return out.reshape(info.shape)


def _is_dequantisable(dequantize: Callable[..., Any], kind: Any, block_bytes: int) -> bool:
    try:
        dequantize(np.zeros((1, block_bytes), dtype=np.uint8), kind)
    except NotImplementedError:
        return False
    return True
