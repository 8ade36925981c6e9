"""Proxies of interpretability: does attention say which tokens the model decides by?

Attention mass on the tokens that are known to matter, and what the model says without the tokens attended to most.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from numbers import Real
from typing import Any, Literal, get_args

import numpy as np
from array_api_compat import array_namespace, device, is_array_api_obj, is_torch_array
from numpy.typing import NDArray

from qkform.dynamics.spread import Array, mass_on, opened, probabilities
from qkform.errors import DynamicsError

Layers = Literal["mean", "max", "rollout"]
Confidence = Callable[[Any], Any]  # tokens -> one number


def attention_mass(
    weights: Array | Sequence[Array],
    tokens: Array | Sequence[int],
    mask: Array | None = None,
    *,
    layers: Layers = "mean",
    row: int | Array | None = None,
    residual: float = 0.5,
) -> Array:
    """How much of one row's attention is on given tokens, over the layers of a model: (B,) float64 in [0, 1].

    weights   (n_layers, B, n_heads, N, N), or a sequence of (B, n_heads, N, N); heads are averaged
    tokens    (B, N) or (N,), True for the tokens; or a list of positions
    mask      broadcasting to (B, n_heads, N, N), True for open keys; closed ones have no part in anything
    layers    "mean" of the layers' masses, their "max", or "rollout": the layers multiplied, each as
              (1 - residual) A + residual 1 for the residual stream (arXiv 2005.00928)
    row       whose attention, one number or one for each sequence; by default the last token that is a key. NaN where
              it has no open key

    Descriptive: attention that is sharper, or elsewhere, need not be a better explanation.
    """
    if not isinstance(layers, str) or layers not in get_args(Layers):
        raise DynamicsError(f"layers={layers!r:.60}; known: {', '.join(get_args(Layers))}")
    if not _is_share(residual):
        raise DynamicsError(f"residual is {residual!r:.60}; it is the residual stream's share, from 0 to 1")
    each, open_ = _of_layers(weights, mask)  # (B, N, N) per layer
    xp = array_namespace(each[0])
    batch, n, _ = each[0].shape
    at = _rows(row, open_, batch, n)
    known = xp.all(xp.stack([xp.sum(a[np.arange(batch), at], axis=-1) > 0 for a in each]), axis=0)  # (B,)
    if layers == "rollout":
        unit = xp.eye(n, dtype=xp.float64, device=device(each[0]))
        product = unit
        for a in each:
            closed = xp.sum(a, axis=-1, keepdims=True) == 0  # of padding: it stays what it was
            product = xp.where(closed, unit, (1 - residual) * a + residual * unit) @ product
        each = [product]
    masses = xp.stack([mass_on(tokens, a[np.arange(batch), at]) for a in each])  # (layers, B)
    found = xp.max(masses, axis=0) if layers == "max" else xp.mean(masses, axis=0)
    return xp.where(known, found, xp.full_like(found, math.nan))


def comprehensiveness(f: Confidence, x: Any, weights: Any, *, share: float = 0.2, mask: Any = None) -> float:
    """f(x) - f(x without the tokens attended to most): higher is better, 0 where they did not matter.

    f         tokens -> one number, the probability of what the model predicts for x
    x         (N,) tokens: a list, numpy or torch; f gets the same kind, shorter.  Closed tokens are never given to f
    weights   (N,) attention, or any importance; ties go to the earlier token
    share     of the N open tokens, in (0, 1]: max(1, ceil(share N)) are taken out
    mask      (N,), True for open

    Source: arXiv 1911.03429; see `sufficiency` for the same tokens alone.
    """
    kept, top = _top(x, weights, share, mask)
    return _number(f, _taken(x, kept)) - _number(f, _taken(x, [i for i in kept if i not in top]))


def sufficiency(f: Confidence, x: Any, weights: Any, *, share: float = 0.2, mask: Any = None) -> float:
    """f(x) - f(the tokens attended to most, alone): lower is better, 0 where they are enough.

    Arguments as of `comprehensiveness`.
    """
    kept, top = _top(x, weights, share, mask)
    return _number(f, _taken(x, kept)) - _number(f, _taken(x, [i for i in kept if i in top]))


def leave_one_out(f: Confidence, x: Any, *, mask: Any = None) -> NDArray[np.float64]:
    """f(x) - f(x without token i), for every token: (N,) float64, NaN for closed ones.  N + 1 calls of f.

    >>> leave_one_out(sum, [3, 0, 4])
    array([3., 0., 4.])
    """
    kept = _open(x, mask)
    found = np.full(_count(x), math.nan)
    if not kept:
        return found
    whole = _number(f, _taken(x, kept))
    for i in kept:
        found[i] = whole - _number(f, _taken(x, [j for j in kept if j != i]))
    return found


def rank_correlation(one: Any, other: Any, *, mask: Any = None) -> float:
    """Spearman's: the correlation of the ranks, ties sharing the mean of theirs; in [-1, 1].

    `one` and `other` are (N,), `mask` (N,) with True for open.  NaN for fewer than two open entries, for a side that
    is the same everywhere, and where an entry is NaN.

    >>> rank_correlation([0.1, 0.2, 0.7], [3, 5, 9])
    1.0
    """
    a, b = (_flat(name, x) for name, x in (("one", one), ("other", other)))
    if a.shape != b.shape:
        raise DynamicsError(f"{a.shape} and {b.shape} are no two values of the same entries")
    kept = _open(a, mask)
    a, b = a[kept], b[kept]
    if len(a) < 2 or np.isnan(a).any() or np.isnan(b).any():
        return math.nan
    a, b = (r - r.mean() for r in (_ranks(a), _ranks(b)))
    size = math.sqrt(float(a @ a) * float(b @ b))
    return max(-1.0, min(1.0, float(a @ b) / size)) if size else math.nan


def _of_layers(weights: Any, mask: Any) -> tuple[list[Array], Array]:
    """Weights (B, N, N) of every layer, averaged over heads, and which keys are open to any of them."""
    if weights is None or isinstance(weights, Mapping) or not isinstance(weights, Iterable):
        raise DynamicsError(
            f"weights is a {type(weights).__name__}; expected (B, n_heads, N, N) of every layer"
        )
    given = list(weights)
    if not given or not all(is_array_api_obj(w) and w.ndim == 4 and w.shape[2] == w.shape[3] for w in given):
        shapes = [getattr(w, "shape", type(w).__name__) for w in given[:1]]
        raise DynamicsError(
            f"weights are {len(given)} layers of {shapes or 'nothing'}; expected (B, n_heads, N, N)"
        )
    if len({tuple(w.shape[::2]) for w in given}) > 1:
        raise DynamicsError(
            f"weights differ in shape: {sorted({tuple(w.shape) for w in given})}; layers have one"
        )
    xp = array_namespace(given[0])
    found, any_open = [], None
    for layer in given:
        layer = layer.detach() if is_torch_array(layer) else layer
        open_ = opened(mask, layer)
        p, _, known = probabilities(layer, open_)
        heads = xp.sum(xp.astype(known, xp.float64), axis=1)  # (B, N): those that say something about a row
        found.append(xp.sum(p, axis=1) / xp.where(heads > 0, heads, xp.ones_like(heads))[..., None])
        seen = xp.any(open_, axis=1)
        any_open = seen if any_open is None else any_open | seen
    return found, any_open


def _rows(row: Any, open_: Array, batch: int, n: int) -> NDArray[np.int64]:
    """(B,): the row that is asked for, of every sequence."""
    if row is None:
        keys: NDArray[np.bool_] = np.any(_numpy(open_), axis=1)  # (B, N): tokens that some row may attend to
        return np.where(keys.any(1), n - 1 - keys[:, ::-1].argmax(1), n - 1)
    found = np.asarray(_numpy(row))
    if (
        found.dtype.kind not in "iu"
        or found.shape not in ((), (1,), (batch,))
        or not ((-n <= found) & (found < n)).all()
    ):
        raise DynamicsError(
            f"row is {row!r:.80}; expected the number of one row of {n}, or one for each of {batch}"
        )
    found = np.broadcast_to(found, (batch,))
    return found % n


def _open(x: Any, mask: Any) -> list[int]:
    """The positions of open tokens."""
    count = _count(x)
    if mask is None:
        return list(range(count))
    found = np.asarray(_numpy(mask))
    if found.shape != (count,) or found.dtype.kind not in "bui" or not np.isin(found, (0, 1)).all():
        raise DynamicsError(
            f"mask has shape {found.shape}, of {found.dtype}; expected {(count,)}, True for open"
        )
    return [int(i) for i in found.nonzero()[0]]


def _is_share(value: Any) -> bool:
    return not isinstance(value, bool) and isinstance(value, Real) and 0.0 <= float(value) <= 1.0


def _count(x: Any) -> int:
    """How many tokens there are, of something that can be given to f without some of them."""
    if is_array_api_obj(x):
        integers = "int" in str(x.dtype)
        if x.ndim == 0 or (integers and x.ndim > 1):
            raise DynamicsError(f"x has shape {tuple(x.shape)}; expected the (N,) tokens of one sequence")
        return int(x.shape[0])
    if not isinstance(x, (list, tuple)) or hasattr(x, "_fields"):
        raise DynamicsError(f"x is a {type(x).__name__}; expected tokens: a list, a tuple, numpy or torch")
    return len(x)


def _top(x: Any, weights: Any, share: float, mask: Any) -> tuple[list[int], set[int]]:
    """The positions of open tokens, and of those attended to most among them."""
    if not _is_share(share) or share == 0:
        raise DynamicsError(f"share is {share!r:.60}; it is a share of the tokens, above 0 and up to 1")
    kept, w = _open(x, mask), _flat("weights", weights)
    if w.shape != (_count(x),):
        raise DynamicsError(f"weights has shape {w.shape} for {_count(x)} tokens")
    if not kept:
        raise DynamicsError("mask closes every token; there is none to take out")
    if np.isnan(w[kept]).any():
        raise DynamicsError(
            f"weights is NaN at open token {kept[int(np.isnan(w[kept]).argmax())]}: there is no order"
        )
    count = max(1, math.ceil(round(share * len(kept), 9)))  # ceil(0.1 * 30) is 4
    return kept, set(sorted(kept, key=lambda i: (-w[i], i))[:count])


def _taken(x: Any, positions: list[int]) -> Any:
    """Some of the tokens, in their order, in the kind of x."""
    return x[positions] if is_array_api_obj(x) else type(x)(x[i] for i in positions)


def _number(f: Confidence, x: Any) -> float:
    if not callable(f):
        raise DynamicsError(f"f is a {type(f).__name__}; it is a function of tokens that returns one number")
    found = np.asarray(_numpy(f(x)))
    if found.size != 1 or found.dtype.kind not in "fiub":
        raise DynamicsError(f"f returned {found.shape} of {found.dtype}; expected one number")
    return float(found.reshape(()))


def _flat(name: str, x: Any) -> NDArray[np.float64]:
    try:
        found = np.asarray(_numpy(x))
    except ValueError:  # lists of unequal lengths
        found = np.asarray(None)
    if found.ndim != 1 or found.dtype.kind not in "biuf":
        raise DynamicsError(f"{name} has shape {found.shape}, of {found.dtype}; expected (N,) real numbers")
    return found.astype(np.float64)


def _numpy(x: Any) -> Any:
    """Of torch as numpy, bfloat16 too, which numpy does not know; anything else as it is."""
    if not is_torch_array(x):
        return x
    return (x.float() if x.is_floating_point() and x.element_size() < 4 else x).numpy(force=True)


def _ranks(x: NDArray[np.float64]) -> NDArray[np.float64]:
    """Ranks from 0; equal values share the mean of their ranks."""
    _, index, count = np.unique(x, return_inverse=True, return_counts=True)
    last = np.cumsum(count)
    ranks: NDArray[np.float64] = (last - (count + 1) / 2)[index.reshape(-1)]
    return ranks
