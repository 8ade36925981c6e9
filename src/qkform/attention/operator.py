"""`decoupled_attention` on fused kernels as an operator of torch: autograd, compile and checkpointing see one node.

Second derivatives raise: the backward has none. torch.func transforms never come here (see `decoupled`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from qkform.attention import flash
from qkform.attention.checks import check_start
from qkform.attention.reference import score_type
from qkform.errors import AttentionError


def _operator(name: str) -> Callable[[Callable[..., Any]], Any]:
    """`torch.library.custom_op` of a function that changes none of its arguments."""
    return torch.library.custom_op(name, mutates_args=())  # type: ignore[no-any-return]


@_operator("qkform::decoupled_attention")
def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    self_score: Tensor,
    mask: Tensor | None,
    is_causal: bool,
    scale: float,
    start: int,
    place: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp; `place`, where given, is `start` as a tensor."""
    begin = start if place is None else int(place)
    check_start(begin, query.shape[2], key.shape[2])
    return flash.forward(query, key, value, self_score, mask, is_causal, scale, begin)


def _attend_shapes(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    self_score: Tensor,
    mask: Tensor | None,
    is_causal: bool,
    scale: float,
    start: int,
    place: Tensor | None,
) -> tuple[Tensor, Tensor]:
    return torch.empty_like(flash.dense(query)), query.new_empty(query.shape[:-1], dtype=score_type(query))


@_operator("qkform::decoupled_attention_backward")
def gradients(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    self_score: Tensor,
    out: Tensor,
    lse: Tensor,
    mask: Tensor | None,
    is_causal: bool,
    scale: float,
    start: int,
    place: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of query, key, value and self_score."""
    begin = start if place is None else int(place)
    return flash.backward(grad, query, key, value, self_score, out, lse, mask, is_causal, scale, begin)


def _gradient_shapes(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    self_score: Tensor,
    out: Tensor,
    lse: Tensor,
    mask: Tensor | None,
    is_causal: bool,
    scale: float,
    start: int,
    place: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    heads = (flash.empty_as_gradient(x) for x in (query, key, value))
    return (*heads, torch.empty_like(self_score, memory_format=torch.contiguous_format))


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    query, key, value, self_score, mask, *ctx.how, place = inputs
    ctx.save_for_backward(query, key, value, self_score, *output, mask, place)


def _backward(ctx: Any, grad: Tensor, _: Any) -> tuple[Tensor | None, ...]:
    query, key, value, self_score, out, lse, mask, place = ctx.saved_tensors
    grads = gradients(grad, query, key, value, self_score, out, lse, mask, *ctx.how, place)
    return (*grads, None, None, None, None, None)


def _no_second(ctx: Any, *grads: Any) -> Any:
    raise AttentionError(
        "decoupled_attention on fused kernels has no second derivatives: pass impl='reference' where gradients of "
        "gradients are taken (create_graph=True)"
    )


attend.register_fake(_attend_shapes)
gradients.register_fake(_gradient_shapes)
attend.register_autograd(_backward, setup_context=_keep)
gradients.register_autograd(_no_second)


class Direct(torch.autograd.Function):  # type: ignore[misc]
    """The same without the operator, whose dispatch costs most of a millisecond: for eager calls of plain tensors."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, self_score: Tensor, *rest: Any
    ) -> Tensor:
        mask, is_causal, scale, start, place = rest
        begin = start if place is None else int(place)
        check_start(begin, query.shape[2], key.shape[2])
        ctx.how = is_causal, scale, begin
        out, lse = flash.forward(query, key, value, self_score, mask, *ctx.how)
        ctx.save_for_backward(query, key, value, self_score, out, lse, mask)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, self_score, out, lse, mask = ctx.saved_tensors
        given = (grad, query, key, value, self_score, out, lse, mask, *ctx.how)
        # With a graph of the backward asked for, the operator: its second derivative says that there is none.
        grads = gradients(*given, None) if torch.is_grad_enabled() else flash.backward(*given)
        return (*grads, *[None] * 5)


def direct(*tensors: Tensor | None) -> bool:
    """Whether nothing that records, fakes or rewrites operators looks on."""
    return not torch.compiler.is_compiling() and all(
        x is None or type(x) in (Tensor, torch.nn.Parameter) for x in tensors
    )
