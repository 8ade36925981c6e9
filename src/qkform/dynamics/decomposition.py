"""`decompose`: the gradient of the query-key form of every self-attention, from the pairs of tokens that make it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from qkform.dynamics.calls import Call, check_dtype, working_type
from qkform.dynamics.capture import LossFunction, Watched, capture, without_autocast
from qkform.errors import DynamicsError
from qkform.form import BilinearForm


@dataclass(frozen=True, eq=False)
class Decomposition:
    """The gradient of one self-attention's query-key form on one batch, per head.

        gamma = dL/dW_qk = sum_ij beta_ij x_i x_j^T,    beta_ij = scale * dL/dS_ij      (the scale is inside beta)

    Rows are the query side, columns the key side. Exact; sums over all sequences of the batch.

    module              path of the attention in the model
    gamma_diagonal      (n_heads, d_model, d_model): sum_i beta_ii x_i x_i^T, symmetric
    gamma_off_diagonal  (n_heads, d_model, d_model): the pairs of a token with another
    query_sum           (n_heads, d_model): sum_ij beta_ij x_i over the pairs of gamma; 0 on a standard model, since
                        rows of beta sum to 0
    key_sum             (n_heads, d_model): sum_ij beta_ij x_j, the same
    total               (n_heads,): sum_ij beta_ij, the same
    as_prediction       (B, n_heads, N): ||sum_j beta_ij x_i x_j^T||, what token i brings as the query, whose output
                        predicts; B counts the sequences of all calls
    as_context          (B, n_heads, N): ||sum_i beta_ij x_i x_j^T||, what token j brings as a key, that others read
    decoupled           a token's score with itself is not the form's: gamma is gamma_off_diagonal alone
    direct              whether the scores are those of the form, scale * x_i W_qk x_j^T and biases. Where they are not
                        (rotation, norms on queries and keys), gamma is the gradient of a matrix dW of zeros added to
                        them, scale * x_i dW x_j^T, not rotated: not that of W_Q W_K^T
    beta                (B, n_heads, N, N) where it was asked for, else None
    """

    module: str
    gamma_diagonal: Tensor
    gamma_off_diagonal: Tensor
    query_sum: Tensor
    key_sum: Tensor
    total: Tensor
    as_prediction: Tensor
    as_context: Tensor
    decoupled: bool
    direct: bool
    beta: Tensor | None

    @property
    def gamma(self) -> Tensor:
        """(n_heads, d_model, d_model): dL/dW_qk; on a decoupled model without the diagonal, which v has."""
        return self.gamma_off_diagonal if self.decoupled else self.gamma_diagonal + self.gamma_off_diagonal

    def extended(self) -> Tensor:
        """(n_heads, d_model + 1, d_model + 1): the gradient of the form of [x, 1], the last row and column for biases.

        dL/d[W_Q; b_Q] = extended [W_K; b_K] and dL/d[W_K; b_K] = extended^T [W_Q; b_Q], the keys' summed over the heads
        that share them. On a standard model dL/dW_Q = gamma W_K whatever the biases.
        """
        gamma = self.gamma
        h, d, _ = gamma.shape
        found = gamma.new_empty(h, d + 1, d + 1)
        found[:, :d, :d] = gamma
        found[:, :d, d] = self.query_sum
        found[:, d, :d] = self.key_sum
        found[:, d, d] = self.total
        return found

    def form(self) -> BilinearForm:
        """gamma as a query-key form: the scores of a form, of the step of gradient descent on W_qk.

        `form().symmetry()` is the symmetry of the update, in [-1, 1]; `directionality()` says whether rows (queries) or
        columns (keys) dominate. A step on W_Q and W_K changes W_qk by another matrix, see docs.
        """
        gamma = self.gamma
        unit = torch.eye(gamma.shape[2], dtype=gamma.dtype, device=gamma.device)
        return BilinearForm(gamma, unit.expand_as(gamma))

    def row_energy(self) -> Tensor:
        """(n_heads, d_model): squared norms of the rows of gamma, the query side; their sum is ||gamma||^2."""
        return self.gamma.square().sum(2)

    def column_energy(self) -> Tensor:
        """(n_heads, d_model): squared norms of the columns, the key side; the same sum: only shapes can differ."""
        return self.gamma.square().sum(1)


def decompose(
    model: Any,
    batch: Mapping[str, Any],
    *,
    loss_fn: LossFunction | None = None,
    beta: bool = False,
    dtype: torch.dtype | None = None,
    modules: Sequence[str] | None = None,
) -> list[Decomposition]:
    """The gradient of every self-attention's query-key form on one batch, split into its pairs of tokens.

    batch    keyword arguments of one call of the model, with labels
    loss_fn  output of the model -> loss, one number; without it the output's own `loss`
    beta     keep the (B, n_heads, N, N) weights of all pairs
    dtype    to compute the pairs and their sums in, torch.float64 for accuracy; by default the model's, at least
             float32. The pass through the model is in the model's own type
    modules  paths of the attentions that are wanted; by default all

    The model runs once, forward and back, in eval mode: what dropout would do is not in it. It is left as it was. One
    object per self-attention that ran, in order; an attention that ran several times has the sum over its calls. Other
    implementations of transformers' attention, such as "eager", give way to SDPA, where a row without open keys is 0.
    Memory is that of a training step and of the result; the pairs are never held all at once, unless asked for.

    DynamicsError where there is no loss, no self-attention, or one whose scores are not those of one form on tokens:
    capped scores, attention sinks, several query-key terms, keys from a cache or from another input.

    Source: arXiv 2502.10927 for the sum over pairs and the two roles of a token; docs/theory.md.

    >>> for layer in decompose(model, batch):                               # doctest: +SKIP
    ...     print(layer.module, layer.form().symmetry())
    """
    check_dtype(dtype)
    found = capture(model, batch, loss_fn, modules)
    with without_autocast(found):
        return [_decomposition(each, beta, dtype) for each in found]


@torch.no_grad()  # type: ignore[untyped-decorator]
def _decomposition(each: Watched, keep: bool, dtype: torch.dtype | None) -> Decomposition:
    sums = [_Sums(call, keep, dtype) for call in each.calls]
    decoupled = sums[0].own is not None
    whole = sum(s.whole for s in sums)
    diagonal = sum(s.diagonal for s in sums)
    query, key, total = (sum(part) for part in zip(*(s.linear(decoupled) for s in sums), strict=True))
    return Decomposition(
        module=each.path,
        gamma_diagonal=diagonal,
        gamma_off_diagonal=whole - diagonal,
        query_sum=query,
        key_sum=key,
        total=total,
        as_prediction=_stacked(each, [s.as_prediction for s in sums]),
        as_context=_stacked(each, [s.as_context for s in sums]),
        decoupled=decoupled,
        direct=all(_is_direct(each, call) for call in each.calls),
        beta=_stacked(each, [s.beta for s in sums if s.beta is not None]) if keep else None,
    )


def _stacked(each: Watched, found: list[Tensor]) -> Tensor:
    """The sequences of all calls, one after another."""
    if len({tuple(t.shape[1:]) for t in found}) > 1:
        raise DynamicsError(f"{each.path} ran several times in this call, on different numbers of tokens")
    return found[0] if len(found) == 1 else torch.cat(found)


class _Sums:
    """The sums over the pairs of one call."""

    def __init__(self, call: Call, keep: bool, dtype: torch.dtype | None) -> None:
        batch, heads, n, _ = call.query.shape
        d, wide = call.x.shape[2], working_type(call.query.dtype, dtype)
        zeros = torch.zeros((), dtype=wide, device=call.query.device).new_zeros
        self.own = call.own
        self.whole, self.diagonal = zeros(heads, d, d), zeros(heads, d, d)
        self.sums = {name: zeros(heads, d) for name in ("query", "key", "own")}
        self.totals = {name: zeros(heads) for name in ("all", "own")}
        self.as_prediction, self.as_context = zeros(batch, heads, n), zeros(batch, heads, n)
        self.beta = zeros(batch, heads, n, n) if keep else None
        columns = zeros(0)
        for block in call.blocks(dtype):
            some, rows, beta, _, x = block
            norms = x.norm(dim=-1)[:, None]  # (b, 1, N)
            read = beta @ x[:, None]  # (b, H, R, d): sum_j beta_ij x_j
            asking, own = x[:, rows], block.own(beta)  # (b, R, d), (b, H, R)
            self.whole += torch.einsum("brd,bhre->hde", asking, read)
            self.diagonal += torch.einsum("brd,bhre->hde", asking, own[..., None] * asking[:, None])
            self.sums["query"] += torch.einsum("bhr,brd->hd", beta.sum(-1), asking)
            self.sums["key"] += read.sum((0, 2))
            self.sums["own"] += torch.einsum("bhr,brd->hd", own, asking)
            self.totals["all"] += beta.sum((0, 2, 3))
            self.totals["own"] += own.sum((0, 2))
            self.as_prediction[some, :, rows] = read.norm(dim=-1) * norms[..., rows]
            written = beta.mT @ asking[:, None]  # (b, H, N, d): sum_i beta_ij x_i, of these rows
            columns = written if rows.start == 0 else columns + written
            if rows.stop == n:
                self.as_context[some] = columns.norm(dim=-1) * norms
            if self.beta is not None:
                self.beta[some, :, rows] = beta

    def linear(self, decoupled: bool) -> tuple[Tensor, Tensor, Tensor]:
        """sum beta_ij x_i, sum beta_ij x_j and sum beta_ij over the pairs of gamma."""
        query, key, own = (self.sums[name] for name in ("query", "key", "own"))
        if not decoupled:
            return query, key, self.totals["all"]
        return query - own, key - own, self.totals["all"] - self.totals["own"]


def _is_direct(each: Watched, call: Call) -> bool:
    """Whether queries and keys are x W + b: nothing turns or norms them on the way."""
    if each.site is None:
        return True
    x = call.x
    for seen, weight, bias in (
        (call.query, each.site.w_q(), each.site.b_q()),
        (call.key, each.site.w_k(), each.site.b_k()),
    ):
        weight, bias = _gathered(weight), _gathered(bias)
        made = torch.einsum("bnd,hde->bhne", x.to(weight.dtype), weight)
        made = made if bias is None else made + bias[:, None]
        if seen.shape != made.shape or not _near(seen, made):
            return False
    return True


def _gathered(weight: Any) -> Any:
    """All of a sharded weight (FSDP2); every rank takes part."""
    return weight.full_tensor() if hasattr(weight, "full_tensor") else weight


def _near(seen: Tensor, made: Tensor) -> bool:
    """Equal up to rounding in their type, which a rotation or a norm is far from."""
    wide = made.to(torch.promote_types(seen.dtype, torch.float32))
    lost, size = (seen.to(wide.dtype) - wide).norm(), wide.norm()
    return bool(lost <= min(64 * torch.finfo(seen.dtype).eps, 0.03) * size)
