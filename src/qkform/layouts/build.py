"""One rule at one place -> the attention that stands there: heads, norms, biases, mask and positions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from qkform.errors import ConfigError
from qkform.layouts.geometry import Geometry, Scope, geometry
from qkform.layouts.layer import AttentionLayer, Stored
from qkform.layouts.match import Place
from qkform.layouts.order import WHOLE
from qkform.layouts.rotary import qk_norm_kind
from qkform.layouts.rules import Mask, Rule, bias_of
from qkform.layouts.scopes import path_words
from qkform.layouts.search import Search
from qkform.layouts.transform import QKNorms


def built(
    search: Search,
    rule: Rule,
    q_name: str,
    at: Place,
    part: Mapping[str, Any] | None = None,
    flags: tuple[str, ...] = (),
) -> AttentionLayer | None:
    """The attention of `rule` at a place, None (and an entry in `skipped`) where its keys are missing.

    `part` is the sub-config that counts for positions. ConfigError where config and shapes contradict each other.
    """
    module = at.module
    dot = "." if module else ""
    keys_at = keys_from(search, rule, at)
    k_name = f"{keys_at.module}{dot}{rule.k_tensor}"
    search.seen.update((q_name, k_name))
    if k_name not in search.tensors:
        search.skip(module, f"has {rule.q_tensor} but no {rule.k_tensor}")
        return None
    scope = search.scope(rule)
    q_shape, k_shape = (
        matrix(name, search.tensors[name].shape, rule.transposed) for name in (q_name, k_name)
    )
    size = geometry(rule, scope, search.overrides, at.layer, (q_name, *q_shape), (k_name, *k_shape))
    if rule.attention == "self" and q_shape[1] != k_shape[1]:
        raise ConfigError(
            f"{search.where}: {q_name!r} takes {q_shape[1]} inputs and {k_name!r} {k_shape[1]}: not one layer's"
        )
    layer, shared_by = _sharing(rule, scope, at.layer)
    norm = norm_of(search, rule, scope, at)
    known_positions = search.positions(rule, at.layer, part)
    qk_norms = _qk_norms(search, rule, known_positions.kinds, f"{module}{dot}", size)
    normed = qk_norms is not None or _normed_without_weights(search, rule, at)
    q_part, k_part = rule.q_part, rule.k_part
    q_bias, k_bias = (
        _bias(search, rule, module, n, shape[0]) for n, shape in ((q_name, q_shape), (k_name, k_shape))
    )
    bias_parts = ("q|k|v: q", "q|k|v: k") if rule.bias else (q_part, k_part)
    if rule.q_bias:
        q_bias, bias_parts = _query_bias(search, f"{module}{dot}{rule.q_bias}", size), (WHOLE, WHOLE)
    own = (*(("qk_norm",) if normed else ()), *(("shared_k",) if keys_at is not at else ()))
    return AttentionLayer(
        component=at.component,
        module=module,
        layer=layer,
        shared_by=shared_by,
        attention=rule.attention,
        mask=mask_of(rule, scope),
        n_heads=size.n_heads,
        n_kv_heads=size.n_kv_heads,
        d_model=q_shape[1],
        d_head=size.d_head,
        flags=(*own, *flags),
        norm=norm.path,
        norm_kind=norm.kind,
        q=Stored(q_name, q_bias, q_part, rule.transposed, bias_parts[0]),
        k=Stored(k_name, k_bias, k_part, rule.transposed, bias_parts[1]),
        read=search.read,
        norm_bias=norm.bias,
        qk_norms=qk_norms,
        positions=known_positions,
    )


def keys_from(search: Search, rule: Rule, at: Place) -> Place:
    """Where the keys of a layer are: in another one, if the last layers share the keys of those before them."""
    if not rule.kv_shared:
        return at
    path = path_words(at.module)
    counting = [p for p in search.parts if p.value((rule.kv_shared,), ())]
    part = next((p for p in counting if p.points_to(path)), next(iter(counting), None))
    if part is None:
        return at
    shared, layers = part.value((rule.kv_shared,), ()), part.value(rule.layers, ())
    kinds = part.values.get("layer_types")
    first = (layers or 0) - (shared or 0)
    if at.layer < first or not isinstance(kinds, list) or not at.layer < len(kinds) <= 100_000:
        return at
    same = [i for i in range(max(first, 0)) if kinds[i] == kinds[at.layer]]
    if not same:
        return at
    rest = at.module.removeprefix(at.component).lstrip(".").partition(".")[2]
    return Place(f"{at.component}.{same[-1]}.{rest}".strip("."), at.component, same[-1])


class Norm(NamedTuple):
    """The norm whose output projections read: its path and the tensor of its bias, where they are; and its kind."""

    path: str | None
    kind: str
    bias: str | None = None


def norm_of(search: Search, rule: Rule, scope: Scope, at: Place) -> Norm:
    """The norm in front of an attention, as the rule names it and the checkpoint holds it."""
    if rule.pre_norm_if and scope.flag(rule.pre_norm_if) is False:
        return Norm(None, "post")
    if not rule.norm:
        return Norm(None, rule.norm_kind)
    for norm in rule.norm.split("|"):
        path = f"{at.component}.{at.layer}.{norm}"
        if f"{path}.weight" in search.tensors:
            bias = f"{path}.bias"
            return Norm(path, rule.norm_kind, bias if bias in search.tensors else None)
    return Norm(None, "none")


def mask_of(rule: Rule, scope: Scope) -> Mask:
    if rule.not_causal_if_false and scope.flag(rule.not_causal_if_false) is False:
        return "bidirectional"
    if rule.causal_if and scope.flag(rule.causal_if) is not None:
        return "causal" if scope.flag(rule.causal_if) else "bidirectional"
    if rule.bidirectional_if and scope.flag(rule.bidirectional_if):
        return "bidirectional"
    return rule.mask


def matrix(name: str, shape: Sequence[int], transposed: bool) -> tuple[int, int]:
    """(outputs, inputs) of a stored projection."""
    if len(shape) != 2 or 0 in shape:
        raise ConfigError(f"tensor {name!r} has shape {short(shape)}; a projection is a matrix")
    return (int(shape[1]), int(shape[0])) if transposed else (int(shape[0]), int(shape[1]))


def short(shape: Sequence[int]) -> str:
    """A shape in a message, however many sides it has."""
    text = str(tuple(shape[:8]))
    return text if len(shape) <= 8 else f"{text[:-1]}, ... {len(shape)} sides)"


def _qk_norms(
    search: Search, rule: Rule, kinds: tuple[str, ...], prefix: str, size: Geometry
) -> QKNorms | None:
    """The norms on queries and keys that the checkpoint holds: one for all heads, or one for each.

    The names of a rule are pairs, a query's and a key's; the first pair that is there counts.
    """
    there = {norm for norm in rule.qk_norm if search.below(f"{prefix}{norm}")}
    if not there:
        return None

    def named(norm: str, heads: int, what: str) -> tuple[str, ...]:
        if norm not in there:
            return ()
        each = range(heads) if search.below(f"{prefix}{norm}.norms") else ()
        names = (f"{prefix}{norm}.{what}", *(f"{prefix}{norm}.norms.{head}.{what}" for head in each))
        return tuple(n for n in names if n in search.tensors)

    for q_norm, k_norm in zip(rule.qk_norm[::2], rule.qk_norm[1::2], strict=False):
        sides = ((q_norm, size.n_heads), (k_norm, size.n_kv_heads))
        q, k = (named(norm, heads, "weight") for norm, heads in sides)
        biases = tuple(name for norm, heads in sides for name in named(norm, heads, "bias"))
        if q or k or biases:
            return QKNorms(q, k, qk_norm_kind(kinds), biases)
    return QKNorms((), (), None)  # of another making: seen, and not known how to apply


def _normed_without_weights(search: Search, rule: Rule, at: Place) -> bool:
    """Whether the config says that queries and keys are normed, where no gain in the file shows it."""
    if rule.qk_norm_if == ("always",):
        return True
    for part in search.parts if rule.qk_norm_if else ():
        values = [part.values.get(key) for key in rule.qk_norm_if]
        if None not in values:
            return all(v[at.layer] if isinstance(v, list) and at.layer < len(v) else v for v in values)
    return False


def _bias(search: Search, rule: Rule, module: str, weight: str, outputs: int) -> str | None:
    name = f"{module}.{rule.bias}".removeprefix(".") if rule.bias else bias_of(weight)
    if name == weight or name not in search.tensors:
        return None
    shape, expected = tuple(search.tensors[name].shape), 3 * outputs if rule.bias else outputs
    if shape != (expected,):
        raise ConfigError(
            f"{search.where}: {name!r} has shape {short(shape)}; {weight!r} has {outputs} outputs"
        )
    return name


def _query_bias(search: Search, name: str, size: Geometry) -> str | None:
    """The bias of the queries alone."""
    if name not in search.tensors:
        return None
    shape, expected = tuple(search.tensors[name].shape), size.n_heads * size.d_head
    if shape != (expected,):
        raise ConfigError(
            f"{search.where}: {name!r} has shape {short(shape)}; the queries have {expected} rows"
        )
    return name


def _sharing(rule: Rule, scope: Scope, number: int) -> tuple[int, tuple[int, ...] | None]:
    """(first layer, all layers) that a stored layer serves."""
    if rule.shared != "albert":
        return number, None
    layers = scope.count(rule.layers, number)
    groups = scope.count(("num_hidden_groups",), number)
    if layers is None:
        return number, None
    n, g = layers[1], groups[1] if groups else 1
    if n > 10_000 or number >= g:
        raise ConfigError(f"{scope.where}: {n} layers in {g} groups, and there is a group {number}")
    served = tuple(i for i in range(n) if int(i / (n / g)) == number)  # the rounding of the model's own code
    return (served[0], served) if served else (number, None)
