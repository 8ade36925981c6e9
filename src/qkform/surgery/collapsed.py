"""Attention whose two circuits are the parameters: each one free matrix per head, or a product of two factors.

A head scores with W_QK = W_Q W_K^T and moves W_OV = W_V W_O. Training the product as one matrix ("collapsed") or
through its factors ("factorized") is the same function and another dynamics: factors multiply a circuit's rate by
about twice its singular value. For small models: a collapsed head has d_model^2 parameters in place of
2 d_model d_head, and queries, keys and values that are d_model wide.
"""

from __future__ import annotations

import math
from itertools import takewhile
from typing import Any, Literal

import torch
from torch import nn
from torch.nn import functional as F

from qkform.errors import AttentionError, SurgeryError

Kind = Literal["collapsed", "factorized"]
STOCK = "_collapsed_from"  # attribute of an attention that was collapsed: what it was


class CircuitAttention(nn.Module):  # type: ignore[misc]
    """Multi-head attention with its circuits as parameters; called as nn.MultiheadAttention is.

    ::

        s_ij = scale * (x_i W_QK + b_K) y_j^T         collapsed
        s_ij = scale * (x_i W_Q + b_Q) (y_j W_K)^T    factorized
        o_i  = sum_h sum_j softmax(s)_ij z_j W_OV + b_O,       W_OV = W_V W_O where it is factorized

    x, y, z are the inputs of queries, keys and values. A bias on the keys adds to a row of scores what softmax cancels,
    and one on the values a constant that b_O holds, so there are none.

    W_QK (n_heads, d_model, d_key), b_K (n_heads, d_key); or W_Q (n_heads, d_model, d_head), W_K (n_heads, d_key,
    d_head), b_Q (n_heads, d_head). W_OV (n_heads, d_value, d_model); or W_V (n_heads, d_value, d_head),
    W_O (n_heads, d_head, d_model). b_O (d_model,). At the start factors are normal with variance 1 / inputs, and free
    matrices have the variance of such a product.

    qk, ov      "collapsed" or "factorized", each circuit by itself
    d_head      width of the factors; d_model // n_heads if not given. A collapsed circuit only takes its start from it
    scale       of the scores; d_head ** -0.5 if not given
    bias        whether there are b_K (or b_Q) and b_O
    causal      mask the future in every call
    dropout     of attention weights in training

    >>> attention = CircuitAttention(16, 2, causal=True)
    >>> attention(torch.zeros(3, 5, 16))[0].shape
    torch.Size([3, 5, 16])
    """

    in_proj_bias = None  # how nn.TransformerEncoderLayer sees that its fast path is not for this module

    def __init__(
        self,
        d_model: int,
        n_heads: int,
        *,
        qk: Kind = "collapsed",
        ov: Kind = "collapsed",
        d_head: int | None = None,
        d_key: int | None = None,
        d_value: int | None = None,
        scale: float | None = None,
        bias: bool = False,
        causal: bool = False,
        dropout: float = 0.0,
        batch_first: bool = True,
    ) -> None:
        super().__init__()
        for name, kind in (("qk", qk), ("ov", ov)):
            if kind not in ("collapsed", "factorized"):
                raise SurgeryError(f"{name} is {kind!r}; expected 'collapsed' or 'factorized'")
        sizes = {"d_model": d_model, "n_heads": n_heads, "d_head": d_head, "d_key": d_key, "d_value": d_value}
        for name, size in sizes.items():
            if size is not None and size < 1:
                raise SurgeryError(f"{name} is {size}; expected a number from 1")
        if not 0.0 <= dropout <= 1.0:
            raise SurgeryError(f"dropout is {dropout}; expected a probability")
        if d_head is None and d_model % n_heads:
            raise SurgeryError(f"d_model {d_model} is not a multiple of {n_heads} heads; give d_head")
        self.d_model, self.n_heads, self.d_head = d_model, n_heads, d_head or d_model // n_heads
        self.d_key, self.d_value = d_key or d_model, d_value or d_model
        self.qk: Kind = qk
        self.ov: Kind = ov
        self.scale = self.d_head**-0.5 if scale is None else scale
        self.causal, self.dropout, self.batch_first = causal, dropout, batch_first
        h, d, width = n_heads, d_model, self.d_head
        if qk == "collapsed":
            self.W_QK = nn.Parameter(torch.empty(h, d, self.d_key))
            self.register_parameter("b_K", nn.Parameter(torch.zeros(h, self.d_key)) if bias else None)
        else:
            self.W_Q = nn.Parameter(torch.empty(h, d, width))
            self.W_K = nn.Parameter(torch.empty(h, self.d_key, width))
            self.register_parameter("b_Q", nn.Parameter(torch.zeros(h, width)) if bias else None)
        if ov == "collapsed":
            self.W_OV = nn.Parameter(torch.empty(h, self.d_value, d))
        else:
            self.W_V = nn.Parameter(torch.empty(h, self.d_value, width))
            self.W_O = nn.Parameter(torch.empty(h, width, d))
        self.register_parameter("b_O", nn.Parameter(torch.zeros(d)) if bias else None)
        self.reset_parameters()

    @property
    def num_heads(self) -> int:
        """As nn.MultiheadAttention calls them."""
        return self.n_heads

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def reset_parameters(self) -> None:
        """Factors with variance 1 / inputs, free matrices with that of their product, biases zero."""
        for name, parameter in self.named_parameters():
            if name.startswith("b_"):
                parameter.zero_()
                continue
            inputs = {"W_Q": self.d_model, "W_K": self.d_key, "W_V": self.d_value}.get(
                name, self.n_heads * self.d_head
            )
            variance = 1 / inputs
            if name == "W_QK":
                variance = self.d_head / (self.d_model * self.d_key)
            elif name == "W_OV":
                variance = 1 / (self.d_value * self.n_heads)
            parameter.normal_(0.0, math.sqrt(variance))

    def circuit_qk(self) -> torch.Tensor:
        """W_QK per head, (n_heads, d_model, d_key), whichever way it is held."""
        return self.W_QK if self.qk == "collapsed" else self.W_Q @ self.W_K.transpose(1, 2)

    def circuit_ov(self) -> torch.Tensor:
        """W_OV per head, (n_heads, d_value, d_model), whichever way it is held."""
        return self.W_OV if self.ov == "collapsed" else self.W_V @ self.W_O

    def key_bias(self) -> torch.Tensor | None:
        """b_K (n_heads, d_key): what a key adds to its scores, whoever asks; None without bias."""
        if self.qk == "collapsed":
            return self.b_K
        return None if self.b_Q is None else (self.W_K @ self.b_Q[:, :, None])[:, :, 0]

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor | None = None,
        value: torch.Tensor | None = None,
        key_padding_mask: torch.Tensor | None = None,
        need_weights: bool = True,
        attn_mask: torch.Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The output, of the shape of `query`, and the attention weights where they are needed.

        query              (batch, queries, d_model); (queries, batch, d_model) without batch_first; or without a batch
        key, value         the same with d_key and d_value; where they are left out, query
        attn_mask          (queries, keys), (batch * n_heads, queries, keys) or with heads as a dimension of their own;
                           bool with True for what is not allowed, or added to the scores
        key_padding_mask   (batch, keys), the same
        is_causal          mask the future; with an attn_mask, that mask alone counts, as in nn.MultiheadAttention
        """
        key = query if key is None else key
        value = key if value is None else value
        single = query.ndim == 2
        swap = not self.batch_first and not single
        x, y, z = (t[None] if single else t.transpose(0, 1) if swap else t for t in (query, key, value))
        mask = self._mask(x, y, key_padding_mask, attn_mask, is_causal)
        q, k, v = self._queries(x), self._keys(y), self._values(z)
        if need_weights:
            scores = self.scale * q @ k.transpose(-1, -2)
            weights = torch.softmax(scores if mask is None else scores + mask, -1)
            mixed = F.dropout(weights, self.dropout, self.training) @ v
        else:
            weights = None
            drop = self.dropout if self.training else 0.0
            mixed = F.scaled_dot_product_attention(
                q, k, v, mask, drop, scale=self.scale
            )  # (B, H, N, d_value or d_head)
        out = torch.einsum("bhnv,hvd->bnd", mixed, self.W_OV if self.ov == "collapsed" else self.W_O)
        if self.b_O is not None:
            out = out + self.b_O
        if weights is not None and average_attn_weights:
            weights = weights.mean(1)
        if single:
            return out[0], None if weights is None else weights[0]
        return (out.transpose(0, 1) if swap else out), weights

    def _queries(self, x: torch.Tensor) -> torch.Tensor:
        weight, bias = (self.W_QK, self.b_K) if self.qk == "collapsed" else (self.W_Q, self.b_Q)
        q = torch.einsum("bnd,hde->bhne", x, weight)
        return q if bias is None else q + bias[:, None, :]

    def _keys(self, y: torch.Tensor) -> torch.Tensor:
        if self.qk == "collapsed":
            return y[:, None].expand(-1, self.n_heads, -1, -1)
        return torch.einsum("bnd,hde->bhne", y, self.W_K)

    def _values(self, z: torch.Tensor) -> torch.Tensor:
        if self.ov == "collapsed":
            return z[:, None].expand(-1, self.n_heads, -1, -1)
        return torch.einsum("bnd,hde->bhne", z, self.W_V)

    def _mask(
        self,
        x: torch.Tensor,
        y: torch.Tensor,
        padding: torch.Tensor | None,
        mask: torch.Tensor | None,
        is_causal: bool,
    ) -> torch.Tensor | None:
        """What is added to the scores, broadcastable to (batch, n_heads, queries, keys); None for nothing."""
        batch, n, m, h = len(x), x.shape[1], y.shape[1], self.n_heads
        added = []
        if padding is not None:
            refuse_mask("key_padding_mask", padding, [(batch, m), (m,)] if batch == 1 else [(batch, m)])
        if mask is not None:
            per_head = [(b, each, n, m) for b in (1, batch) for each in (1, h)]
            refuse_mask("attn_mask", mask, [(n, m), (batch * h, n, m), *per_head])
            mask = mask.view(-1, self.n_heads, n, m) if mask.ndim == 3 else mask
            added.append(additive(mask, x.dtype).to(x.dtype))
        if padding is not None:
            added.append(additive(padding.reshape(-1, 1, 1, m), x.dtype).to(x.dtype))
        if self.causal or (is_causal and mask is None):
            future = torch.ones(n, m, dtype=torch.bool, device=x.device).triu(1 + m - n)
            added.append(additive(future, x.dtype))
        return None if not added else sum(added[1:], added[0])

    def extra_repr(self) -> str:
        return f"{self.d_model}, {self.n_heads}, qk={self.qk!r}, ov={self.ov!r}, d_head={self.d_head}"


def refuse_mask(name: str, mask: torch.Tensor, shapes: list[tuple[int, ...]]) -> None:
    """AttentionError for a mask that is neither bool nor added, or has none of the shapes."""
    if tuple(mask.shape) not in shapes:
        raise AttentionError(
            f"{name} has shape {tuple(mask.shape)}; expected {' or '.join(map(str, dict.fromkeys(shapes)))}"
        )
    if mask.dtype != torch.bool and not mask.is_floating_point():
        raise AttentionError(f"{name} holds {mask.dtype}; expected bool or a floating type")


def additive(mask: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """What is added to scores for a mask as torch's modules have it, True for what is hidden; floats as they are."""
    if mask.dtype != torch.bool:
        return mask
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill(mask, -math.inf)


def beside(path: str, place: str) -> tuple[int, tuple[str, ...]]:
    """A path as seen from another: how far up, and from there down.

    >>> beside("layer.0.attention.self", "layer.0.attention.output.dense")
    (1, ('output', 'dense'))
    """
    here, there = _words(path), _words(place)
    same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(here, there, strict=False)))
    return len(here) - same, tuple(there[same:])


def projections(module: Any, path: str) -> dict[str, str]:
    """Where the projections of a Hugging Face attention that was collapsed are, in a model that has it at `path`.

    That may be a part or a whole of the model that was collapsed. SurgeryError where they are outside of it.
    """
    here, found = _words(path), {}
    for side, (up, down) in getattr(module, STOCK)["places"].items():
        if up > len(here):
            raise SurgeryError(
                f"{path or 'the attention'} was collapsed together with {'.'.join(down)}, which is not in what was "
                "given; give the part of the model that has both"
            )
        found[side] = ".".join([*here[: len(here) - up], *down])
    return found


def _words(path: str) -> list[str]:
    return path.split(".") if path else []


def balanced(product: torch.Tensor, rank: int) -> tuple[torch.Tensor, torch.Tensor, float]:
    """Factors U (..., n, rank), V (..., m, rank) of the best product U V^T of that rank, with U^T U = V^T V diagonal.

    Computed in float64 and returned in the type of `product`, with the largest relative error that is left, in the
    Frobenius norm of a matrix: 0.0 up to rounding where no matrix has a higher rank.
    """
    u, s, vh = torch.linalg.svd(product.detach().double(), full_matrices=False)
    root = s[..., :rank].sqrt()
    short = rank - root.shape[-1]
    left, right = u[..., :rank] * root[..., None, :], vh.transpose(-1, -2)[..., :rank] * root[..., None, :]
    if short > 0:
        left, right = (F.pad(f, (0, short)) for f in (left, right))
    lost = s[..., rank:].square().sum(-1).sqrt() / s.square().sum(-1).sqrt().clamp_min(
        torch.finfo(s.dtype).tiny
    )
    return left.to(product.dtype), right.to(product.dtype), float(lost.max()) if lost.numel() else 0.0


def balanced_qk(
    w_qk: torch.Tensor, b_k: torch.Tensor | None, rank: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, float]:
    """W_Q (..., d, rank), W_K (..., m, rank), b_Q (..., rank) of [W_QK; b_K] = [W_Q; b_Q] W_K^T, and what is left.

    The bias is one more row, so that [W_Q; b_Q]^T [W_Q; b_Q] = W_K^T W_K. What came from factors has that rank with
    this row; in the row space of W_QK alone b_K need not be, as where queries are pruned or begin at zero. And it is
    this balance that gradient flow conserves. The error is that of `balanced`, of the extended matrix.
    """
    row = torch.zeros_like(w_qk[..., 0, :]) if b_k is None else b_k
    extended, w_k, lost = balanced(torch.cat([w_qk, row[..., None, :]], -2), rank)
    return extended[..., :-1, :], w_k, extended[..., -1, :], lost


def converted(
    attention: CircuitAttention, *, qk: Kind, ov: Kind, rank: int | None = None
) -> tuple[Any, float]:
    """The same attention with its circuits held as asked, and the largest relative error of what a rank cut off.

    A new module; factors are balanced, W_Q with its bias as one more row, `rank` wide (d_head if None). A circuit that
    is factorized already with that width keeps its factors.
    """
    old = attention
    width = rank or old.d_head
    weight = old.W_QK if old.qk == "collapsed" else old.W_Q
    new = CircuitAttention(
        old.d_model, old.n_heads, qk=qk, ov=ov, d_head=width, d_key=old.d_key, d_value=old.d_value,
        scale=old.scale, bias=old.b_O is not None, causal=old.causal, dropout=old.dropout,
        batch_first=old.batch_first,
    ).to(weight)  # fmt: skip
    new.train(old.training)
    lost = [0.0]
    with torch.no_grad():
        if qk == old.qk == "factorized" and width == old.d_head:
            _put(new, W_Q=old.W_Q, W_K=old.W_K, b_Q=old.b_Q)
        elif qk == "collapsed":
            # float64: the product of float32 factors is then as good as float32 can hold it
            whole = old.W_QK if old.qk == "collapsed" else old.W_Q.double() @ old.W_K.double().transpose(1, 2)
            _put(new, W_QK=whole, b_K=old.key_bias())
        else:
            left, right, bias, error = balanced_qk(old.circuit_qk(), old.key_bias(), width)
            lost.append(error)
            _put(new, W_Q=left, W_K=right, b_Q=bias)
        if ov == old.ov == "factorized" and width == old.d_head:
            _put(new, W_V=old.W_V, W_O=old.W_O)
        elif ov == "collapsed":
            _put(new, W_OV=old.W_OV if old.ov == "collapsed" else old.W_V.double() @ old.W_O.double())
        else:
            left, right, error = balanced(old.circuit_ov(), width)
            lost.append(error)
            _put(new, W_V=left, W_O=right.transpose(1, 2))
        _put(new, b_O=old.b_O)
    return new, max(lost)


def _put(module: nn.Module, **values: torch.Tensor | None) -> None:
    for name, value in values.items():
        own = getattr(module, name)
        if own is not None and value is not None:
            own.copy_(value)


def refuse_loss(path: str, lost: float, rank: int, like: torch.Tensor, truncate: bool) -> None:
    """SurgeryError where factors of a rank leave more than rounding of collapsed matrices such as `like`."""
    tolerance = 10 * like.shape[-1] * torch.finfo(like.dtype).eps
    if lost > tolerance and not truncate:
        raise SurgeryError(
            f"{path or 'the attention'}: a collapsed matrix (W_QK with b_K as one more row, or W_OV) has a rank above "
            f"{rank}; its factors would leave a "
            f"relative error of {lost:.2g}: pass truncate=True to allow that, or a higher rank for a CircuitAttention"
        )
