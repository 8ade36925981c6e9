"""One layer -> its rows: every score of the whole layer and of each head, and what was assumed."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import repeat
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qkform import __version__
from qkform.errors import QKFormError, prefixed
from qkform.form import BilinearForm
from qkform.layouts import AttentionLayer
from qkform.layouts.transform import Changed, changed
from qkform.options import Options
from qkform.records import Row

SIGNATURE_SIZE = 2048  # a whole layer's signature takes about a second at this size, and grows with its cube
AT_ONCE = 2**28  # bytes of widened weights that are scored together
_SELF_ONLY = ("symmetry", "symmetry_z", "positive_directions", "negative_directions", "positive_energy")


def layer_rows(layer: AttentionLayer, options: Options, result: Changed | None = None) -> list[Row]:
    """The row of the whole layer, then one per head: of its form changed by the options, or of `result`."""
    result = changed(layer, options.changes) if result is None else result
    form, base = result.form, result.unextended
    try:
        size = form.n_heads // form.n_kv_heads
        part = at_once(form)
        whole = base.total() if options.bias else None
        rows = _rows(layer, form.total(), options, result.flags, whole, first=None)
        unextended: Iterable[BilinearForm | None] = base.groups(part) if options.bias else repeat(None)
        for i, (heads, plain) in enumerate(zip(form.groups(part), unextended, strict=False)):
            rows += _rows(layer, heads, options, result.flags, plain, first=i * part * size)
        return rows
    except QKFormError as error:
        raise prefixed(error, layer.module) from None


def at_once(form: BilinearForm, itemsize: int = 4) -> int:
    """How many key heads, each with the query heads that read it, are scored together."""
    size = form.n_heads // form.n_kv_heads
    inputs = form.d_model * size + int(form.w_k.shape[1])
    return max(1, AT_ONCE // (itemsize * form.d_head * inputs))


def _rows(
    layer: AttentionLayer,
    form: BilinearForm,
    options: Options,
    flags: Sequence[str],
    unextended: BilinearForm | None,
    *,
    first: int | None,
) -> list[Row]:
    """One row per head of `form`, the first of which is head `first` of the layer; None: the layer as a whole.

    `unextended` is the form without the row of biases where `form` has one: the share of the biases is read from it.
    """
    scores, reason = _scores(layer, form, options)
    if unextended is not None:
        scores["bias_share"] = np.asarray(unextended.bias_share())
    scores |= _self_scores(layer, first, form, scores["norm"], raw=options.form == "raw")
    defects = form.defects()
    no_outliers = form.no_outliers(options.gamma)
    rows = []
    for i in range(form.n_heads):
        row: Row = {
            "component": layer.component,
            "module": layer.module,
            "layer": layer.layer,
            "shared_by": list(layer.shared_by) if layer.shared_by else None,
            "head": None if first is None else first + i,
            "kv_head": None if first is None else layer.form.kv_head(first + i),
            "attention": layer.attention,
            "part": layer.part,
            "mask": layer.mask,
            "d_model": form.d_model,
            "d_head": layer.d_head,
        }
        row |= {name: _plain(values[i]) if values is not None else None for name, values in scores.items()}
        for name in ("positive_directions", "negative_directions"):
            row[name] = None if row[name] is None else int(row[name])
        row["flags"] = [*layer.flags, *flags, *(["no_outliers"] if no_outliers[i] else [])]
        row["reason"] = defects[i] or reason or _undefined(row, decoupled=layer.self_score is not None)
        rows.append(row)
    return rows


def _scores(layer: AttentionLayer, form: BilinearForm, options: Options) -> tuple[dict[str, Any], str | None]:
    """Every score as an array, None where the whole layer has none, and the reason for that."""
    scores: dict[str, Any] = dict.fromkeys(_SELF_ONLY)
    reason = None
    if layer.attention == "cross":
        reason = "cross-attention: queries and keys come from different sequences, so W has no symmetry"
    else:
        scores["symmetry"], scores["symmetry_z"] = form.symmetry(), form.symmetry_z()
        size = min(form.d_model, 2 * form.d_head)
        if options.signature == "none":
            reason = "signature not asked for"
        elif options.signature == "auto" and size > SIGNATURE_SIZE:
            reason = f"signature of {size} directions is left out; --signature all computes it"
        else:
            for name, values in zip(_SELF_ONLY[2:], form.signature(), strict=True):
                scores[name] = values
    scores["directionality"] = form.directionality(options.gamma)
    scores["row_excess"] = form.row_excess(options.gamma)
    scores["column_excess"] = form.column_excess(options.gamma)
    for name in ("norm", "effective_rank", "bias_share"):
        scores[name] = getattr(form, name)()
    return {name: None if x is None else np.asarray(x) for name, x in scores.items()}, reason  # of torch too


def _self_scores(
    layer: AttentionLayer, first: int | None, form: BilinearForm, norm: NDArray[Any], *, raw: bool
) -> dict[str, Any]:
    """Norm, sign and share of v, per head or (first None) of their sum; its share of a changed W means nothing."""
    if layer.v is None:
        return dict.fromkeys(("self_norm", "self_sign", "self_share"))
    v = layer.v.astype(np.float64)  # (n_heads, d_model)
    v = v.sum(0, keepdims=True) if first is None else v[first : first + form.n_heads]
    with np.errstate(all="ignore"):  # NaN and 0/0 come out as null
        size = np.linalg.norm(v, axis=1)
        size[~np.isfinite(size)] = np.nan
        sign = v.sum(1) / np.abs(v).sum(1)
        share = 1 / (1 + (norm / size) ** 2) if raw else None
    return {"self_norm": size, "self_sign": sign, "self_share": share}


def _plain(value: Any) -> float | None:
    return float(value) if np.isfinite(value) else None


def _undefined(row: Row, *, decoupled: bool) -> str | None:
    """Why a score of a head with sound weights is null."""
    if row["norm"] is None or row["row_excess"] is None:
        return "W is beyond the range of float64"
    if row["bias_share"] is None:
        return "the biases hold NaN or infinity"
    if decoupled and row["self_norm"] is None:
        return "v, the weights of the self score, holds NaN or infinity"
    if decoupled and row["self_norm"] == 0.0:
        return "v is zero: it has no sign"
    if decoupled and row["self_share"] is None:
        return "v is of the form as stored: it has no share in a changed one"
    if row["positive_energy"] is None:
        return "W is skew: its symmetric part has no directions"
    if row["symmetry_z"] is None:
        return "d_model is 1: random weights have the same symmetry"
    return None


_SCAN_ONLY = (
    "symmetry_z",
    "signature",
    "self_score",
)  # conventions of columns that the record of a change does not have


def conventions(options: Options, *, of_change: bool = False) -> dict[str, Any]:
    """What was assumed, for the record: formulas, signs, and what is in the form and what is not.

    `of_change`: of the record of a change, which has no signature, no bias_share and another null.
    """
    offset = options.distance
    form = "W = W_Q W_K^T per head, rows query side, columns key side; a layer is the sum over its heads"
    size = "d_model"
    if options.fold_norm:
        form += "; in coordinates of the normalised token x_hat, before the norm's own gain"
    if options.bias:
        form += "; extended by one input that is 1: d_model of a row is one more than the model's"
        size = "d_model (of the extended form)"
    share = ("; bias_share is what they add to ||W||^2", "; bias_share is 1 - ||W||^2 / ||W with biases||^2")
    if of_change:
        share = ("", "")
    told = {
        "version": f"qkform {__version__}",
        "form": form,
        "symmetry": f"tr(W W) / ||W||_F^2 in [-1, 1]; random weights have mean 1/{size}",
        "symmetry_z": f"(symmetry - 1/{size}) / standard deviation of random weights with the same spectrum",
        "directionality": "(R - C) / (R + C) in [-1, 1]; negative: columns (key side) dominate",
        "excess": "R, C: sum of (norm - threshold) over row, column norms above mean + gamma * std (ddof 1)",
        "gamma": options.gamma,
        "signature": f"eigenvalues of (W + W^T)/2 above 1e-8 of the largest in size; {options.signature}",
        "biases": (
            "in the form, as one more row of W_Q and W_K" + share[0]
            if options.bias
            else "not in the form" + share[1]
        ),
        "norm_gains": (
            "rows of W_Q and W_K times the gain of the norm in front, its bias added to theirs; layers flagged no_norm "
            "have none, and cross-attention folds the query side alone (flag norm_on_queries_only)"
            if options.fold_norm
            else "not in the form"
        ),
        "rotary": (
            "not in the form (relative distance 0)"
            if offset is None
            else f"W_Q R({offset}) W_K^T: a query {abs(offset)} positions "
            f"{'after' if offset >= 0 else 'before'} its key (i - j), with the model's factor on cosines and sines; "
            "layers flagged no_rope do not turn"
        ),
        "qk_norm": (
            "columns of W_Q and W_K times the gains of the norms on queries and keys, the mean taken away where "
            "they do; their division by each token's length is not in the form"
            if options.qk_norm
            else "not in the form; layers that have it are flagged qk_norm"
        ),
        "self_score": (
            "layers flagged decoupled score a token with itself as x diag(v) x^T, not by W: self_norm is |v|, "
            "self_sign sum v / sum |v|, self_share |v|^2 / (|v|^2 + norm^2), of v as stored; the symmetric part of "
            "W then says nothing about a token and itself"
        ),
        "precision": "products in the weights' precision, at least float32; sums in float64",
    }
    return {name: value for name, value in told.items() if not (of_change and name in _SCAN_ONLY)}
