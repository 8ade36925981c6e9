"""ONNX: the weights of a graph under the names, and in the orientation, of the PyTorch checkpoint it came from.

Exporters store what a MatMul reads as `onnx::MatMul_123` or `val_17`, (inputs, outputs). The name is recovered from, in
this order: the tensor's own name; the node's name (`/encoder/layer.0/attention/self/query/MatMul`); the module scope
in the node's metadata (torch's dynamo exporter); the bias that is added next (`...query.bias`). A name that two
different tensors claim is given to neither.
"""

from __future__ import annotations

import re
from dataclasses import replace

from qkform.checkpoints.onnx_weights import FLOATS, Values, Weight, all_values
from qkform.checkpoints.onnx_wire import Graph, Node, Tensor

_PARAMETER = re.compile(r"[^/:\s]*[A-Za-z_][^/:\s]*\.(weight|bias|in_proj_weight|in_proj_bias)")
_MADE_UP = re.compile(  # what quantisers and optimisers append to a name
    r"(_DequantizeLinear_Output(_\d+)?|_dequantized|_quantized|_transposed|_Q[48]G?|_q[48]?|_fp16|_cast|_f)$"
)
_PRODUCT = re.compile(r"MatMul|Gemm|linear", re.IGNORECASE)
_CONV1D = re.compile(
    r"(^|\.)(c_attn|c_proj|c_fc|q_attn)\.weight$"
)  # stored (inputs, outputs) by GPT-2's own code
_CONV1D_TYPES = ("gpt2", "openai-gpt", "imagegpt", "decision_transformer")
_FUSED_NAMES = {  # model_type -> names of query, key and value of layer {i}; other families read in_proj_weight
    **dict.fromkeys(
        ("bert", "roberta", "xlm-roberta", "camembert", "electra", "ernie", "data2vec-text", "layoutlm"),
        tuple("encoder.layer.{i}.attention.self." + part for part in ("query", "key", "value")),
    ),
    "distilbert": tuple("transformer.layer.{i}.attention." + part for part in ("q_lin", "k_lin", "v_lin")),
}


class Names:
    """Names as they are found. `weights` is complete after `find`; `heads` holds what fused nodes say."""

    def __init__(self, model_type: str | None) -> None:
        self.model_type = model_type
        self.weights: dict[str, Weight] = {}
        self.biased: set[str] = set()
        self.heads: dict[str, int] = {}
        self.products: dict[str, tuple[Node, Values]] = {}  # weight name -> the product that reads it
        self._read_by: dict[int, str] = {}  # id of a product -> the name of its weight
        self.refused: list[str] = []
        self._contested: set[str] = set()
        self._taken: set[int] = set()
        self._fused = 0

    def find(self, graph: Graph) -> Names:
        everywhere = list(all_values(graph))
        for values in everywhere:
            packed = any(n.op in ("GroupQueryAttention", "MultiHeadAttention") for n in values.graph.nodes)
            for node in values.graph.nodes:
                if node.op in ("Attention", "QAttention") and node.domain == "com.microsoft":
                    self._attention(node, values)
                elif node.op.startswith("QOrdered") and "Attention" in node.op:
                    self.refused.append(
                        f"node {node.name[:80]!r} is a {node.op}, whose packed weights are not read"
                    )
                else:
                    self._product(node, values, packed)
            self._packed_queries(values)
        for values in everywhere:
            self._plain(values)
        for name in self._contested:
            self.weights.pop(name, None)
        return self

    def give(self, name: str, weight: Weight) -> bool:
        """Whether `name` now means `weight`; two different tensors of one name lose it both."""
        have = self.weights.get(name)
        if have is not None and have != weight:
            self._contested.add(name)
            return False
        self.weights[name] = weight
        return True

    # ---- projections: MatMul and its quantised forms, Gemm

    def _product(self, node: Node, values: Values, packed: bool) -> None:
        found = _operand(node, values)
        if found is None:
            return
        written, weight, bias = found
        if len(weight.shape) != 2:
            return
        own = _own_name(written)
        name = own or _of_node(node) or _of_bias(bias)
        if name is None:
            return
        if packed:  # the names of onnxruntime-genai's own builder
            name = re.sub(r"(layers\.\d+\.)attn\.(?=(q|k|v|o|qkv)_proj\.)", r"\1self_attn.", name)
        if self._conv1d(name, own is not None):
            weight = weight.turned()
        if self.give(name, weight):
            self.products[name] = (node, values)
            self._read_by[id(node)] = name
        self._taken.add(id(weight.tensor))
        if bias is not None:
            self.give(name.removesuffix("weight") + "bias", bias[1])

    def _conv1d(self, name: str, own: bool) -> bool:
        """Whether PyTorch keeps this weight (inputs, outputs); without a config a kept name decides."""
        if not _CONV1D.search(name):
            return False
        return own if self.model_type is None else self.model_type in _CONV1D_TYPES

    # ---- attention in one node

    def _attention(self, node: Node, values: Values) -> None:
        """Query, key and value of com.microsoft Attention: one (inputs, outputs of all three) matrix."""
        weight = values.weight(_at(node, 1))
        if node.op == "QAttention" and weight is not None:
            weight = _quantised(weight, values, values.constant(_at(node, 4)), _at(node, 7), -1)
        if weight is None or len(weight.shape) != 2:
            self.refused.append(f"node {node.name[:80]!r} is an {node.op} whose weights are not stored")
            return
        self._taken.add(id(weight.tensor))
        weight, layer, self._fused = weight.turned(), self._fused, self._fused + 1  # (outputs, inputs)
        sizes = node.numbers.get("qkv_hidden_sizes") or [weight.shape[0] // 3] * 3
        if not isinstance(sizes, list) or len(sizes) != 3 or min(sizes) <= 0 or sum(sizes) != weight.shape[0]:
            self.refused.append(
                f"node {node.name[:80]!r}: {node.op} with {weight.shape[0]} outputs, not a query, a key and a value"
            )
            return
        if node.int("num_heads") > 0:
            self.heads[f"{layer}"] = node.int("num_heads")
        bias = values.weight(_at(node, 2))
        if bias is not None and bias.shape != (weight.shape[0],):
            bias = None
        if self.model_type in _CONV1D_TYPES:
            named = (f"h.{layer}.attn.c_attn", weight.turned(), bias)
            self._give_pair(*named)
        elif self.model_type in _FUSED_NAMES:
            ends = [0, sizes[0], sizes[0] + sizes[1], sum(sizes)]
            for part, start, stop in zip(_FUSED_NAMES[self.model_type], ends, ends[1:], strict=False):
                cut = None if bias is None else bias.cut(start, stop)
                self._give_pair(part.format(i=layer), weight.cut(start, stop), cut)
        else:
            self.give(f"layers.{layer}.attention.in_proj_weight", weight)
            if bias is not None:
                self.give(f"layers.{layer}.attention.in_proj_bias", bias)

    def _give_pair(self, path: str, weight: Weight, bias: Weight | None) -> None:
        self.give(f"{path}.weight", weight)
        if bias is not None:
            self.give(f"{path}.bias", bias)

    def _packed_queries(self, values: Values) -> None:
        """GroupQueryAttention that takes query, key and value as one: qkv_proj becomes q_proj, k_proj, v_proj."""
        if self.model_type in ("phi3", "phi4mm"):  # whose checkpoints have qkv_proj themselves
            return
        for node in values.graph.nodes:
            if node.op != "GroupQueryAttention" or _at(node, 1):
                continue
            made = values.maker(_at(node, 0))
            if made is not None and made[0].op == "Add":  # its bias
                made = next(
                    (m for m in map(values.maker, made[0].inputs) if m and _PRODUCT.search(m[0].op)), None
                )
            name = self._read_by.get(id(made[0])) if made is not None else None
            heads, kv_heads = node.int("num_heads"), node.int("kv_num_heads")
            if name is None or "qkv_proj" not in name or heads <= 0 or kv_heads <= 0:
                continue
            weight, bias = self.weights[name], self.weights.get(name.removesuffix("weight") + "bias")
            size, rest = divmod(weight.shape[0], heads + 2 * kv_heads)
            if rest or weight.rows is not None:
                continue
            ends = [0, heads * size, (heads + kv_heads) * size, (heads + 2 * kv_heads) * size]
            for part, start, stop in zip("qkv", ends, ends[1:], strict=False):
                path = name.removesuffix(".weight").replace("qkv_proj", f"{part}_proj")
                self._give_pair(
                    path, weight.cut(start, stop), None if bias is None else bias.cut(start, stop)
                )

    # ---- everything else that has a name of its own, or none

    def _plain(self, values: Values) -> None:
        for node in values.graph.nodes:
            if node.op in ("Identity", "Cast", "Mul", "DequantizeLinear", "Transpose", "Constant"):
                for name in node.outputs[:1]:
                    own = _own_name(name)
                    weight = values.weight(name) if own and own not in self.weights else None
                    if own and weight is not None and id(weight.tensor) not in self._taken:
                        self.give(own, weight)
        for name, tensor in values.graph.tensors.items():
            own = _own_name(name) if name == _stripped(name) else None
            spare = len(tensor.dims) == 2 and id(tensor) not in self._taken
            if tensor.dtype in FLOATS and (own or spare):
                self.weights.setdefault(own or name, Weight(tensor))


def _at(node: Node, index: int) -> str:
    return node.inputs[index] if len(node.inputs) > index else ""


def _operand(node: Node, values: Values) -> tuple[str, Weight, tuple[str, Weight] | None] | None:
    """(name as written, weight as (outputs, inputs), bias) of a product with a stored right operand."""
    op = node.op
    which, alpha = _at(node, 1), node.numbers.get("alpha", 1.0)
    if op in ("MatMul", "FusedMatMul", "Gemm") and alpha == 1.0:
        weight = values.weight(which)
        straight = bool(node.int("transB"))
        extra = _at(node, 2) if op == "Gemm" else ""
    elif op in ("MatMulInteger", "MatMulIntegerToFloat", "DynamicQuantizeMatMul", "QLinearMatMul", "QGemm"):
        # (weight, scale, zero point, bias) among the inputs
        at = {
            "MatMulInteger": (1, -1, 3, -1),
            "MatMulIntegerToFloat": (1, 3, 5, 6),
            "DynamicQuantizeMatMul": (1, 2, 3, 4),
            "QLinearMatMul": (3, 4, 5, -1),
            "QGemm": (3, 4, 5, -1),
        }[op]
        which = _at(node, at[0])
        weight = values.weight(which)
        straight = op == "QGemm" and bool(node.int("transB"))
        extra = _at(node, at[3]) if at[3] >= 0 else ""
        if weight is not None and weight.scale is None and not weight.flip:
            scale = values.constant(_at(node, at[1])) if at[1] >= 0 else _integer_scale(node, values, which)
            weight = _quantised(weight, values, scale, _at(node, at[2]), 0 if straight else -1)
    elif op in ("MatMulNBits", "MatMulBnb4"):
        weight, straight, extra = _packed(node, values), True, _at(node, 5)
    else:
        return None
    if weight is None:
        return None
    if not straight:
        weight = weight.turned()
    quantised = op == "MatMulInteger"
    bias = _named_bias(values, extra) or values.bias_after(node.outputs[0] if node.outputs else "", quantised)
    return which, weight, bias if bias is not None and bias[1].shape == weight.shape[:1] else None


def _named_bias(values: Values, name: str) -> tuple[str, Weight] | None:
    bias = values.weight(name) if name else None
    return (name, bias) if bias is not None and len(bias.shape) == 1 else None


def _integer_scale(node: Node, values: Values, weight: str) -> Tensor | None:
    """The scale of a MatMulInteger's weight: what is multiplied next, or what is named beside the weight."""
    after = values.scale_after(node.outputs[0] if node.outputs else "")
    return after or values.constant(_stripped(weight) + "_scale")


def _quantised(weight: Weight, values: Values, scales: Tensor | None, zero: str, axis: int) -> Weight:
    """The integers with their scale and zero point along `axis` of the stored dims."""
    zeros = values.constant(zero)
    axis %= max(1, len(weight.tensor.dims))
    if scales is None:
        return replace(weight, refusal="is stored as integers, and no stored scale belongs to it")
    if zero and zeros is None:
        return replace(weight, refusal="is stored as integers, and its zero point is not stored")
    return replace(weight, scale=scales, zero=zeros, axis=axis)


def _packed(node: Node, values: Values) -> Weight | None:
    """The 4- or 8-bit weight of MatMulNBits: (outputs, blocks, bytes) with a scale per block."""
    tensor = values.constant(_at(node, 1))
    if tensor is None:
        return None
    inputs, outputs = node.int("K"), node.int("N")
    if not (0 < inputs < 2**31 and 0 < outputs < 2**31):
        return None
    bits, block = node.int("bits", 4), node.int("block_size")
    scale, zero = values.constant(_at(node, 2)), values.constant(_at(node, 3))
    blocks = -(-inputs // block) if block > 0 else 0
    why = ""
    if node.op != "MatMulNBits":
        why = f"is packed for {node.op}, which is not read; export the model again in fp16 or int8"
    elif bits not in (4, 8) or block < 1 or block % 2 or tensor.dims != (outputs, blocks, block * bits // 8):
        why = f"is packed as {tensor.dims} in {bits} bits and blocks of {block}; 4 and 8 bits are read"
    elif _at(node, 4):
        why = "is packed in an order of its own (g_idx), which is not read"
    elif scale is None or (_at(node, 3) and zero is None):
        why = "is packed, and its scales are not stored"
    flat = replace(tensor, dims=(outputs, 1, 1)) if why else tensor
    return Weight(flat, scale=scale, zero=zero, block=block, bits=bits, inner=inputs, refusal=why)


# ---- names


def _stripped(name: str) -> str:
    while (shorter := _MADE_UP.sub("", name)) != name:
        name = shorter
    return name


def _own_name(written: str) -> str | None:
    """A parameter's name, if the tensor still has one."""
    name = _stripped(written).replace(".MatMul.", ".")
    return name if _PARAMETER.fullmatch(name) else None


def _of_node(node: Node) -> str | None:
    """The module path in the node's name or metadata, as the name of its weight."""
    parts = [part for part in node.name.split("/") if part]
    if len(parts) > 1 and _PRODUCT.search(parts[-1]):
        path = parts[:-1]
        while len(path) > 1 and path[-1] == "Tensordot":  # of TensorFlow's Dense
            path.pop()
        return re.sub(r"_\._(\d+)", r".\1", ".".join(path)) + ".weight"
    if node.scope.startswith("["):
        scopes = re.findall(r"'([^'\s]*)'", node.scope)
    else:
        scopes = [part.split(":")[0].strip() for part in node.scope.split("/")]
    return f"{scopes[-2]}.weight" if len(scopes) > 1 and scopes[-2] else None


def _of_bias(bias: tuple[str, Weight] | None) -> str | None:
    own = _own_name(bias[0]) if bias is not None else None
    return own.removesuffix("bias") + "weight" if own is not None and own.endswith("bias") else None
