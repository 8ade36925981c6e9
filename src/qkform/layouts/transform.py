"""Options that change the form: (layer, changes) -> BilinearForm, in the order in which a model applies them.

    x_hat -> norm gain and bias -> projection -> its bias -> norm on queries and keys -> rotation -> score

docs/math.md#options says what each does, which of them commute, and what no bilinear form holds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from array_api_compat import array_namespace

from qkform.errors import LayoutError, QKFormError, prefixed
from qkform.form import BilinearForm, arrays
from qkform.form.folding import extended, gained_inputs, gained_outputs
from qkform.layouts.rotary import divided

if TYPE_CHECKING:
    from qkform.layouts.layer import AttentionLayer

Array = Any
_FOLDED = ("layer", "rms", "rms, gain 1 + weight")
_WHY_NOT = {
    "post": "its input is also the residual, so no norm feeds the projections alone (a post-norm block)",
    "unknown": "which norm feeds its projections is not known",
}


@dataclass(frozen=True)
class QKNorms:
    """The norms on queries and keys: tensors with their gains, several where every head has its own.

    `kind` is "rms", "rms, gain 1 + weight", "layer" or None (not known); `biases` are the tensors of their biases.
    """

    q: tuple[str, ...]
    k: tuple[str, ...]
    kind: str | None
    biases: tuple[str, ...] = ()


@dataclass(frozen=True)
class Changes:
    """What is asked for, see `qkform.options.Options`."""

    fold_norm: bool = False
    bias: bool = False
    qk_norm: bool = False
    offset: int | None = None

    def __bool__(self) -> bool:
        return self.fold_norm or self.bias or self.qk_norm or self.offset is not None


@dataclass(frozen=True)
class Changed:
    """A changed form, the same without the row of biases (for their share), and what the options left alone."""

    form: BilinearForm
    unextended: BilinearForm
    flags: tuple[str, ...]


def check(layers: Sequence[AttentionLayer], changes: Changes) -> None:
    """LayoutError or ConfigError, before a weight is read, for changes that a model does not admit."""
    if changes.fold_norm:
        for layer in layers:
            _norm_kind(layer)
    if changes.qk_norm:
        if layers and not any(layer.qk_norms for layer in layers):
            raise LayoutError("--qk-norm: this model has no norm on queries and keys")
        for layer in layers:
            _qk_kind(layer)
    if changes.offset is not None:
        reasons = [_rotates(layer, changes.offset) for layer in layers]
        if reasons and all(reasons):
            raise LayoutError(f"--offset: no layer of this model is rotary: {reasons[0]}")


def changed(layer: AttentionLayer, changes: Changes) -> Changed:
    """The form of `layer` with the changes applied. `check` may be called first, for all layers at once."""
    form = layer.form
    if not changes:
        return Changed(form, form, ())
    try:
        return _changed(layer, form, changes)
    except QKFormError as error:
        named = str(error).startswith(("--", layer.module))
        raise (error if named else prefixed(error, layer.module)) from None


def _changed(layer: AttentionLayer, form: BilinearForm, changes: Changes) -> Changed:
    flags: list[str] = []
    q, k = (form.w_q, form.b_q), (form.w_k, form.b_k)
    if changes.fold_norm:
        if _norm_kind(layer) == "none":
            flags.append("no_norm")
        else:
            gain, shift = _gain(layer)
            q = gained_inputs(*q, gain, shift)
            if layer.attention == "cross":  # keys are read from another sequence, behind a norm of its own
                flags.append("norm_on_queries_only")
            else:
                k = gained_inputs(*k, gain, shift)
    if changes.qk_norm and layer.qk_norms is not None:
        kind = _qk_kind(layer)
        q, k = (
            gained_outputs(*side, _gains(layer, names, kind), centred=kind == "layer")
            for side, names in ((q, layer.qk_norms.q), (k, layer.qk_norms.k))
        )
    if changes.offset is not None:
        q, turns = _turned(layer, q, changes.offset)
        flags += [] if turns else ["no_rope"]
    base = BilinearForm(q[0], k[0], b_q=q[1], b_k=k[1])
    return Changed(extended(base) if changes.bias else base, base, tuple(flags))


def extra_needs(layer: AttentionLayer, changes: Changes) -> list[tuple[str, int | None]]:
    """(tensor, rows) that the changes read beyond the projections, in the shape of `AttentionLayer.needs`."""
    names: list[str | None] = []
    if changes.fold_norm and layer.norm is not None:
        names += [f"{layer.norm}.weight", layer.norm_bias]
    if changes.qk_norm and layer.qk_norms is not None:
        names += [*layer.qk_norms.q, *layer.qk_norms.k]
    if changes.offset is not None and layer.positions is not None:
        names.append(layer.positions.factors)
    return [(name, None) for name in names if name is not None]


def _norm_kind(layer: AttentionLayer) -> str:
    """The kind of the norm in front, or a LayoutError that says why its gain cannot be folded."""
    if layer.norm_kind == "none" or (layer.norm_kind in _FOLDED and layer.norm is not None):
        return layer.norm_kind
    reason = _WHY_NOT.get(layer.norm_kind, f"its norm is of a kind that is not folded ({layer.norm_kind!r})")
    raise LayoutError(f"--fold-norm: {layer.module}: {reason}")


def _gain(layer: AttentionLayer) -> tuple[Array, Array | None]:
    """(gain, bias or None) of the norm in front, as float64 numpy (d_model,)."""
    gain = _vector(layer, f"{layer.norm}.weight")
    gain = gain + 1.0 if layer.norm_kind == "rms, gain 1 + weight" else gain
    return gain, None if layer.norm_bias is None else _vector(layer, layer.norm_bias)


def _qk_kind(layer: AttentionLayer) -> str | None:
    """The kind of the norms on queries and keys, None without them; LayoutError where they cannot be applied."""
    norms = layer.qk_norms
    if norms is None:
        return None
    if norms.biases:
        raise LayoutError(
            f"--qk-norm: {layer.module}: the norm on queries and keys adds {norms.biases[0]!r} behind the division by "
            "each token's length, which no bilinear form holds"
        )
    if not norms.q or not norms.k:
        raise LayoutError(
            f"--qk-norm: {layer.module}: the gains of both sides are not where they are looked for"
        )
    if norms.kind is None:
        raise LayoutError(f"--qk-norm: {layer.module}: the kind of its norm on queries and keys is not known")
    return norms.kind


def _gains(layer: AttentionLayer, names: tuple[str, ...], kind: str | None) -> Array:
    """Gains of one side, float64: (d_head,), (heads, d_head) or (heads * d_head,)."""
    read = [_read(layer, name) for name in names]
    if len({tuple(x.shape) for x in read}) > 1 or (len(read) > 1 and read[0].ndim != 1):
        raise LayoutError(f"{names[0]!r} and the gains of other heads do not have one shape")
    gain = read[0] if len(read) == 1 else array_namespace(read[0]).stack(read)
    return gain + 1.0 if kind == "rms, gain 1 + weight" else gain


def _rotates(layer: AttentionLayer, offset: int) -> str | None:
    """Why no rotation acts on this layer, None where one does."""
    if layer.positions is None:
        raise LayoutError(f"--offset: {layer.module}: how its model knows positions is not described")
    reason = layer.positions.other()
    if reason is None and layer.attention == "cross":
        return "queries and keys of cross-attention are positions of different sequences"
    if reason is None and layer.positions.rotary(layer.d_head, offset, layer.part) is None:
        return "this layer does not turn its queries and keys"
    return reason


def _turned(
    layer: AttentionLayer, q: tuple[Array, Array | None], offset: int
) -> tuple[tuple[Array, Array | None], bool]:
    """The query side turned by the distance, and whether it turns at all."""
    if _rotates(layer, offset) is not None or layer.positions is None:
        return q, False
    rotary = layer.positions.rotary(layer.d_head, offset, layer.part)
    if rotary is None:
        return q, False
    if layer.positions.factors is not None:
        rotary = divided(rotary, layer.read(layer.positions.factors), layer.positions.factors)
    w, b = q
    return (rotary.turned(w, offset), None if b is None else rotary.turned(b, offset)), True


def _vector(layer: AttentionLayer, name: str) -> Array:
    values = _read(layer, name)
    if tuple(values.shape) != (layer.d_model,):
        raise LayoutError(
            f"{name!r} has shape {tuple(values.shape)}; expected the {layer.d_model} gains or biases of a norm"
        )
    return values


def _read(layer: AttentionLayer, name: str) -> Array:
    values = layer.read(name)
    return arrays.double(arrays.checked(repr(name), values, values.ndim, "of gains"))
