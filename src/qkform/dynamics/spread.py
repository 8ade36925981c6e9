"""`sharpness`: how concentrated each row of attention weights is, over the keys that it may attend to and no others."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Any

import numpy as np
from array_api_compat import array_namespace, device, is_array_api_obj, is_torch_array

from qkform.errors import DynamicsError

Array = Any  # a numpy array or a torch tensor; results are of the kind of the weights


@dataclass(frozen=True, eq=False)
class Sharpness:
    """Of each row of weights, over its N open keys: float64 of the weights' shape without the last dimension.

    With p the weights of a row divided by their sum over the open keys:

    keys                int64: N, how many keys are open
    entropy             H = -sum p ln p, nats, in [0, ln N]
    normalised_entropy  H / ln N, in [0, 1]: 1 is uniform; NaN for one key, which leaves no choice
    effective_tokens    exp(H), in [1, N]
    largest             the largest p, in [1/N, 1]
    participation       1 / sum p^2, in [1, N]
    gini                2 sum_i i p_(i) / N - (N + 1) / N with p ascending, in [0, 1 - 1/N]: 0 is uniform
    normalised_gini     gini N / (N - 1), in [0, 1]; NaN for one key
    mass                sum of p over the tokens that were given, in [0, 1]; None where none were

    A row without open keys, with no weight on any, or with one that is NaN or infinite has none of these: NaN.
    """

    keys: Array
    entropy: Array
    normalised_entropy: Array
    effective_tokens: Array
    largest: Array
    participation: Array
    gini: Array
    normalised_gini: Array
    mass: Array | None


def sharpness(
    weights: Array, mask: Array | None = None, *, tokens: Array | Sequence[int] | None = None
) -> Sharpness:
    """How concentrated each row of attention weights is, by six measures and the mass on given tokens.

    weights   (..., keys), numpy or torch, >= 0; what stands at closed keys is not read, NaN included
    mask      broadcasting to weights, True (or 1) for open: without it all keys are, and a causal row that cannot see
              the future would count it.  Close the rows of padded queries as well as padded keys
    tokens    broadcasting to weights, True for the tokens whose mass is asked for; or a list of positions

    Exact.  Weights that do not sum to 1 over the open keys are divided by their sum: the measures are those of the
    choice among them.  DynamicsError for shapes that do not fit and for negative weights.  Source: docs/theory.md.

    >>> sharpness(np.array([[0.5, 0.5, 0.0], [0.4, 0.4, 0.2]])).effective_tokens.round(3)
    array([2.   , 2.872])
    """
    xp, weights = _checked(weights)
    open_ = opened(mask, weights)
    p, keys, known = probabilities(weights, open_)
    n = xp.astype(keys, xp.float64)
    logs = xp.log(xp.where(p > 0, p, xp.ones_like(p)))
    entropy = clipped(xp, -xp.sum(p * logs, axis=-1), 0.0)
    ascending = xp.sort(
        p, axis=-1
    )  # closed keys are 0 and come first: an open one's rank is its place less theirs
    place = xp.arange(1, p.shape[-1] + 1, dtype=xp.float64, device=device(p))
    rank = place - (p.shape[-1] - n)[..., None]
    many = xp.where(n > 1, n, xp.full_like(n, math.nan))
    some = xp.where(n > 0, n, xp.ones_like(n))
    gini = clipped(xp, 2 * xp.sum(rank * ascending, axis=-1) / some - (some + 1) / some, 0.0)
    squares = xp.sum(p * p, axis=-1)

    def of_known(values: Array) -> Array:
        return xp.where(known, values, xp.full_like(values, math.nan))

    return Sharpness(
        keys=keys,
        entropy=of_known(entropy),
        normalised_entropy=of_known(entropy / xp.log(many)),
        effective_tokens=of_known(xp.exp(entropy)),
        largest=of_known(ascending[..., -1]),
        participation=of_known(1 / xp.where(known, squares, xp.ones_like(squares))),
        gini=of_known(gini),
        normalised_gini=of_known(gini * many / (many - 1)),
        mass=None if tokens is None else of_known(mass_on(tokens, p)),
    )


def probabilities(weights: Array, open_: Array) -> tuple[Array, Array, Array]:
    """p (..., keys) float64, 0 at closed keys and summing to 1; the number of open keys; whether there is such a p."""
    xp = array_namespace(weights)
    w = xp.where(open_, xp.astype(weights, xp.float64), xp.zeros_like(weights, dtype=xp.float64))
    if bool(xp.any(w < 0)):
        raise DynamicsError(f"weights go down to {float(xp.min(w)):.3g}; attention weights are 0 or more")
    total = xp.sum(w, axis=-1)
    known = (total > 0) & xp.isfinite(total)
    p = (
        xp.where(known[..., None], w, xp.zeros_like(w))
        / xp.where(known, total, xp.ones_like(total))[..., None]
    )
    return p, xp.sum(xp.astype(open_, xp.int64), axis=-1), known


def mass_on(tokens: Array | Sequence[int], p: Array) -> Array:
    """(...): the sum of p (..., keys) over some tokens: a mask that broadcasts, or a list of positions."""
    xp = array_namespace(p)
    if isinstance(tokens, (list, tuple)) and all(_is_position(t) for t in tokens):
        chosen = np.zeros(p.shape[-1], dtype=bool)
        outside = [t for t in tokens if not -p.shape[-1] <= t < p.shape[-1]]
        if outside:
            raise DynamicsError(f"tokens has position {outside[0]}; there are {p.shape[-1]} keys")
        chosen[[int(t) for t in tokens]] = True
        tokens = chosen
    return xp.sum(xp.where(opened(tokens, p, "tokens"), p, xp.zeros_like(p)), axis=-1)


def opened(mask: Array | None, weights: Array, name: str = "mask") -> Array:
    """A mask as bool in the shape, and of the kind, of the weights."""
    xp = array_namespace(weights)
    if mask is None:
        return xp.ones_like(weights, dtype=xp.bool)
    if is_torch_array(mask) and not is_torch_array(weights):
        mask = mask.numpy(force=True)
    found = xp.asarray(mask, device=device(weights)) if not is_torch_array(mask) else mask.to(weights.device)
    if found.dtype != xp.bool:
        zero_or_one = not xp.isdtype(found.dtype, "integral") or bool(xp.any((found != 0) & (found != 1)))
        if zero_or_one:
            raise DynamicsError(f"{name} holds {found.dtype}; expected bool, True for yes, or 0 and 1")
        if name == "tokens" and (found.ndim == 0 or found.shape[-1] != weights.shape[-1]):
            raise DynamicsError(  # an array of positions, of which one would count for every key
                f"tokens has shape {tuple(found.shape)} for {weights.shape[-1]} keys; positions are a list"
            )
        found = found == 1
    try:
        return xp.broadcast_to(found, tuple(weights.shape))
    except (ValueError, RuntimeError):
        raise DynamicsError(
            f"{name} has shape {tuple(found.shape)}; expected one that broadcasts to {tuple(weights.shape)}"
        ) from None


def _is_position(token: Any) -> bool:
    return isinstance(token, Integral) and not isinstance(token, (bool, np.bool_))


def clipped(xp: Any, x: Array, least: float) -> Array:
    """x, and `least` where rounding went below."""
    return xp.where(x < least, xp.full_like(x, least), x)


def _checked(weights: Array) -> tuple[Any, Array]:
    """The namespace of the weights, and they without gradient history."""
    if not is_array_api_obj(weights):
        raise DynamicsError(f"weights is a {type(weights).__name__}; pass a numpy or torch array (..., keys)")
    if isinstance(weights, np.ma.MaskedArray):
        raise DynamicsError(
            "weights is a masked array; pass weights.filled(0) and mask=~np.ma.getmaskarray(weights)"
        )
    xp = array_namespace(weights)
    if weights.ndim == 0 or weights.shape[-1] == 0 or not xp.isdtype(weights.dtype, "real floating"):
        raise DynamicsError(
            f"weights has shape {tuple(weights.shape)} and holds {weights.dtype}; expected (..., keys), floating"
        )
    return xp, weights.detach() if is_torch_array(weights) else weights
