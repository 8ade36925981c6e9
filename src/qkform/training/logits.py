"""Which attention has the largest logit on a batch: where to look when a loss is no number any more."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch


def largest_logit(model: Any, batch: Mapping[str, Any]) -> tuple[str, float]:
    """Path of the self-attention whose scaled score is largest in size, and that size; the first that is not finite."""
    from qkform.dynamics.capture import observe

    found = [(each.path, max(_largest(call) for call in each.calls)) for each in observe(model, batch)]
    return next((one for one in found if not math.isfinite(one[1])), max(found, key=lambda one: one[1]))


def _largest(call: Any) -> float:
    """The largest size of a scaled score, or NaN: over all pairs, closed ones too."""
    q, k = call.query.float(), call.key.float()
    k = k.repeat_interleave(q.shape[1] // k.shape[1], 1)
    tops = [(one @ other.mT).abs().amax() for one, other in zip(q, k, strict=True)]
    tops += [] if call.own is None else [call.own.float().abs().amax()]
    return float(torch.stack(tops).amax()) * abs(float(call.scale))
