"""ONNX: models read without the `onnx` package, one tensor at a time, as the PyTorch checkpoint would hold them.

The graph is walked once (see onnx_wire.py), weights get their names back (onnx_names.py), and only what `read` asks
for is taken from the file or from the external data beside it. int8 weights come out as float32, (q - zero) * scale.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qkform.checkpoints.base import ByteReader, Local, TensorInfo, regular_file
from qkform.checkpoints.onnx_heads import config_from_graph
from qkform.checkpoints.onnx_names import Names
from qkform.checkpoints.onnx_weights import Weight
from qkform.checkpoints.onnx_wire import TYPES, Tensor, read_graph
from qkform.errors import CheckpointError, SourceError

MAX_OFFSET_DIGITS = 15
_KEPT_BYTES = 2**28  # a matrix of query, key and value is read once for its parts, if no larger


class OnnxCheckpoint(Local):
    """The tensors of one .onnx file.

    `config` is the given one, or {"model_type", "num_attention_heads", ...} where the graph itself proves them.
    Raises CheckpointError for a damaged or hostile file, SourceError for what is not read.
    """

    format = "onnx"

    def __init__(
        self,
        source: str,
        path: Path,
        reader: ByteReader,
        config: Mapping[str, Any] | None,
        config_path: Path | None,
    ) -> None:
        self.source, self.config_path = source, config_path
        self._path, self._reader = path, reader
        self._kept: tuple[Weight, NDArray[Any]] | None = None
        model_type = None if config is None else config.get("model_type")
        names = Names(model_type if isinstance(model_type, str) else None).find(read_graph(path, reader))
        if names.refused:
            raise SourceError(
                f"{path}: {names.refused[0]}; export the model again without that fusion, or scan the PyTorch model"
            )
        self._weights: Mapping[str, Weight] = names.weights
        if config is None:
            config = config_from_graph(names, self._small)
        self.config: Mapping[str, Any] | None = config
        self.tensors: Mapping[str, TensorInfo] = {
            name: TensorInfo(w.shape, w.tensor.word, path, w.tensor.offset, self._nbytes(w))
            for name, w in self._weights.items()
        }

    @property
    def bytes_read(self) -> int:
        return self._reader.bytes_read

    def read(self, name: str, rows: int | None = None) -> NDArray[Any]:
        """The tensor as stored where it is of a floating type; float32 for integers with scales."""
        weight = self._weights[name]
        what = f"tensor {name!r} in {self._path}"
        if weight.refusal:
            raise SourceError(f"{what} {weight.refusal}")
        whole = replace(weight, rows=None)
        if self._kept is not None and self._kept[0] == whole:
            array = self._kept[1]
        else:
            array = self._floats(whole, what)
            small = weight.rows is not None and array.nbytes <= _KEPT_BYTES
            self._kept = (whole, array) if small else None
        if weight.rows is not None:
            array = array[weight.rows[0] : weight.rows[1]]
        return array if rows is None else array[:rows]

    def _floats(self, weight: Weight, what: str) -> NDArray[Any]:
        if weight.bits:
            array: NDArray[Any] = self._unpacked(weight, what)
        else:
            array = self._stored(weight.tensor, what)
            if weight.scale is not None:
                array = self._scaled(array, weight, what)
            elif weight.tensor.word not in ("F32", "F16", "BF16", "F64"):
                raise SourceError(f"{what} is stored as {weight.tensor.word} without a scale; not a weight")
        return array.T if weight.flip else array

    def _scaled(self, array: NDArray[Any], weight: Weight, what: str) -> NDArray[np.float32]:
        out = array.astype(np.float32)
        assert weight.scale is not None
        try:
            for tensor, is_scale in ((weight.zero, False), (weight.scale, True)):
                if tensor is None:
                    continue
                by = self._along(self._stored(tensor, what).astype(np.float32), weight, out.shape)
                if is_scale:
                    out *= by
                else:
                    out -= by
        except ValueError:
            raise CheckpointError(
                f"{what} has stored shape {array.shape}, and its scales {weight.scale.dims} do not fit"
            ) from None
        return out

    def _along(self, by: NDArray[np.float32], weight: Weight, shape: tuple[int, ...]) -> NDArray[np.float32]:
        """Scales or zero points so that numpy broadcasts them over the stored shape."""
        axis = weight.axis
        if by.size == 1:
            return by.reshape(())
        if axis is None:
            return by
        if not 0 <= axis < len(shape):
            raise ValueError
        if weight.block:
            if by.ndim != len(shape) or by.shape[axis] != -(-shape[axis] // weight.block):
                raise ValueError
            return np.take(by, np.arange(shape[axis]) // weight.block, axis=axis)
        if by.size != shape[axis]:
            raise ValueError
        return by.reshape([-1 if i == axis else 1 for i in range(len(shape))])

    def _unpacked(self, weight: Weight, what: str) -> NDArray[np.float32]:
        """MatMulNBits: unsigned integers, the low half of a byte first, minus a zero point per block (the middle)."""
        raw = self._stored(weight.tensor, what)  # (outputs, blocks, bytes)
        outputs, blocks, _ = raw.shape
        values = _nibbles(raw, outputs * blocks * weight.block) if weight.bits == 4 else raw
        out = values.reshape(outputs, blocks, weight.block).astype(np.float32)
        try:
            if weight.zero is None:
                out -= 2 ** (weight.bits - 1)
            else:
                zero = self._stored(weight.zero, what)
                if weight.zero.word == "U8" and weight.bits == 4:
                    zero = _nibbles(zero.reshape(outputs, -1), None)[:, :blocks]
                out -= zero.astype(np.float32).reshape(outputs, blocks, 1)
            assert weight.scale is not None
            out *= self._stored(weight.scale, what).astype(np.float32).reshape(outputs, blocks, 1)
        except ValueError:
            raise CheckpointError(
                f"{what}: scales or zero points do not fit {outputs} x {blocks} blocks"
            ) from None
        return out.reshape(outputs, -1)[:, : weight.inner]

    # ---- bytes of a stored tensor

    def _small(self, tensor: Tensor) -> NDArray[Any] | None:
        """A constant of at most 64 numbers, or None."""
        if math.prod(tensor.dims) > 64 or tensor.held == "external" or tensor.nbytes > 640:
            return None
        return self._stored(tensor, f"constant {tensor.name!r} in {self._path}")

    def _stored(self, tensor: Tensor, what: str) -> NDArray[Any]:
        """The numbers of a tensor in its own type and shape."""
        count, expected = math.prod(tensor.dims), tensor.stored_bytes
        if expected is None:
            raise SourceError(f"{what} is stored as ONNX data type {tensor.dtype}, which is not read")
        dtype = _dtype(tensor.word)
        if tensor.held in ("raw", "external"):
            file, offset = (
                (self._path, tensor.offset) if tensor.held == "raw" else self._external(tensor, what)
            )
            data = self._reader.read(file, offset, expected)
            if tensor.word in ("U4", "I4"):
                return _nibbles(data, count, signed=tensor.word == "I4").reshape(tensor.dims)
            return data.view(dtype).reshape(tensor.dims)
        word, bits, held = TYPES[tensor.dtype]
        if tensor.held != held:
            where = f"in {tensor.held}_data" if tensor.held else "nowhere"
            raise CheckpointError(f"{what} is of type {word} and holds its data {where}")
        if held in ("float", "double"):
            if tensor.nbytes != expected:
                raise CheckpointError(
                    f"{what} holds {tensor.nbytes:,} bytes; {tensor.dims} needs {expected:,}"
                )
            return self._reader.read(self._path, tensor.offset, expected).view(dtype).reshape(tensor.dims)
        stored = count if bits != 4 else -(-count // 2)
        if not stored <= tensor.nbytes <= 10 * stored:
            raise CheckpointError(
                f"{what} holds {tensor.nbytes:,} bytes of numbers; {tensor.dims} needs {stored:,}"
            )
        numbers = _varints(self._reader.read(self._path, tensor.offset, tensor.nbytes), stored, what)
        if bits == 4:
            nibbles = _nibbles(numbers.astype(np.uint8), count, signed=word == "I4")
            return nibbles.reshape(tensor.dims)
        narrow = numbers.astype(f"<u{bits // 8}")  # modulo 2**bits: the low bits are the number
        return narrow.view(dtype).reshape(tensor.dims)

    def _nbytes(self, weight: Weight) -> int:
        expected = weight.tensor.stored_bytes
        return weight.tensor.nbytes if expected is None else expected

    def _external(self, tensor: Tensor, what: str) -> tuple[Path, int]:
        """(file, offset) of external data: a plain name inside the model's folder, whole and of the right size."""
        entries = dict(tensor.external)
        location = entries.get("location", "")
        file = _inside(self._path, location, what)
        offset = _count(entries.get("offset", "0"), "offset", what)
        expected = tensor.stored_bytes or 0
        length = _count(entries.get("length", str(expected)), "length", what)
        if length != expected:
            raise CheckpointError(
                f"{what} has shape {tensor.dims}, {expected:,} bytes as {tensor.word}, and {length:,} bytes of "
                f"external data: damaged"
            )
        return file, offset


def _inside(model: Path, location: str, what: str) -> Path:
    """The file `location` beside the model. A link may lead only to where the model's own file lies.

    The hub's cache keeps model and data as links into one folder of blobs, so that folder counts too.
    """
    short = location[:100]
    parts = PurePosixPath(location).parts
    windows = PureWindowsPath(location)
    if not location or "\0" in location or len(location) > 1024 or ".." in (*parts, *windows.parts):
        raise CheckpointError(
            f"{what} has its data in {short!r}, which is no name of a file beside the model"
        )
    if location.startswith("/") or windows.drive or windows.root:
        raise CheckpointError(f"{what} has its data in {short!r}, outside the model's folder; never read")
    try:
        folders = {model.parent.resolve(), model.resolve().parent}
        real = (model.parent / location).resolve()
    except (OSError, RuntimeError) as error:
        raise CheckpointError(f"{what} has its data in {short!r}: {error}") from None
    if not any(real.is_relative_to(folder) for folder in folders):
        raise CheckpointError(
            f"{what} has its data in {short!r}, a link out of the model's folder; never read"
        )
    if not real.exists():
        raise SourceError(
            f"{what} has its data in {short!r}, which does not lie beside {model.name}: fetch it too"
        )
    return regular_file(real)


def _count(text: str, key: str, what: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) <= MAX_OFFSET_DIGITS):
        raise CheckpointError(
            f"{what} has {key} {text[:40]!r} in its external data; expected a number of bytes"
        )
    return int(text)


def _dtype(word: str) -> np.dtype[Any]:
    if word in ("BF16", "F8_E4M3", "F8_E5M2"):
        import ml_dtypes

        names = {"BF16": "bfloat16", "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2"}
        packed: np.dtype[Any] = np.dtype(getattr(ml_dtypes, names[word]))
        return packed
    if word == "BOOL":
        return np.dtype(np.uint8)
    if word in ("U4", "I4"):
        return np.dtype(np.uint8 if word == "U4" else np.int8)
    return np.dtype(f"<{word[0].lower()}{int(word[1:]) // 8}")


def _nibbles(raw: NDArray[np.uint8], count: int | None, *, signed: bool = False) -> NDArray[Any]:
    """4-bit numbers, the low half of each byte first; `count` of them in one row, or along the last axis."""
    both = np.stack([raw & 15, raw >> 4], axis=-1)
    flat = both.reshape(-1)[:count] if count is not None else both.reshape(*raw.shape[:-1], -1)
    return ((flat ^ 8).astype(np.int8) - 8) if signed else flat


def _varints(raw: NDArray[np.uint8], count: int, what: str) -> NDArray[np.uint64]:
    """`count` protobuf varints, all at once."""
    ends = np.flatnonzero(raw < 128)
    if ends.size != count or (raw.size and ends[-1] != raw.size - 1):
        raise CheckpointError(f"{what} holds {ends.size:,} numbers; its shape needs {count:,}")
    starts = np.concatenate([[0], ends[:-1] + 1]) if count else ends
    lengths = ends - starts + 1
    if count and lengths.max() > 10:
        raise CheckpointError(f"{what} holds a number of more than 10 bytes")
    out = np.zeros(count, dtype=np.uint64)
    for i in range(int(lengths.max()) if count else 0):
        at = lengths > i
        digit = (raw[starts[at] + i] & 127).astype(np.uint64)
        out[at] |= digit << np.uint64(7 * i)
    return out
