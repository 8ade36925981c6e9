"""ONNX: the graph of a model read from the protobuf wire format, with every weight's bytes stepped over.

The `onnx` package parses a file whole, weights included; here the walk keeps names, shapes, attributes and the place
of each tensor's bytes, so that a model of gigabytes costs what its graph costs. Every message, count and nesting
is bounded, and no length leads out of the message that holds it.
Source: https://github.com/onnx/onnx/blob/main/onnx/onnx.proto (field numbers) and
https://protobuf.dev/programming-guides/encoding/ (wire format).
"""

from __future__ import annotations

import math
import os
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

from qkform.checkpoints.base import ByteReader, opening, refuse_pointer
from qkform.errors import CheckpointError

MAX_FIELDS = 2_000_000  # of all messages; a merged decoder of 32 layers has some 300,000
MAX_NODES = 100_000  # a large decoder has 20,000
MAX_TENSORS = 250_000
MAX_TEXT_BYTES = 100_000_000  # of names and attributes kept, all together
MAX_NAME_BYTES = 4_096
MAX_DEPTH = 8  # If in Loop in If ...; merged decoders have one level
MAX_DIMS = 16
MAX_SCOPE_BYTES = 16_384  # of the metadata that says which module a node belongs to; longer is left unread

_VARINT, _FIXED64, _LEN, _FIXED32 = 0, 1, 2, 5
_SCOPES = ("pkg.torch.onnx.name_scopes", "namespace")

# data_type -> (word, bits of one element, field that holds it where raw_data does not)
TYPES = {
    1: ("F32", 32, "float"),
    2: ("U8", 8, "int32"),
    3: ("I8", 8, "int32"),
    4: ("U16", 16, "int32"),
    5: ("I16", 16, "int32"),
    6: ("I32", 32, "int32"),
    7: ("I64", 64, "int64"),
    9: ("BOOL", 8, "int32"),
    10: ("F16", 16, "int32"),
    11: ("F64", 64, "double"),
    12: ("U32", 32, "uint64"),
    13: ("U64", 64, "uint64"),
    16: ("BF16", 16, "int32"),
    17: ("F8_E4M3", 8, "int32"),
    19: ("F8_E5M2", 8, "int32"),
    21: ("U4", 4, "int32"),
    22: ("I4", 4, "int32"),
}
_DATA_FIELDS = {4: "float", 5: "int32", 7: "int64", 9: "raw", 10: "double", 11: "uint64"}


@dataclass(frozen=True, slots=True)
class Tensor:
    """A stored tensor: where its bytes are, and in which field of the message."""

    name: str
    dims: tuple[int, ...]
    dtype: int  # a key of TYPES, or one that is not read
    held: str  # "raw", "external", the name of a typed field, or "" for no data
    offset: int  # in the model file; 0 for external data
    nbytes: int
    external: tuple[tuple[str, str], ...] = ()

    @property
    def word(self) -> str:
        return TYPES[self.dtype][0] if self.dtype in TYPES else f"type {self.dtype}"

    @property
    def stored_bytes(self) -> int | None:
        """Bytes that raw or external data of this shape and type have; None for a type that is not read."""
        if self.dtype not in TYPES:
            return None
        return -(-math.prod(self.dims) * TYPES[self.dtype][1] // 8)


@dataclass(slots=True)
class Node:
    """One operation. `numbers` holds its int, float and ints attributes, `scope` the module its exporter noted."""

    op: str = ""
    domain: str = ""
    name: str = ""
    inputs: list[str] = field(default_factory=list)
    outputs: list[str] = field(default_factory=list)
    numbers: dict[str, int | float | list[int]] = field(default_factory=dict)
    tensors: dict[str, Tensor] = field(default_factory=dict)
    scope: str = ""

    def int(self, name: str, default: int = 0) -> int:
        value = self.numbers.get(name, default)
        return value if isinstance(value, int) else default


@dataclass(slots=True)
class Graph:
    """Nodes and stored tensors of a graph; graphs inside If and Loop stand in `inner`."""

    nodes: list[Node] = field(default_factory=list)
    tensors: dict[str, Tensor] = field(default_factory=dict)
    inner: list[Graph] = field(default_factory=list)


def read_graph(path: Path, reader: ByteReader) -> Graph:
    """The main graph of an .onnx file; CheckpointError where the bytes are not an ONNX model's."""
    with opening(path) as file:
        walk = _Walk(file, path, reader)
        graph: Graph | None = None
        for number, wire, _ in walk.fields(walk.size):
            if number == 7 and wire == _LEN:
                if graph is not None:
                    raise CheckpointError(f"{path} holds two graphs; an ONNX model has one")
                graph = walk.graph(walk.stop, 0)
    if graph is None:
        raise CheckpointError(f"{path} holds no graph: not an ONNX model, or cut short")
    return graph


class _Walk:
    """A cursor over the file, read in chunks that grow while nothing is stepped over."""

    def __init__(self, file: BinaryIO, path: Path, reader: ByteReader) -> None:
        self.path, self.size = path, os.fstat(file.fileno()).st_size
        self.stop = 0  # where the field that `fields` gave last ends
        self._file, self._reader = file, reader
        self._buffer, self._start, self._at = b"", 0, 0
        self._chunk = 2**12
        self._fields = self._nodes = self._tensors = self._text = 0
        self._fill(1)
        refuse_pointer(path, self._buffer[:64])

    @property
    def position(self) -> int:
        return self._start + self._at

    def _fill(self, nbytes: int) -> None:
        """At least `nbytes` at the cursor in the buffer, or all that is left of the file."""
        kept = self._buffer[self._at :]
        self._start, self._at = self.position, 0
        self._file.seek(self._start + len(kept))
        parts, have = [kept], len(kept)
        while have < nbytes:
            part = self._file.read(max(nbytes - have, self._chunk))
            if not part:
                break
            self._reader.bytes_read += len(part)
            parts.append(part)
            have += len(part)
        self._buffer = b"".join(parts)
        self._chunk = min(2 * self._chunk, 2**18)

    def _seek(self, position: int) -> None:
        self._at = position - self._start
        if self._at > len(self._buffer):
            self._buffer, self._start, self._at = b"", position, 0
            self._chunk = 2**12

    def damaged(self, what: str) -> CheckpointError:
        return CheckpointError(
            f"{self.path}: {what} at byte {self.position:,}: truncated, damaged, or not ONNX"
        )

    def varint(self, end: int) -> int:
        if self._at + 10 > len(self._buffer):
            self._fill(10)
        buffer, at = self._buffer, self._at
        if at < len(buffer) and buffer[at] < 128 and self._start + at < end:  # most numbers are one byte
            self._at = at + 1
            return buffer[at]
        limit = min(len(buffer), end - self._start, at + 10)
        value = shift = 0
        while at < limit:
            byte = buffer[at]
            at += 1
            value |= (byte & 127) << shift
            if byte < 128:
                self._at = at
                return value & 0xFFFF_FFFF_FFFF_FFFF
            shift += 7
        raise self.damaged("a number does not end")

    def take(self, nbytes: int) -> bytes:
        if self._at + nbytes > len(self._buffer):
            self._fill(nbytes)
        raw = self._buffer[self._at : self._at + nbytes]
        if len(raw) < nbytes:
            raise self.damaged("the file ends")
        self._at += nbytes
        return raw

    def fields(self, end: int) -> Iterator[tuple[int, int, int]]:
        """(field, wire type, number or length) of a message; the cursor stands at what a length counts."""
        while self.position < end:
            self._fields += 1
            if self._fields > MAX_FIELDS:
                raise CheckpointError(
                    f"{self.path} has more than {MAX_FIELDS:,} fields; no model is so large"
                )
            key = self.varint(end)
            number, wire = key >> 3, key & 7
            if not 0 < number < 2**29:
                raise self.damaged(f"field number {number}")
            if wire == _VARINT:
                yield number, wire, self.varint(end)
                continue
            if wire not in (_LEN, _FIXED32, _FIXED64):
                raise self.damaged(f"wire type {wire}")
            length = self.varint(end) if wire == _LEN else 4 if wire == _FIXED32 else 8
            stop = self.position + length
            if stop > end:
                raise self.damaged(f"a field of {length:,} bytes runs over its end")
            self.stop = stop
            yield number, wire, length
            self._seek(stop)

    def text(self, length: int, what: str, limit: int = MAX_NAME_BYTES) -> str:
        if length > limit:
            raise CheckpointError(f"{self.path}: {what} is {length:,} bytes long; at most {limit:,} are read")
        self._text += length + 32
        if self._text > MAX_TEXT_BYTES:
            raise CheckpointError(f"{self.path}: more than {MAX_TEXT_BYTES:,} bytes of names and attributes")
        raw = self.take(length)
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError:
            raise CheckpointError(f"{self.path}: {what} is not UTF-8: {raw[:40]!r}") from None

    def signed(self, value: int) -> int:
        return value - 2**64 if value >= 2**63 else value

    def integers(self, wire: int, value: int, most: int, what: str) -> list[int]:
        """A repeated integer field, packed or not."""
        if wire == _VARINT:
            return [self.signed(value)]
        if wire != _LEN:
            raise self.damaged(f"{what} of wire type {wire}")
        out, end = [], self.stop
        while self.position < end:
            out.append(self.signed(self.varint(end)))
            if len(out) > most:
                raise CheckpointError(f"{self.path}: {what} has more than {most:,} numbers")
        return out

    def graph(self, end: int, depth: int) -> Graph:
        if depth > MAX_DEPTH:
            raise CheckpointError(f"{self.path}: graphs inside graphs, more than {MAX_DEPTH} deep")
        graph = Graph()
        for number, wire, _ in self.fields(end):
            if wire != _LEN:
                continue
            if number == 1:
                self._nodes += 1
                if self._nodes > MAX_NODES:
                    raise CheckpointError(
                        f"{self.path} has more than {MAX_NODES:,} nodes; no model has so many"
                    )
                graph.nodes.append(self._node(self.stop, graph, depth))
            elif number == 5:
                tensor = self._tensor(self.stop)
                if tensor.name in graph.tensors:
                    raise CheckpointError(f"{self.path} has the initializer {tensor.name[:200]!r} twice")
                graph.tensors[tensor.name] = tensor
        return graph

    def _node(self, end: int, graph: Graph, depth: int) -> Node:
        node = Node()
        for number, wire, length in self.fields(end):
            if wire != _LEN:
                continue
            if number == 1:
                node.inputs.append(self.text(length, "the name of an input"))
            elif number == 2:
                node.outputs.append(self.text(length, "the name of an output"))
            elif number == 3:
                node.name = self.text(length, "the name of a node")
            elif number == 4:
                node.op = self.text(length, "an operator")
            elif number == 5:
                self._attribute(self.stop, node, graph, depth)
            elif number == 7:
                node.domain = self.text(length, "a domain")
            elif number == 9 and length <= MAX_SCOPE_BYTES:
                key, value = self._entry(self.stop)
                if key in _SCOPES and (key == _SCOPES[0] or not node.scope):
                    node.scope = value
        return node

    def _entry(self, end: int) -> tuple[str, str]:
        key = value = ""
        for number, wire, length in self.fields(end):
            if wire == _LEN and number == 1:
                key = self.text(length, "a key of metadata")
            elif wire == _LEN and number == 2:
                value = self.text(length, "a value of metadata", MAX_SCOPE_BYTES)
        return key, value

    def _attribute(self, end: int, node: Node, graph: Graph, depth: int) -> None:
        name, value, tensor = "", None, None
        ints: list[int] = []
        for number, wire, got in self.fields(end):
            if number == 1 and wire == _LEN:
                name = self.text(got, "the name of an attribute")
            elif number == 2 and wire == _FIXED32:
                value = struct.unpack("<f", self.take(4))[0]
            elif number == 3 and wire == _VARINT:
                value = self.signed(got)
            elif number == 5 and wire == _LEN:
                tensor = self._tensor(self.stop)
            elif number in (6, 11) and wire == _LEN:
                graph.inner.append(self.graph(self.stop, depth + 1))
            elif number == 8 and len(ints) < 64 and (wire == _VARINT or got <= 640):
                # perm, axes, qkv_hidden_sizes: longer lists are not looked at
                ints += self.integers(wire, got, 640, f"the attribute {name[:80]!r}")
        if tensor is not None:
            node.tensors[name] = tensor
        elif ints:
            node.numbers[name] = ints
        elif value is not None:
            node.numbers[name] = value

    def _tensor(self, end: int) -> Tensor:
        self._tensors += 1
        if self._tensors > MAX_TENSORS:
            raise CheckpointError(f"{self.path} has more than {MAX_TENSORS:,} tensors; no model has so many")
        name, held, dtype, location = "", "", 0, 0
        offset = nbytes = 0
        dims: list[int] = []
        external: list[tuple[str, str]] = []
        for number, wire, got in self.fields(end):
            if number == 1:
                dims += self.integers(wire, got, MAX_DIMS, "the shape of a tensor")
                if len(dims) > MAX_DIMS:
                    raise CheckpointError(f"{self.path}: a tensor has more than {MAX_DIMS} dimensions")
            elif number == 2 and wire == _VARINT:
                dtype = got
            elif number == 8 and wire == _LEN:
                name = self.text(got, "the name of a tensor")
            elif number == 13 and wire == _LEN and len(external) < 16:
                external.append(self._entry(self.stop))
            elif number == 14 and wire == _VARINT:
                location = got
            elif number in _DATA_FIELDS:
                if wire != _LEN or held:
                    how = "in two places" if held else "number by number, unpacked"
                    raise CheckpointError(f"{self.path}: tensor {name!r} holds its data {how}; not read")
                held, offset, nbytes = _DATA_FIELDS[number], self.position, got
        if location == 1:
            held, offset, nbytes = "external", 0, 0
        tensor = Tensor(
            name, tuple(dims), dtype, held, offset, nbytes, tuple(external) if location == 1 else ()
        )
        self._check(tensor)
        return tensor

    def _check(self, tensor: Tensor) -> None:
        what = f"{self.path}: tensor {tensor.name[:200]!r}"
        if any(not 0 <= d < 2**48 for d in tensor.dims) or math.prod(tensor.dims) >= 2**56:
            raise CheckpointError(f"{what} has shape {tensor.dims}, which no tensor has")
        expected = tensor.stored_bytes
        if tensor.held == "raw" and expected is not None and tensor.nbytes != expected:
            raise CheckpointError(
                f"{what} has shape {tensor.dims}, {expected:,} bytes as {tensor.word}, and holds "
                f"{tensor.nbytes:,}: damaged"
            )
