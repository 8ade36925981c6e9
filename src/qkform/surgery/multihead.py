"""`ChangedMultiheadAttention`: called as nn.MultiheadAttention is, with another score of a token with itself."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from qkform.attention import decoupled_attention, exclusive_attention, reference
from qkform.errors import AttentionError, SurgeryError
from qkform.surgery.collapsed import additive, refuse_mask

Kind = Literal["decoupled", "exclusive", "no-diagonal"]
# Queries (B, H, N, d_head), keys of the tokens, the mask to (B, H, N, M) or None, the scale (None: 1 / sqrt(d_head))
Observer = Callable[[Tensor, Tensor, Tensor | None, float | None], None]


class ChangedMultiheadAttention(nn.MultiheadAttention):  # type: ignore[misc]
    """An nn.MultiheadAttention whose score is changed; made by `attach`, from a module that exists.

    It is called, and answers, as nn.MultiheadAttention does, with these differences: the key has to be the query
    (SurgeryError otherwise; the value may be another tensor), and a token that may attend to nothing gets zeros.
    With `need_weights` the weights are those of the changed attention (exclusive attention has standard ones).
    The hint `is_causal` counts where nn.MultiheadAttention lets it: without padding, and where no weights are wanted.
    """

    kind: Kind
    self_score: nn.Module  # where the kind is "decoupled"
    site_path: str  # where it was in the model that was changed, for messages
    observe: Observer | None = None  # is shown every call, which is then one of standard attention

    # The fused inference paths of nn.TransformerEncoderLayer and, when it is built, nn.TransformerEncoder read the
    # weights and never call the module. They keep away where the projections are not one weight: so this says, always.
    # Here `in_proj_weight` tells how it is.
    _qkv_same_embed_dim = property(lambda self: False)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """The output in the shape of the query, and the weights or None; arguments as of nn.MultiheadAttention."""
        self._refuse_cross_attention(query, key, value)
        if query.is_nested:
            return self._nested(query, value, key_padding_mask, need_weights, attn_mask, is_causal)
        batched = query.dim() == 3
        if not batched and key_padding_mask is not None:
            key_padding_mask = key_padding_mask[None]
        x = self._batch(query)  # (B, N, d_model): what W_Q and W_K see
        value = x if value is query else self._batch(value)
        q, k, v = self._heads(x, value)  # (B, H, N, d_head); k and v with the extra keys at the end
        if is_causal and attn_mask is None:
            raise AttentionError(
                f"{self._name}: is_causal is a hint about attn_mask, which is None; give both"
            )
        extra = k.shape[-2] - q.shape[-2]
        # The hint stands for the mask where nn.MultiheadAttention lets it; with extra keys it would hide them.
        hinted = is_causal and key_padding_mask is None and not need_weights and not extra
        mask = self._mask(x, key_padding_mask, None if hinted else attn_mask, extra)
        dropout = self.dropout if self.training else 0.0
        out, weights = self._attended(
            x, q, k, v, need_weights, attn_mask=mask, dropout_p=dropout, is_causal=hinted
        )
        out = self.out_proj(out.transpose(1, 2).flatten(2))  # (B, N, d_model)
        if weights is not None and average_attn_weights:
            weights = weights.mean(1)
        if not batched:
            return out[0], None if weights is None else weights[0]
        return out if self.batch_first else out.transpose(0, 1), weights

    def extra_repr(self) -> str:
        return f"kind={self.kind!r}"

    def _attended(
        self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, need_weights: bool, **given: Any
    ) -> tuple[Tensor, Tensor | None]:
        """The values added up, (B, H, N, d_head), and the weights (B, H, N, N + extra keys) where they are needed."""
        if self.kind == "exclusive":
            return self._exclusive(q, k, v, need_weights, **given)
        if self.kind == "no-diagonal":
            score = torch.full_like(q[..., 0], -math.inf)
        else:
            score = self.self_score(x)  # (B, H, N)
        if self.observe is not None:
            mask, n = given["attn_mask"], q.shape[2]
            self.observe(q, k[:, :, :n], None if mask is None else mask.expand(*mask.shape[:2], n, -1), None)
            # Standard attention goes on to the next layer: what is observed there is the model as it was.
            score = (q * k[:, :, :n]).sum(-1)
        if not need_weights:
            return decoupled_attention(q, k, v, score, query_start=0, **given), None
        dropout = given.pop("dropout_p")
        weights = reference.decoupled_weights(q, k, score, query_start=0, **given).to(v.dtype)
        weights = torch.dropout(weights, dropout, dropout > 0)
        return weights @ v, weights

    @staticmethod
    def _exclusive(
        q: Tensor, k: Tensor, v: Tensor, need_weights: bool, **given: Any
    ) -> tuple[Tensor, Tensor | None]:
        """Exclusive attention changes what is added up, not the weights: those are standard ones, before dropout."""
        out = exclusive_attention(q, k, v, query_start=0, **given)
        if not need_weights:
            return out, None
        del given["dropout_p"]
        own = (q * k[:, :, : q.shape[2]]).sum(-1)
        return out, reference.decoupled_weights(q, k, own, query_start=0, **given).to(v.dtype)

    @property
    def _name(self) -> str:
        return self.site_path or "the nn.MultiheadAttention"

    def _refuse_cross_attention(self, query: Tensor, key: Tensor, value: Tensor) -> None:
        if query.dim() not in (2, 3):
            raise AttentionError(
                f"{self._name}: query has shape {tuple(query.shape)}; expected two dimensions, or three with a batch"
            )
        if key is query:
            return
        # Values are compared outside of torch.compile alone: there it would break the graph.
        same = not query.is_nested and not torch.compiler.is_compiling() and query.shape == key.shape
        if not (same and torch.equal(query, key)):
            raise SurgeryError(
                f"{self._name} has a score of its own for a token with itself and was called as cross-attention: "
                f"the key, {tuple(key.shape)}, is not the query, {tuple(query.shape)}; pass the same tensor for both, "
                "or undo the change (`recouple_`)"
            )

    def _batch(self, x: Tensor) -> Tensor:
        """(B, N, width), from what a caller gives."""
        if x.dim() == 2:
            return x[None]
        return x if self.batch_first else x.transpose(0, 1)

    def _heads(self, x: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries (B, H, N, d_head), keys and values (B, H, N + extra keys, d_head)."""
        if self.in_proj_weight is not None and value is x:
            parts = functional.linear(x, self.in_proj_weight, self.in_proj_bias).chunk(3, -1)
        else:
            weights = (self.q_proj_weight, self.k_proj_weight, self.v_proj_weight)
            if self.in_proj_weight is not None:
                weights = self.in_proj_weight.chunk(3)
            biases = (None,) * 3 if self.in_proj_bias is None else self.in_proj_bias.chunk(3)
            inputs = (x, x, value)
            parts = tuple(functional.linear(*each) for each in zip(inputs, weights, biases, strict=True))
        q, k, v = (part.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for part in parts)
        if self.bias_k is not None:
            k, v = self._with_key(k, self.bias_k), self._with_key(v, self.bias_v)
        if self.add_zero_attn:
            k, v = functional.pad(k, (0, 0, 0, 1)), functional.pad(v, (0, 0, 0, 1))
        return q, k, v

    def _with_key(self, heads: Tensor, bias: Tensor) -> Tensor:
        """One more key (or value) at the end, the same for every sequence: (1, 1, d_model)."""
        bias = bias.to(heads.dtype).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)  # (1, H, 1, d_head)
        return torch.cat([heads, bias.expand(len(heads), -1, -1, -1)], 2)

    def _mask(self, x: Tensor, padding: Tensor | None, mask: Tensor | None, extra: int) -> Tensor | None:
        """Both masks as one that broadcasts to (B, H, N, N + extra): True where allowed, or added to the scores."""
        batch, n, _ = x.shape
        if padding is not None:
            refuse_mask(f"{self._name}: key_padding_mask", padding, [(batch, n)])
            padding = padding[:, None, None]
        if mask is not None:
            refuse_mask(f"{self._name}: attn_mask", mask, [(n, n), (batch * self.num_heads, n, n)])
            mask = mask[None, None] if mask.dim() == 2 else mask.unflatten(0, (batch, self.num_heads))
        masks = [each for each in (mask, padding) if each is not None]
        if not masks:
            return None
        if all(each.dtype == torch.bool for each in masks):
            hidden = masks[0] if len(masks) == 1 else masks[0] | masks[1]
            return ~functional.pad(hidden, (0, extra)) if extra else ~hidden
        added = sum(additive(each, x.dtype) for each in masks)
        return functional.pad(added, (0, extra)) if extra else added

    def _nested(
        self,
        query: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None,
        need_weights: bool,
        attn_mask: Tensor | None,
        is_causal: bool,
    ) -> tuple[Tensor, Tensor | None]:
        """Nested tensors, which an nn.TransformerEncoder that surgery has not seen makes of padded input."""
        if need_weights or value is not query or not (key_padding_mask is attn_mask is None) or is_causal:
            raise AttentionError(
                f"{self._name}: a nested tensor takes no masks, no other value, and gives no weights; pad it"
            )
        parts = query.unbind()
        padded = nn.utils.rnn.pad_sequence(list(parts), batch_first=self.batch_first)
        lengths = torch.tensor([len(part) for part in parts], device=query.device)
        steps = torch.arange(int(lengths.max()), device=query.device)
        out, _ = self(padded, padded, padded, key_padding_mask=steps >= lengths[:, None], need_weights=False)
        out = out if self.batch_first else out.transpose(0, 1)
        rows = [row[: len(part)] for row, part in zip(out, parts, strict=True)]
        return torch.nested.as_nested_tensor(rows, layout=query.layout), None
