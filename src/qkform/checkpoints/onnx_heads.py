"""ONNX: how many heads a model has, and whether it is BERT's encoder, where the graph itself proves it."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from typing import Any

from numpy.typing import NDArray

from qkform.checkpoints.onnx_names import Names
from qkform.checkpoints.onnx_weights import MAX_READERS, Values
from qkform.checkpoints.onnx_wire import Node, Tensor

Small = Callable[[Tensor], NDArray[Any] | None]

_BERT = re.compile(r"(?:^|\.)encoder\.layer\.(\d+)\.attention\.self\.(query|key)\.weight$")
_ORDER = ("Less", "LessOrEqual", "Greater", "GreaterOrEqual")
_MOVES = ("Unsqueeze", "Squeeze", "Reshape", "Expand", "Cast", "Identity")
MAX_ANCESTORS = 2_000  # of a mask; an exported one has some forty


def config_from_graph(names: Names, small: Small) -> Mapping[str, Any] | None:
    """What stands in for a missing config.json, or None where the graph leaves it open.

    Fused attention nodes say `num_heads`. For BERT's names, the reshape that follows each query and key gives the
    size of a head; the model is called "bert" only if no mask of a softmax looks at the order of the tokens.
    """
    if names.heads:
        counts = set(names.heads.values())
        return {"num_heads": counts.pop()} if len(counts) == 1 else None
    found: dict[int, set[str]] = {}
    heads: set[tuple[int, int]] = set()  # (heads, model width)
    graphs: dict[int, Values] = {}
    for name in names.weights:
        match = _BERT.search(name[-200:])
        if match is None:
            continue
        if name not in names.products or len(match[1]) > 6:
            return None
        node, values = names.products[name]
        outputs, inputs = names.weights[name].shape
        size = _head_size(node, values, small)
        if size is None or outputs % size:
            return None
        heads.add((outputs // size, inputs))
        found.setdefault(int(match[1]), set()).add(match[2])
        graphs[id(values)] = values
    whole = sorted(found) == list(range(len(found))) and all(len(parts) == 2 for parts in found.values())
    if not found or not whole or len(heads) != 1:
        return None
    if not all(_bidirectional(values, small) for values in graphs.values()):
        return None
    n_heads, width = heads.pop()
    return {
        "model_type": "bert",
        "num_attention_heads": n_heads,
        "hidden_size": width,
        "num_hidden_layers": len(found),
        "is_decoder": False,
    }


def _head_size(node: Node, values: Values, small: Small) -> int | None:
    """Of product -> (Cast, Mul, Add) -> Reshape to (.., .., heads, size) -> Transpose of tokens and heads."""
    value = node.outputs[0] if node.outputs else ""
    for _ in range(6):
        onward = ""
        for reader in values.read_by.get(value, ())[:MAX_READERS]:
            if reader.op == "Reshape" and len(reader.inputs) == 2 and reader.inputs[0] == value:
                size = _last_side(reader.inputs[1], values, small)
                turns = values.read_by.get(reader.outputs[0] if reader.outputs else "", ())[:MAX_READERS]
                perms = [turn.numbers.get("perm") for turn in turns if turn.op == "Transpose"]
                if size is not None and any(perm in ([0, 2, 1, 3], [0, 2, 3, 1]) for perm in perms):
                    return size
            elif reader.op in ("Add", "Cast", "Mul", "QuantizeLinear", "DequantizeLinear") and reader.outputs:
                onward = onward or reader.outputs[0]
        if not onward:
            return None
        value = onward
    return None


def _last_side(name: str, values: Values, small: Small) -> int | None:
    """The last of four numbers of a shape, if it is a constant."""
    tensor = values.constant(name)
    made = values.maker(name)
    if tensor is None and made is not None and made[0].op == "Concat" and len(made[0].inputs) == 4:
        values = made[1]
        tensor, sides = values.constant(made[0].inputs[3]), 1
    else:
        sides = 4
    if tensor is None or tensor.dtype != 7 or tensor.dims != (sides,):
        return None
    numbers = small(tensor)
    size = 0 if numbers is None else int(numbers[-1])
    return size if size > 0 else None


def _bidirectional(values: Values, small: Small) -> bool:
    """Whether no softmax of this graph sees a mask made from the order of tokens."""
    seen: set[str] = set()
    softmaxes = [node for node in values.graph.nodes if node.op == "Softmax"]
    if not softmaxes or values.graph.inner:
        return False
    for node in softmaxes:
        made = values.made_by.get(node.inputs[0]) if node.inputs else None
        if made is None or made.op not in ("Add", "Where", "MatMul", "Mul", "Div"):
            return False
        names = made.inputs if made.op in ("Add", "Where") else node.inputs[:1]
        for name in names:
            if not _scores(name, values) and not _without_order(name, values, small, seen):
                return False
    return True


def _scores(name: str, values: Values) -> bool:
    """Whether a value is the product of queries and keys, scaled or not."""
    for _ in range(4):
        node = values.made_by.get(name)
        if node is None:
            return False
        if node.op == "MatMul":
            return True
        by = values.constant(node.inputs[1]) if node.op in ("Mul", "Div") and len(node.inputs) == 2 else None
        if by is None or math.prod(by.dims) != 1:
            return False
        name = node.inputs[0]
    return False


def _without_order(name: str, values: Values, small: Small, seen: set[str]) -> bool:
    waiting = [name]
    while waiting:
        name = waiting.pop()
        if not name or name in seen:
            continue
        seen.add(name)
        if len(seen) > MAX_ANCESTORS:
            return False
        tensor = values.tensor(name)
        if tensor is not None:
            if sum(d > 1 for d in tensor.dims) > 1:  # a stored table of who sees whom
                return False
            continue
        node = values.made_by.get(name)
        if node is None:
            continue  # an input of the model: the padding mask
        if node.op in ("Trilu", "CumSum", "EyeLike", "Scan", "Loop", "If"):
            return False
        if node.op in _ORDER and not _against_constant(node, values, small):
            return False
        waiting += node.inputs
    return True


def _against_constant(node: Node, values: Values, small: Small) -> bool:
    """A comparison of positions with one number, as `arange(n) >= 0`, orders no two tokens."""
    for number, other in (node.inputs[:2], node.inputs[:2][::-1]) if len(node.inputs) == 2 else ():
        tensor = values.constant(number)
        if tensor is None or math.prod(tensor.dims) != 1:
            continue
        for _ in range(8):
            if values.constant(other) is not None:
                found = values.constant(other)
                return found is not None and sum(d > 1 for d in found.dims) <= 1
            made = values.made_by.get(other)
            if made is None:
                return True
            if made.op == "Range":
                return True
            if made.op not in _MOVES or not made.inputs:
                return False
            other = made.inputs[0]
    return False
