"""ONNX: from a value in the graph back to the stored tensor that makes it, and on to the bias behind a product.

Exporters and quantisers put constants behind Identity, Transpose, Cast, Mul by a scale or DequantizeLinear. A `Weight`
is what such a chain amounts to: a stored tensor, its scales and zero points, and whether it is turned.
Sources: https://onnx.ai/onnx/operators/ and the com.microsoft operators in
https://github.com/microsoft/onnxruntime/blob/main/docs/ContribOperators.md
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from qkform.checkpoints.onnx_wire import Graph, Node, Tensor

MAX_STEPS = 8  # of a chain; a cycle ends here
MAX_READERS = 8  # of a value that are looked at
FLOATS = (1, 10, 11, 16)
INTEGERS = (2, 3, 4, 5, 6)
PACKED = (21, 22)


@dataclass(frozen=True)
class Weight:
    """(stored - zero) * scale, turned if `flip`, then its rows `rows`; `shape` is what comes out."""

    tensor: Tensor
    flip: bool = False
    scale: Tensor | None = None
    zero: Tensor | None = None
    axis: int | None = (
        None  # of the stored dims, that a list of scales runs along; None: numpy's broadcasting
    )
    block: int = 0  # elements along `axis` that share a scale
    bits: int = 0  # of MatMulNBits, whose stored tensor is (outputs, blocks, bytes)
    inner: int = 0  # inputs of MatMulNBits
    rows: tuple[int, int] | None = None
    refusal: str = ""  # why `read` will not give it

    @property
    def shape(self) -> tuple[int, ...]:
        dims = self.tensor.dims
        if self.bits:
            dims = (dims[0], self.inner)
        if self.flip:
            dims = dims[::-1]
        return dims if self.rows is None else (self.rows[1] - self.rows[0], *dims[1:])

    def turned(self) -> Weight:
        return replace(self, flip=not self.flip)

    def cut(self, start: int, stop: int) -> Weight:
        return replace(self, rows=(start, stop))


class Values:
    """Who makes and who reads each value of one graph; `outer` is the graph around it."""

    def __init__(self, graph: Graph, outer: Values | None = None) -> None:
        self.graph, self.outer = graph, outer
        self.made_by: dict[str, Node] = {}
        self.read_by: dict[str, list[Node]] = {}
        for node in graph.nodes:
            for name in node.outputs:
                self.made_by.setdefault(name, node)
            for name in dict.fromkeys(node.inputs):
                self.read_by.setdefault(name, []).append(node)

    def tensor(self, name: str) -> Tensor | None:
        """The stored tensor of that very name: an initializer, or what a Constant node holds."""
        node = self.made_by.get(name)
        if node is not None:
            return node.tensors.get("value") if node.op == "Constant" else None
        found = self.graph.tensors.get(name)
        if found is None and self.outer is not None:
            return self.outer.tensor(name)
        return found

    def maker(self, name: str) -> tuple[Node, Values] | None:
        node = self.made_by.get(name)
        if node is not None:
            return node, self
        if name in self.graph.tensors or self.outer is None:
            return None
        return self.outer.maker(name)

    def constant(self, name: str) -> Tensor | None:
        """A stored tensor, through Identity."""
        values: Values = self
        for _ in range(MAX_STEPS):
            tensor = values.tensor(name)
            if tensor is not None:
                return tensor
            made = values.maker(name)
            if made is None or made[0].op != "Identity" or not made[0].inputs:
                return None
            values, name = made[1], made[0].inputs[0]
        return None

    def weight(self, name: str, steps: int = MAX_STEPS) -> Weight | None:
        """What value `name` is made of, if it is a constant of a kind that is known."""
        tensor = self.tensor(name) if name else None
        if tensor is not None:
            return Weight(tensor)
        made = self.maker(name) if name and steps else None
        if made is None or not made[0].inputs:
            return None
        node, values = made
        if node.op == "Mul" and len(node.inputs) == 2:
            return values._scaled(node, steps)
        if node.op not in ("Identity", "Cast", "Transpose", "DequantizeLinear", "Sub"):
            return None
        base = values.weight(node.inputs[0], steps - 1)
        if base is None or node.op in ("Identity", "Cast"):
            return base
        if node.op == "Transpose":
            perm = node.numbers.get("perm", [1, 0])
            return base.turned() if perm == [1, 0] and len(base.shape) == 2 else None
        if node.op == "Sub":
            zero = values._after_cast(node.inputs[1]) if len(node.inputs) == 2 else None
            plain = base.scale is None and base.zero is None and not base.flip
            return replace(base, zero=zero) if zero is not None and plain else None
        names = [*node.inputs, "", ""][:3]
        scale, zero = values.constant(names[1]), values.constant(names[2])
        if scale is None or (names[2] and zero is None) or base.flip or base.scale is not None:
            return None
        axis = node.int("axis", 1)
        rank = len(base.tensor.dims)
        axis = axis + rank if axis < 0 else axis
        return replace(base, scale=scale, zero=zero, axis=axis, block=node.int("block_size"))

    def _after_cast(self, name: str) -> Tensor | None:
        made = self.maker(name)
        if made is not None and made[0].op == "Cast" and made[0].inputs:
            return made[1].constant(made[0].inputs[0])
        return self.constant(name)

    def _scaled(self, node: Node, steps: int) -> Weight | None:
        """Mul(integers, scale) in either order; a product of two floating tensors is not a stored weight."""
        for value, by in (node.inputs, node.inputs[::-1]):
            scale = self.constant(by)
            if scale is None or scale.dtype not in FLOATS:
                continue
            base = self.weight(value, steps - 1)
            if base is None or base.scale is not None or base.tensor.dtype not in (*INTEGERS, *PACKED):
                continue
            if base.flip and math.prod(scale.dims) != 1:
                return None
            return replace(base, scale=scale)
        return None

    def bias_after(self, value: str, quantised: bool) -> tuple[str, Weight] | None:
        """(name as the graph writes it, tensor) of the one-dimensional constant that is added to `value`."""
        through = ("Cast", "Reshape", "QuantizeLinear", "DequantizeLinear", *(("Mul",) if quantised else ()))
        for _ in range(5):  # MatMulInteger, Cast, Mul by the scales, Reshape, Add
            onward = ""
            for node in self.read_by.get(value, ())[:MAX_READERS]:
                if node.op == "Add" and len(node.inputs) == 2:
                    other = node.inputs[1] if node.inputs[0] == value else node.inputs[0]
                    bias = self.weight(other)
                    if bias is not None and len(bias.shape) == 1:
                        return other, bias
                elif node.op in through and node.outputs:
                    onward = onward or node.outputs[0]
            if not onward:
                return None
            value = onward
        return None

    def scale_after(self, value: str) -> Tensor | None:
        """The constant scale that the integers of a MatMulInteger are multiplied by, alone or times the input's."""
        for cast in self.read_by.get(value, ())[:MAX_READERS]:
            for mul in self.read_by.get(cast.outputs[0] if cast.outputs else "", ())[:MAX_READERS]:
                if cast.op != "Cast" or mul.op != "Mul":
                    continue
                for name in mul.inputs:
                    made = self.maker(name)
                    names = made[0].inputs if made is not None and made[0].op == "Mul" else [name]
                    for each in names[:2]:
                        scale = self.constant(each)
                        if scale is not None and scale.dtype in FLOATS:
                            return scale
        return None


def all_values(graph: Graph, outer: Values | None = None) -> Iterator[Values]:
    """The graph and those inside it, from the outside in; the reader bounds their depth."""
    values = Values(graph, outer)
    yield values
    for inner in graph.inner:
        yield from all_values(inner, values)
