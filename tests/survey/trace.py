"""Where the queries and keys of an attention come from, seen in the model's own forward pass.

A `Trace` watches every torch function of one forward pass. It knows three kinds of calls: projections (an
activation times a parameter), products (two activations multiplied), and softmaxes. A product whose result
reaches a softmax through scales, masks and biases is an attention; its operands are the queries and keys,
and the last projections they came out of are where Q and K are stored. No name of a module is looked at.

Three more passes replace the output of those projections: by zeros, by ones, and by a different whole
number for each element. What then stands in the operands tells which output of which projection stands
where, up to a scale and an offset: so which rows of the weight make a head, in which order, and which key
head a query head reads. In the pass that is not replaced the operands must be exactly these outputs.

Rotary angles are 0 while watched (cosines are 1, sines 0), and norms on queries and keys are left out.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

Key = tuple[str, tuple[str, ...], int]
Tags = frozenset[tuple[Any, ...]]
NONE: Tags = frozenset()

MATMULS = {"matmul", "__matmul__", "__rmatmul__", "bmm", "mm", "baddbmm", "einsum"}
NARROW = (torch.float32, torch.float16, torch.bfloat16)
ADDITIONS = {"add", "__add__", "__radd__", "add_", "__iadd__"}
STRUCTURAL = {
    *("view", "reshape", "transpose", "permute", "t", "T", "chunk", "split", "unbind", "__getitem__", "to"),
    *("expand", "expand_as", "unsqueeze", "squeeze", "contiguous", "double", "float", "type", "type_as"),
    *("cat", "clone", "detach", "flatten", "swapaxes", "__get__", "narrow", "movedim", "repeat", "mT"),
}
# keywords of calls that are looked into, in their places
POSITIONAL: Mapping[str, tuple[str, ...]] = {
    "linear": ("input", "weight", "bias"),
    "matmul": ("input", "other"),
    "bmm": ("input", "mat2"),
    "mm": ("input", "mat2"),
    "baddbmm": ("input", "batch1", "batch2"),
    "addmm": ("input", "mat1", "mat2"),
    "softmax": ("input", "dim"),
    "conv1d": ("input", "weight", "bias"),
    "conv2d": ("input", "weight", "bias"),
    "conv3d": ("input", "weight", "bias"),
}


def _narrow(args: Any) -> bool:
    return any(isinstance(a, torch.dtype) and a in NARROW for a in args)


def _positional(name: str, args: Any, kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    args, kwargs = list(args), dict(kwargs)
    for place, keyword in enumerate(POSITIONAL[name]):
        if place == len(args) and keyword in kwargs:
            args.append(kwargs.pop(keyword))
    return tuple(args), kwargs


@dataclass
class Projection:
    """One call of an activation times a parameter: y[token, row] = x[token] . weight[row] + bias[row]."""

    key: Key
    x: torch.Tensor  # as it went in
    weight: torch.Tensor | None  # (rows, inputs); None where the call mixes tokens
    bias: torch.Tensor | None
    parameters: tuple[str, ...]
    module: str
    shape: tuple[int, ...]  # of the output
    place: Callable[[torch.Tensor], torch.Tensor]  # (tokens, rows) -> the output's own shape
    y: torch.Tensor | None = None

    @property
    def rows(self) -> int:
        assert self.weight is not None
        return int(self.weight.shape[0])


@dataclass
class Product:
    """Two activations multiplied: `left` (..., T, d) and `right` (..., S, d)."""

    number: int
    left: torch.Tensor
    right: torch.Tensor
    sources: tuple[Tags, Tags]
    result: torch.Tensor
    module: str


@dataclass
class Softmax:
    products: list[Product]
    probabilities: torch.Tensor
    dim: int
    module: str


@dataclass
class NormCall:
    module: str
    x: torch.Tensor
    y: torch.Tensor
    tags: Tags


class Trace(TorchFunctionMode):
    """One watched forward pass. `replace` gives the output of a projection, or None to leave it."""

    def __init__(
        self,
        model: torch.nn.Module,
        *,
        replace: Callable[[Projection], torch.Tensor | None] | None = None,
        without_norms: frozenset[str] = frozenset(),
        skip_normalize: frozenset[Key] = frozenset(),
    ) -> None:
        super().__init__()
        self.model, self.replace, self.without_norms = model, replace, without_norms
        self.skip_normalize = skip_normalize
        self.names = {id(p): n for n, p in model.named_parameters(remove_duplicate=False)}
        self.tags: dict[int, tuple[torch.Tensor, Tags]] = {}
        self.stack: list[str] = [""]
        self.counts: dict[tuple[str, tuple[str, ...]], int] = {}
        self.projections: dict[Key, Projection] = {}
        self.products: list[Product] = []
        self.softmaxes: list[Softmax] = []
        self.norms: list[NormCall] = []
        self.normalized: set[Key] = set()
        self.sums: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []
        self.touched: set[str] = set()

    # -- modules ----------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def watching(self) -> Iterator[Trace]:
        hooks: list[Any] = []
        for path, module in self.model.named_modules():
            hooks += self._hooks(path, module)
        try:
            with torch.no_grad(), self:
                yield self
        finally:
            for hook in hooks:
                hook.remove()

    def _hooks(self, path: str, module: torch.nn.Module) -> list[Any]:
        norm = is_norm(module)

        def before(module: Any, args: Any) -> None:
            self.stack.append(path)

        def after(module: Any, args: Any, output: Any) -> Any:
            self.stack.pop()
            if norm and args and isinstance(args[0], torch.Tensor) and isinstance(output, torch.Tensor):
                self.norms.append(NormCall(path, args[0], output, self._of(args[0])))
                if path in self.without_norms:
                    return args[0]
            return None

        return [module.register_forward_pre_hook(before), module.register_forward_hook(after)]

    # -- functions --------------------------------------------------------------------------------------------

    def _of(self, value: Any) -> Tags:
        if isinstance(value, torch.Tensor):
            if id(value) in self.names:
                return frozenset({("param", self.names[id(value)])})
            found = self.tags.get(id(value))
            return found[1] if found else NONE
        if isinstance(value, (tuple, list)):
            return frozenset().union(*(self._of(v) for v in value)) if value else NONE
        if isinstance(value, dict):
            return self._of(list(value.values()))
        return NONE

    def _tag(self, value: Any, tags: Tags) -> None:
        if isinstance(value, torch.Tensor):
            if id(value) not in self.names:
                self.tags[id(value)] = (value, tags)
        elif isinstance(value, (tuple, list)):
            for v in value:
                self._tag(v, tags)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        # some turn queries and keys, or their scores, in single precision: here everything is double
        args = (
            tuple(torch.float64 if isinstance(a, torch.dtype) and a in NARROW else a for a in args)
            if _narrow(args)
            else args
        )
        if kwargs.get("dtype") in NARROW:
            kwargs = {**kwargs, "dtype": torch.float64}
        if kwargs and name in POSITIONAL:
            args, kwargs = _positional(name, args, kwargs)
        if name in ("scaled_dot_product_attention", "_scaled_dot_product_attention"):
            with self:
                return attention(*args, **kwargs)
        if name == "multi_head_attention_forward":
            with self:
                return multi_head(*args, **kwargs)
        if name in ("cos", "cos_"):
            return torch.ones_like(args[0])
        if name in ("sin", "sin_"):
            return torch.zeros_like(args[0])
        if name == "polar":
            return torch.polar(args[0], torch.zeros_like(args[1]))
        found = self._projection(func, name, args, kwargs)
        if found is not None:
            return found
        if name in MATMULS:
            return self._product(func, name, args, kwargs)
        if name == "normalize" and func is F.normalize:
            projected = {t[1] for t in self._of(args[0]) if t[0] == "proj"}
            self.normalized |= projected
            if projected & self.skip_normalize:
                return args[0]
        out = func(*args, **kwargs)
        tags = self._of(args) | self._of(kwargs)
        if name in ("softmax", "_softmax"):
            return self._softmax(out, tags, args, kwargs)
        if not tags:
            return out
        if name == "__setitem__":
            self._tag(args[0], without_parameters(tags))
            return out
        parameters_only = all(t[0] == "param" for t in tags)
        if not (parameters_only and name in STRUCTURAL):
            tags = without_parameters(tags)
        if name in ADDITIONS and len(args) > 1 and all(isinstance(a, torch.Tensor) for a in args[:2]):
            self.sums.append((args[0], args[1], out))
        self._tag(out, tags)
        return out

    def _softmax(self, out: Any, tags: Tags, args: Any, kwargs: Any) -> Any:
        products = [self.products[t[1]] for t in tags if t[0] == "prod"]
        if products:
            dim = kwargs.get("dim", args[1] if len(args) > 1 and isinstance(args[1], int) else -1)
            module = self.stack[-1]
            self.softmaxes.append(Softmax(sorted(products, key=lambda p: p.number), out, dim, module))
            self._tag(out, frozenset({("prob",)}))
        return out

    def _product(self, func: Any, name: str, args: Any, kwargs: Any) -> Any:
        out = func(*args, **kwargs)
        tags = self._of(args) | self._of(kwargs)
        if ("prob",) in tags:
            self._tag(out, NONE)
            return out
        operands = _operands(name, args)
        if operands is None or not tags:
            self._tag(out, without_parameters(tags))
            return out
        left, right, original = operands
        sources = (self._of(original[0]), self._of(original[1]))
        product = Product(len(self.products), left, right, sources, out, self.stack[-1])
        self.products.append(product)
        rest = self._of(args[0]) if name == "baddbmm" else NONE
        kept = frozenset(t for t in rest if t[0] == "prod")
        self._tag(out, kept | {("prod", product.number)})
        return out

    def _projection(self, func: Any, name: str, args: Any, kwargs: Any) -> Any:
        call = _as_projection(func, name, args, kwargs, self._is_parameter)
        if call is None:
            return None
        x, weight, bias, place, parameter_values = call
        parameters = tuple(sorted({t[1] for v in parameter_values for t in self._of(v)}))
        where = (self.stack[-1], parameters)
        number = self.counts[where] = self.counts.get(where, -1) + 1
        out = func(*args, **kwargs)
        key = (*where, number)
        made = Projection(key, x, weight, bias, parameters, where[0], tuple(out.shape), place, out)
        self.projections[key] = made
        self.touched |= set(parameters)
        if self.replace is not None and weight is not None:
            other = self.replace(made)
            if other is not None:
                out = made.y = other
        self._tag(out, frozenset({("proj", key)}))
        return out

    def _is_parameter(self, value: Any) -> bool:
        tags = self._of(value)
        return isinstance(value, torch.Tensor) and bool(tags) and all(t[0] == "param" for t in tags)


def without_parameters(tags: Tags) -> Tags:
    return frozenset(t for t in tags if t[0] != "param")


def is_norm(module: Any) -> bool:
    return "Norm" in type(module).__name__


# ---- the calls ----------------------------------------------------------------------------------------------


def _as_projection(func: Any, name: str, args: Any, kwargs: Any, is_parameter: Callable[[Any], bool]) -> Any:
    """(x, weight (rows, inputs), bias, place, parameters) of a call, None if it is not a projection."""
    if name == "linear":
        x, w = args[0], args[1] if len(args) > 1 else kwargs["weight"]
        b = args[2] if len(args) > 2 else kwargs.get("bias")
        if not is_parameter(w):
            return None
        shape = (*x.shape[:-1], w.shape[0])
        return x, w, b, lambda c: c.reshape(shape), [w]
    if name == "addmm" and len(args) > 2 and is_parameter(args[2]):
        b, x, m = args[:3]
        return x, m.T, b, lambda c: c, [m]
    if (
        name in ("matmul", "__matmul__", "mm")
        and len(args) > 1
        and is_parameter(args[1])
        and not is_parameter(args[0])
    ):
        x, m = args[:2]
        if m.ndim != 2:
            return None
        shape = (*x.shape[:-1], m.shape[1])
        return x, m.T, None, lambda c: c.reshape(shape), [m]
    if name in ("conv1d", "conv2d", "conv3d") and isinstance(args[0], torch.Tensor) and is_parameter(args[1]):
        return _as_convolution(args, kwargs)
    if name == "einsum":
        return _as_einsum(args, is_parameter)
    return None


def _as_convolution(args: Any, kwargs: Any) -> Any:
    x, w = args[:2]
    b = args[2] if len(args) > 2 else kwargs.get("bias")
    groups = args[6] if len(args) > 6 else kwargs.get("groups", 1)
    if any(n != 1 for n in w.shape[2:]):
        return x, None, b, lambda c: c, [w]
    small = w.reshape(groups, w.shape[0] // groups, -1)
    full = torch.block_diag(*small) if groups > 1 else small[0]
    batch, places = x.shape[0], tuple(x.shape[2:])

    def place(codes: torch.Tensor) -> torch.Tensor:
        return codes.reshape(batch, -1, full.shape[0]).transpose(1, 2).reshape(batch, full.shape[0], *places)

    return x.flatten(2).transpose(1, 2), full, b, place, [w]


def _as_einsum(args: Any, is_parameter: Callable[[Any], bool]) -> Any:
    equation = args[0]
    operands = args[1] if len(args) == 2 and isinstance(args[1], (tuple, list)) else args[1:]
    if not isinstance(equation, str) or len(operands) != 2 or "..." in equation or "->" not in equation:
        return None
    a, b = operands
    left, out = equation.replace(" ", "").split("->")
    la, lb = left.split(",")
    if is_parameter(a) and not is_parameter(b):
        a, b, la, lb = b, a, lb, la
    if not is_parameter(b) or is_parameter(a):
        return None
    contracted = [c for c in lb if c in la and c not in out]
    rows = [c for c in lb if c not in la and c in out]
    if len(contracted) + len(rows) != len(lb) or not rows:
        return None
    tokens = [c for c in la if c not in contracted]
    w = b.permute([lb.index(c) for c in rows + contracted])
    w = w.reshape(int(np.prod([b.shape[lb.index(c)] for c in rows])), -1)
    x = a.permute([la.index(c) for c in tokens + contracted])
    x = x.reshape(*(a.shape[la.index(c)] for c in tokens), -1)
    sizes = [a.shape[la.index(c)] for c in tokens] + [b.shape[lb.index(c)] for c in rows]
    order = [(tokens + rows).index(c) for c in out]
    return x, w, None, lambda codes: codes.reshape(sizes).permute(order), [b]


def _operands(name: str, args: Any) -> Any:
    """(left (..., T, d), right (..., S, d), the operands as given) of a product of two activations."""
    if name == "einsum":
        return _einsum_operands(args)
    a, b = args[1:3] if name == "baddbmm" else args[:2]
    if name == "__rmatmul__":
        a, b = b, a
    if not (isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor)) or a.ndim < 2 or b.ndim < 2:
        return None
    return a, b.transpose(-1, -2), (a, b)


def _einsum_operands(args: Any) -> Any:
    equation = args[0]
    operands = args[1] if len(args) == 2 and isinstance(args[1], (tuple, list)) else args[1:]
    if not isinstance(equation, str) or len(operands) != 2 or "->" not in equation:
        return None
    left, out = equation.replace(" ", "").split("->")
    la, lb = left.split(",")
    a, b = operands
    if "..." in equation:
        letters = [c for c in "ZYXWVU" if c not in equation]
        for which, value in (("la", a), ("lb", b)):
            labels = la if which == "la" else lb
            if "..." in labels:
                extra = "".join(letters[: value.ndim - len(labels.replace("...", ""))])
                labels = labels.replace("...", extra)
                out = out.replace("...", extra)
                la, lb = (labels, lb) if which == "la" else (la, labels)
    contracted = [c for c in la if c in lb and c not in out]
    shared = [c for c in la if c in lb and c in out]
    only_a = [c for c in la if c not in lb]
    only_b = [c for c in lb if c not in la]
    if len(contracted) != 1 or len(only_a) != 1 or len(only_b) != 1:
        return None
    # the softmax runs over the last label; whichever operand has it holds the keys
    if out[-1] in only_a:
        a, b, la, lb, only_a, only_b = b, a, lb, la, only_b, only_a
    left_ = a.permute([la.index(c) for c in shared + only_a + contracted])
    right = b.permute([lb.index(c) for c in shared + only_b + contracted])
    return left_, right, (a, b)


def attention(
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    """What scaled_dot_product_attention is documented to do, in steps that can be watched."""
    if enable_gqa:
        key = key.repeat_interleave(query.shape[-3] // key.shape[-3], -3)
        value = value.repeat_interleave(query.shape[-3] // value.shape[-3], -3)
    scores = torch.matmul(query, key.transpose(-1, -2))
    scores = scores * (query.shape[-1] ** -0.5 if scale is None else scale)
    if is_causal:
        allowed = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
        scores = scores.masked_fill(~allowed, -torch.inf)
    if attn_mask is not None:
        if attn_mask.dtype == torch.bool:
            scores = scores.masked_fill(~attn_mask, -torch.inf)
        else:
            scores = scores + attn_mask
    return torch.matmul(scores.softmax(-1), value)


def multi_head(
    query: Any,
    key: Any,
    value: Any,
    embed_dim_to_check: int,
    num_heads: int,
    in_proj_weight: Any,
    in_proj_bias: Any,
    bias_k: Any,
    bias_v: Any,
    add_zero_attn: bool,
    dropout_p: float,
    out_proj_weight: Any,
    out_proj_bias: Any,
    training: bool = True,
    key_padding_mask: Any = None,
    need_weights: bool = True,
    attn_mask: Any = None,
    use_separate_proj_weight: bool = False,
    q_proj_weight: Any = None,
    k_proj_weight: Any = None,
    v_proj_weight: Any = None,
    static_k: Any = None,
    static_v: Any = None,
    average_attn_weights: bool = True,
    is_causal: bool = False,
) -> Any:
    """What torch's multi_head_attention_forward does, (T, B, d) in and out, in steps that can be watched."""
    weights = (
        (q_proj_weight, k_proj_weight, v_proj_weight) if use_separate_proj_weight else in_proj_weight.chunk(3)
    )
    biases = (None, None, None) if in_proj_bias is None else in_proj_bias.chunk(3)
    flat = query.ndim == 2
    if flat:
        query, key, value = (t.unsqueeze(1) for t in (query, key, value))
    q, k, v = (F.linear(x, w, b) for x, w, b in zip((query, key, value), weights, biases, strict=True))
    q, k, v = (t.reshape(t.shape[0], t.shape[1], num_heads, -1).permute(1, 2, 0, 3) for t in (q, k, v))
    scores = torch.matmul(q, k.transpose(-1, -2)) * q.shape[-1] ** -0.5
    if attn_mask is not None:
        mask = attn_mask if attn_mask.ndim == 2 else attn_mask.reshape(scores.shape)
        scores = scores.masked_fill(mask, -torch.inf) if mask.dtype == torch.bool else scores + mask
    if key_padding_mask is not None:
        padding = key_padding_mask[:, None, None]
        scores = scores.masked_fill(padding, -torch.inf) if padding.dtype == torch.bool else scores + padding
    p = scores.softmax(-1)
    out = torch.matmul(p, v).permute(2, 0, 1, 3).flatten(2)
    out = F.linear(out, out_proj_weight, out_proj_bias)
    if flat:
        out = out.squeeze(1)
    return out, (p.mean(1) if average_attn_weights else p) if need_weights else None
