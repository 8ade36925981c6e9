"""What transformers calls in place of its attention: one function for every kind of attention that surgery makes.

It is registered as an attention implementation (`NAME`) with a mask function that is SDPA's. A module says by its
`Switch` what it wants; a module without one, such as a cross-attention of the same model, gets standard attention.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from qkform.attention import decoupled_attention, exclusive_attention, no_diagonal_attention
from qkform.attention.reference import decoupled_weights
from qkform.errors import SurgeryError
from qkform.surgery.self_score import this_thread

NAME = "qkform"
SWITCH = "qkform_attention"  # the attribute of an attention module that holds its Switch
SINKS = ("s_aux", "sinks")
UNKNOWN = (
    "softcap",
    *SINKS,
    "indices",
    "block_indices",
)  # arguments that change scores as no function here does

# Attentions of transformers that multiply by `self.scaling` themselves and hand over the scale 1: how many of queries
# and keys get it (read off their modeling files, 5.24).
PRESCALED = {
    "AudioFlamingo3Attention": 1,
    "Kosmos2_5TextAttention": 1,
    "MossTranscribeDiarizeAudioAttention": 1,
    "OPTAttention": 1,
    "OpenAIPrivacyFilterAttention": 2,
    "Qwen2AudioAttention": 1,
    "VoxtralAttention": 1,
    "WhisperAttention": 1,
}

# Attentions that multiply queries by attention_head_size^-0.5 themselves, hand over 1, and have a `scaling` of 1.
PRESCALED_BY_SIZE = ("EsmSelfAttention", "EvollaSaProtSelfAttention")


class Call:
    """One running call of an attention module: where among the keys its tokens start, and whether it came here."""

    def __init__(self, start: Tensor | int | None) -> None:
        self.start = start  # None: the queries are the last keys
        self.came = False


class Switch:
    """What kind of attention a module computes, and the calls of it that are running.

    Copied or unpickled, it makes sure that this process knows the implementation that the model's config names.
    """

    def __init__(self, kind: str, before: str | None) -> None:
        self.kind = kind
        self.before = before  # the attention implementation that the module's config named before
        self.calls: dict[int, Call] = {}  # by thread
        self.observe: Callable[..., None] | None = (
            None  # sees the arguments of standard attention, see `starts`
        )

    def __reduce__(self) -> tuple[Callable[[str, str | None], Switch], tuple[str, str | None]]:
        return _switch, (self.kind, self.before)


def _switch(kind: str, before: str | None) -> Switch:
    register()
    return Switch(kind, before)


def register() -> None:
    """Make the implementation known to transformers; a second time changes nothing."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    AttentionInterface.register(NAME, attention)
    AttentionMaskInterface.register(NAME, sdpa_mask)


def attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    position_bias: Tensor | None = None,
    **others: Any,
) -> tuple[Tensor, Tensor | None]:
    """As transformers calls it: query (B, H, N, D), key and value (B, G, M, D) -> (B, N, H, D), weights or None.

    The weights (B, H, N, M), without dropout, are computed only for output_attentions=True.
    """
    switch = getattr(module, SWITCH, None)
    kind = "standard" if switch is None else switch.kind
    call = None if switch is None else switch.calls.get(this_thread())
    if call is not None:
        call.came = True
    if switch is not None and switch.observe is not None:
        switch.observe(query, key, attention_mask, scaling)
        kind = "standard"
    compute: Callable[[Tensor, float], Tensor] = partial(
        _standard, module, query, key, attention_mask, scaling, is_causal, position_bias, others
    )
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    # As sdpa_attention_forward reads a missing mask: one query sees every key. Several over more keys are the first
    # tokens in a cache of fixed size, and stand at `start`.
    causal = bool(causal) and attention_mask is None and query.shape[2] > 1
    mask = attention_mask if position_bias is None else _with_bias(position_bias, attention_mask)
    weigh = partial(_standard_weights, query, key, mask, scaling, causal)
    if kind != "standard":
        _refuse_unknown(module, others)
        _refuse_mask(module, attention_mask)
        start = None if call is None else call.start
        given: dict[str, Any] = {
            "attn_mask": mask,
            "is_causal": causal,
            "scale": scaling,
            "query_start": start,
        }
        if kind == "exclusive":  # changes what the weights bring, not the weights
            compute = partial(_changed, exclusive_attention, query, key, given)
        elif kind == "decoupled":
            score = _own_score(module, query, scaling)
            compute = partial(_changed, partial(decoupled_attention, self_score=score), query, key, given)
            weigh = partial(decoupled_weights, query, key, score, **given)
        else:
            compute = partial(_changed, no_diagonal_attention, query, key, given)
            never = torch.full_like(query[..., 0], -math.inf)
            weigh = partial(decoupled_weights, query, key, never, **given)
    out = compute(value, dropout).transpose(1, 2).contiguous()  # (B, N, H, D)
    if others.get("output_attentions") or getattr(module.config, "output_attentions", False) or _collected():
        return out, weigh().to(value.dtype)
    return out, None


def _collected() -> bool:
    """Whether transformers collects the weights of this call: GPT-2 and OPT do not hand `output_attentions` down.

    Eager attentions have their weights at hand and return them always, and what nobody wants is dropped. Inside a
    compiled graph transformers' collector cannot be asked.
    """
    if torch.compiler.is_compiling():
        return False
    collector = getattr(sys.modules.get("transformers.utils.output_capturing"), "_active_collector", None)
    wanted = None if collector is None else collector.get()
    return any(name.endswith("attentions") for name in wanted or ())


def _standard(
    module: Any,
    query: Tensor,
    key: Tensor,
    mask: Tensor | None,
    scaling: float | None,
    is_causal: bool | None,
    position_bias: Tensor | None,
    others: dict[str, Any],
    value: Tensor,
    dropout: float,
) -> Tensor:
    """(B, H, N, D_v) of what transformers itself would compute."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    given = {name: each for name, each in others.items() if name != "output_attentions"}
    if position_bias is not None:
        given["position_bias"] = position_bias
    out, _ = sdpa_attention_forward(
        module, query, key, value, mask, dropout=dropout, scaling=scaling, is_causal=is_causal, **given
    )
    return out.transpose(1, 2)


def _changed(
    function: Callable[..., Tensor],
    query: Tensor,
    key: Tensor,
    given: dict[str, Any],
    value: Tensor,
    dropout: float,
) -> Tensor:
    """(B, H, N, D_v) of a function of `qkform.attention`."""
    return function(query, key, value, dropout_p=dropout, enable_gqa=True, **given)


def _standard_weights(
    query: Tensor, key: Tensor, mask: Tensor | None, scaling: float | None, causal: bool
) -> Tensor:
    """(B, H, N, M) of standard attention, in float32 at least; `causal` lets the first query stand at the first key."""
    n, m = query.shape[2], key.shape[2]
    scale = query.shape[3] ** -0.5 if scaling is None else scaling
    wide = torch.promote_types(query.dtype, torch.float32)
    key = key.repeat_interleave(query.shape[1] // key.shape[1], 1)
    scores = scale * (query.to(wide) @ key.to(wide).mT)
    if causal:
        ahead = torch.ones(n, m, dtype=torch.bool, device=query.device).triu(1)
        scores = scores.masked_fill(ahead, -math.inf)
    if mask is not None:
        scores = scores.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else scores + mask
    return scores.softmax(-1).nan_to_num(0.0)  # a row without keys is zero


def _own_score(module: Any, query: Tensor, scaling: float | None) -> Tensor:
    """(B, H, N): what the module's self score holds, in the units of `q . k` as the function gets them."""
    score = module.self_score.take()
    if score is None:
        raise SurgeryError(
            f"a {type(module).__name__} was decoupled, but its query projection did not run in this call: it has been "
            "replaced since; recouple_ the model before its projections are replaced, and decouple_ it afterwards"
        )
    batch, heads, n, _ = query.shape
    if score.shape[0] != batch or score.shape[1:] != (heads, n):
        raise SurgeryError(
            f"the self score of a {type(module).__name__} is of {tuple(score.shape)}, and its attention of "
            f"{(batch, heads, n)} (batch, heads, tokens): heads were pruned after decouple_, or the module cuts its "
            "tokens into windows, which decouple_ does not know"
        )
    factor = prescale(module, scaling)
    return score if factor is None else score * factor


def prescale(module: Any, scaling: float | None) -> float | None:
    """What the module has multiplied `q . k` with before it hands over the scale 1; None where nothing.

    SurgeryError where that is not known: it hands over 1 and has a scale of its own, and is none of `PRESCALED`.
    """
    names = {c.__name__ for c in type(module).__mro__}
    if scaling == 1.0 and names.intersection(PRESCALED_BY_SIZE):
        return float(module.attention_head_size**-0.5)
    own = getattr(module, "scaling", None)
    if scaling != 1.0 or not isinstance(own, float) or own == 1.0:
        return None
    known = next((PRESCALED[c.__name__] for c in type(module).__mro__ if c.__name__ in PRESCALED), None)
    if known is None:
        raise SurgeryError(
            f"a {type(module).__name__} hands over the scale 1 and has scaling={own:.4g}: whether its queries have "
            "that already is not known, and so not the scale of its self score; change another part of the model"
        )
    return float(own**known)


def _with_bias(position_bias: Tensor, mask: Tensor | None) -> Tensor:
    """A position bias and a mask as one float mask."""
    if mask is None:
        return position_bias
    if mask.dtype == torch.bool:
        return position_bias.masked_fill(~mask, -math.inf)
    return position_bias + mask


def _refuse_unknown(module: Any, others: dict[str, Any]) -> None:
    for name in UNKNOWN:
        if others.get(name) is not None:
            raise SurgeryError(
                f"a {type(module).__name__} changes its scores by {name!r}, which surgery does not know"
            )


def _refuse_mask(module: Any, mask: Any) -> None:
    """A mask made for another implementation: its absence, or its shape, would mean something else here."""
    if mask is not None and not (isinstance(mask, Tensor) and mask.ndim == 4):
        found = tuple(mask.shape) if isinstance(mask, Tensor) else type(mask).__name__
        raise SurgeryError(
            f"a {type(module).__name__} got a mask of {found} made for another attention implementation; expected "
            f"(batch, heads, queries, keys): has config._attn_implementation been changed since the surgery?"
        )
