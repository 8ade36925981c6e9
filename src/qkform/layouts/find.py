"""Names, shapes and a config -> every attention of a model, in order, and what was seen and not scored."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal

from qkform.errors import ConfigError, LayoutError
from qkform.layouts.choose import choose, named_type, nothing_known
from qkform.layouts.facts import Block, block_of, blocks_of, without_attention
from qkform.layouts.geometry import Geometry, Overrides, Scope, geometry
from qkform.layouts.latent import Latent, latents, split
from qkform.layouts.latent import layers as latent_layers
from qkform.layouts.layer import AttentionLayer, Reader, Stored
from qkform.layouts.manual import QUERY, Manual, candidates
from qkform.layouts.match import MAX_NAME, HasShape, Place, modules_of, place, places
from qkform.layouts.naming import is_cross, pairs
from qkform.layouts.order import WHOLE
from qkform.layouts.outside import translated
from qkform.layouts.rotary import Positions, positions, qk_norm_kind
from qkform.layouts.rules import Family, Note, Rule, bias_of
from qkform.layouts.scopes import Candidate as ConfigPart
from qkform.layouts.scopes import Projection, path_words, solve
from qkform.layouts.scopes import candidates as config_parts
from qkform.layouts.transform import QKNorms

# what models call the norms on queries and keys, inside the attention module
QK_NORMS = (
    "q_norm",
    "k_norm",
    "q_layernorm",
    "k_layernorm",
    "query_layernorm",
    "key_layernorm",
    "norm_q",
    "norm_k",
)


Mask = Literal["causal", "bidirectional", "unknown"]
_MAKE_CAUSAL: Mapping[str, bool] = {"is_decoder": True, "is_causal": True, "causal": True}
_MAKE_BIDIRECTIONAL: Mapping[str, bool] = {
    "is_causal": False,
    "causal": False,
    "use_bidirectional_attention": True,
    "use_bidirectional": True,
    "bidirectional": True,
}
CONVOLUTIONS = (
    "q_conv1d",
    "k_conv1d",
    "q_conv",
    "k_conv",
    "k_sconv",
    "q_sconv",
    "convolution_projection_query",
)


@dataclass(frozen=True)
class Layout:
    """What was found in one checkpoint."""

    model_type: str | None
    layers: Sequence[AttentionLayer]
    skipped: Sequence[Mapping[str, str]]


def find_layers(
    tensors: Mapping[str, HasShape],
    config: Mapping[str, Any] | None,
    read: Reader,
    *,
    source: str,
    config_name: str | None = None,
    overrides: Overrides | None = None,
    manual: Manual | None = None,
) -> Layout:
    """Every attention layer of a checkpoint, without reading a weight.

    `config` is the parsed config.json, or the metadata of a GGUF file (which has general.architecture).
    Raises ConfigError where config and shapes contradict each other, LayoutError where no layout is known.
    """
    overrides = overrides or Overrides()
    where = config_name or source
    config = translated(config)
    model_type, arch = named_type(config, where)
    rule = manual.rule() if manual else None
    family = (
        Family(model_type or "unknown", "the command line", (rule,))
        if rule is not None
        else choose(model_type, arch, tensors, config, heads_given=overrides.heads is not None)
    )
    finder = _Finder(
        tensors, config, read, family or Family(model_type or "unknown", "names", ()), where, arch, overrides
    )
    named = rule is None and not arch
    layers, skipped = finder.find(named)
    if not layers and (instead := without_attention(model_type)):
        raise LayoutError(
            f"{source}: {model_type} has no softmax attention, so it has no query-key form: {instead}"
        )
    if not layers and family is None:
        reasons = [f"{s['module'][-200:]}: {s['reason']}" for s in finder.unproved]
        raise nothing_known(model_type, tensors, reasons, source=source, where=where)
    if not layers:
        wanted = (
            f"the layout of {finder.family.model_type!r} ({finder.family.file})"
            if rule is None
            else "--q and --k"
        )
        raise LayoutError(f"{source}: no tensor fits {wanted}. {candidates(tensors)}")
    return Layout(model_type, layers, skipped)


class _Finder:
    def __init__(
        self,
        tensors: Mapping[str, HasShape],
        config: Mapping[str, Any] | None,
        read: Reader,
        family: Family,
        where: str,
        arch: str,
        overrides: Overrides,
    ) -> None:
        self.tensors, self.config, self.read = tensors, config, read
        self.family, self.where, self.arch, self.overrides = family, where, arch, overrides
        self.seen: set[str] = set()
        self.skipped: list[dict[str, str]] = []
        self.unproved: list[dict[str, str]] = []  # pairs whose heads are not known, with the reason

    def find(self, by_names: bool) -> tuple[list[AttentionLayer], list[dict[str, str]]]:
        """The layers of the family's rules, then those that names alone tell, and everything that is left."""
        for skip in self.family.skips:
            self._skip(skip.module, skip.reason)
        found: list[tuple[int, AttentionLayer]] = []
        rules = [rule for rule in self.family.rules if _counts(rule, self.config)]
        for order, rule in enumerate(rules):
            for name, found_at in places(rule, self.tensors):
                if name not in self.seen:
                    layer = self._layer(rule, name, found_at)
                    if layer is not None:
                        found.append((order, layer))
        if by_names and (found or not rules):  # a family of which nothing is there is not the family it says
            found += [(len(rules), layer) for layer in self._named()]
        components = {layer.component: None for _, layer in found}
        rank = {component: i for i, component in enumerate(components)}
        found.sort(key=lambda item: (rank[item[1].component], item[1].layer, item[0], item[1].module))
        layers = [layer for _, layer in found]
        self._report_terms(layers)
        self._report_missing(layers)
        self._report_leftovers()
        return layers, self.skipped

    def _named(self) -> Iterator[AttentionLayer]:
        """Attentions that no rule of the family has taken: of blocks that the model type has, then by names alone."""
        for block in blocks_of(self.family.model_type):
            if block.skip:
                self._skip(block.module, block.skip)
            elif block.names_tensors:
                for q_name, at in places(block.rule(self.family.model_type), self.tensors):
                    whole = block_of(self.family.model_type, at.module, block) or block
                    yield from self._proved(whole.rule(self.family.model_type), q_name, at, whole)
        for found in latents(self.tensors):
            yield from self._latent(found)
        for pair in pairs(self.tensors):
            facts = block_of(self.family.model_type, pair.place.module)
            names = {"q": f"{pair.q}{pair.suffix}", "k": f"{pair.k}{pair.suffix}", "exact": True}
            attention = "cross" if is_cross(pair.place.module) else "self"
            known: dict[str, Any] = {"module": pair.place.module, "attention": attention, **names}
            rule = (
                Rule(self.family.model_type, **known)
                if facts is None
                else facts.rule(self.family.model_type, **known)
            )
            yield from self._proved(rule, pair.q_tensor, pair.place, facts)
        self.skipped += self.unproved

    def _latent(self, found: Latent) -> Iterator[AttentionLayer]:
        """The three layers of a latent attention."""
        if found.q in self.seen:
            return
        self.seen |= set(found.tensors)
        size = split(found, self.tensors, self.parts)
        if isinstance(size, str):
            self.unproved.append({"module": found.place.module, "reason": size})
            return
        block = block_of(self.family.model_type, found.place.module)
        rule = (block or Block("**", {"q": "q", "k": "k"})).rule(self.family.model_type, q="q", k="k")
        scope = Scope(self.config, rule, self.where, self.arch)
        norm, norm_kind = self._norm(rule, scope, found.place)
        flags = () if block else ("by_names",)
        facts: dict[str, Any] = {
            "mask": self._undoubted(_mask(rule, scope)),
            "norm": norm,
            "norm_kind": norm_kind,
            "flags": flags,
        }
        part = self._part_of(found.place.module)
        facts["positions"] = self._positions(rule.family, scope, found.place.layer, part)
        facts["norm_bias"] = f"{norm}.bias" if norm and f"{norm}.bias" in self.tensors else None
        yield from latent_layers(found, size, self.tensors, self.read, facts)

    def _undoubted(self, mask: Mask) -> Mask:
        """The mask that a model type was seen to have, unless a switch in the config says otherwise."""
        doubts = {"bidirectional": _MAKE_CAUSAL, "causal": _MAKE_BIDIRECTIONAL}.get(mask, {})
        switched = any(part.values.get(key) is value for part in self.parts for key, value in doubts.items())
        return "unknown" if switched else mask

    def _proved(self, rule: Rule, q_name: str, at: Place, block: Block | None) -> Iterator[AttentionLayer]:
        """The layer of a rule that does not say which part of the config counts, if shapes prove one."""
        k_name = f"{self._keys_from(rule, at).module}.{rule.k_tensor}".removeprefix(".")
        if q_name in self.seen or k_name not in self.tensors:
            return
        other = self._no_softmax(at.module)
        if other:
            self.seen |= {q_name, k_name}
            self.skipped.append({"module": at.module, "reason": other})
            return
        try:
            shapes = [_matrix(n, self.tensors[n].shape, rule.transposed) for n in (q_name, k_name)]
            q = Projection(*shapes[0], rule.order if rule.fused else rule.q_order)
            k = Projection(*shapes[1], rule.order if rule.fused else rule.kv_order if rule.kv_fused else "")
            solved = solve(
                self.parts, self.overrides, at.module, q, k, block.keys if block else None, rule.any_width
            )
        except ConfigError as error:
            solved = str(error)
        if isinstance(solved, str):
            self.seen |= {q_name, k_name}
            shown = f"{q_name[-200:]} {_short(self.tensors[q_name].shape)}"
            self.unproved.append({"module": at.module, "reason": f"{solved}: {shown}"})
            return
        rule = replace(
            rule,
            mask=self._undoubted(rule.mask),
            heads=(f"={solved.n_heads}",),
            kv_heads=(f"={solved.n_kv_heads}",),
            head_dim=(f"={solved.d_head}",),
            d_model=(),
            attention="cross" if q.inputs != k.inputs or self._reduced(at.module) else rule.attention,
            qk_norm=rule.qk_norm or QK_NORMS,
        )
        layer = self._layer(rule, q_name, at, self._part_of(at.module))
        if layer is not None:
            yield layer if block else replace(layer, flags=(*layer.flags, "by_names"))

    def _part_of(self, module: str) -> Mapping[str, Any] | None:
        """The sub-config that names a model type of its own and is the only one that a path points to."""
        path = path_words(module)
        pointed = [c.values for c in self.parts if c.points_to(path) and "model_type" in c.values]
        return pointed[0] if len(pointed) == 1 else None

    def _positions(self, family: str, scope: Scope, layer: int, part: Mapping[str, Any] | None) -> Positions:
        config = scope.config if part is None else part
        return positions(family, self.arch, config, scope.where, layer, self.tensors)

    def _keys_from(self, rule: Rule, at: Place) -> Place:
        """Where the keys of a layer are: in another one, if the last layers share the keys of those before them."""
        if not rule.kv_shared:
            return at
        path = path_words(at.module)
        counting = [p for p in self.parts if p.value((rule.kv_shared,), ())]
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

    def _layer(
        self, rule: Rule, q_name: str, at: Place, part: Mapping[str, Any] | None = None
    ) -> AttentionLayer | None:
        module = at.module
        dot = "." if module else ""
        keys_at = self._keys_from(rule, at)
        k_name = f"{keys_at.module}{dot}{rule.k_tensor}"
        self.seen |= {q_name, k_name}
        if k_name not in self.tensors:
            self.skipped.append({"module": module, "reason": f"has {rule.q_tensor} but no {rule.k_tensor}"})
            return None
        scope = Scope(self.config, rule, self.where, self.arch)
        q_shape, k_shape = (
            _matrix(name, self.tensors[name].shape, rule.transposed) for name in (q_name, k_name)
        )
        size = geometry(rule, scope, self.overrides, at.layer, (q_name, *q_shape), (k_name, *k_shape))
        if rule.attention == "self" and q_shape[1] != k_shape[1]:
            raise ConfigError(
                f"{self.where}: {q_name!r} takes {q_shape[1]} inputs and {k_name!r} {k_shape[1]}: "
                "not one layer's"
            )
        layer, shared_by = self._sharing(rule, scope, at.layer)
        norm, norm_kind = self._norm(rule, scope, at)
        known_positions = self._positions(rule.family, scope, at.layer, part)
        qk_norms = self._qk_norms(rule, known_positions.kinds, f"{module}{dot}", size)
        normed = qk_norms is not None or self._norm_without_weights(rule, at)
        q_part, k_part = rule.q_part, rule.k_part
        q_bias, k_bias = (
            self._bias(rule, module, n, shape[0]) for n, shape in ((q_name, q_shape), (k_name, k_shape))
        )
        bias_parts = ("q|k|v: q", "q|k|v: k") if rule.bias else (q_part, k_part)
        if rule.q_bias:
            q_bias, bias_parts = self._one_bias(f"{module}{dot}{rule.q_bias}", size), (WHOLE, WHOLE)
        return AttentionLayer(
            component=at.component,
            module=module,
            layer=layer,
            shared_by=shared_by,
            attention=rule.attention,
            mask=_mask(rule, scope),
            n_heads=size.n_heads,
            n_kv_heads=size.n_kv_heads,
            d_model=q_shape[1],
            d_head=size.d_head,
            flags=(*(("qk_norm",) if normed else ()), *(("shared_k",) if keys_at is not at else ())),
            norm=norm,
            norm_kind=norm_kind,
            q=Stored(q_name, q_bias, q_part, rule.transposed, bias_parts[0]),
            k=Stored(k_name, k_bias, k_part, rule.transposed, bias_parts[1]),
            read=self.read,
            norm_bias=f"{norm}.bias" if norm and f"{norm}.bias" in self.tensors else None,
            qk_norms=qk_norms,
            positions=known_positions,
        )

    def _qk_norms(self, rule: Rule, kinds: tuple[str, ...], prefix: str, size: Geometry) -> QKNorms | None:
        """The norms on queries and keys that the checkpoint holds: one for all heads, or one for each.

        The names of a rule are pairs, a query's and a key's; the first pair that is there counts.
        """

        def named(norm: str, heads: int, what: str) -> tuple[str, ...]:
            each = (f"{prefix}{norm}.norms.{head}.{what}" for head in range(heads))
            return tuple(n for n in (f"{prefix}{norm}.{what}", *each) if n in self.tensors)

        for q_norm, k_norm in zip(rule.qk_norm[::2], rule.qk_norm[1::2], strict=False):
            sides = ((q_norm, size.n_heads), (k_norm, size.n_kv_heads))
            q, k = (named(norm, heads, "weight") for norm, heads in sides)
            biases = tuple(name for norm, heads in sides for name in named(norm, heads, "bias"))
            if q or k or biases:
                return QKNorms(q, k, qk_norm_kind(kinds), biases)
        starts = tuple(f"{prefix}{norm}." for norm in rule.qk_norm)
        if starts and any(name.startswith(starts) for name in self.tensors):
            return QKNorms((), (), None)  # of another making: seen, and not known how to apply
        return None

    def _norm_without_weights(self, rule: Rule, at: Place) -> bool:
        """Whether the config says that queries and keys are normed, where no gain in the file shows it."""
        if rule.qk_norm_if == ("always",):
            return True
        for part in self.parts if rule.qk_norm_if else ():
            values = [part.values.get(key) for key in rule.qk_norm_if]
            if None not in values:
                return all(v[at.layer] if isinstance(v, list) and at.layer < len(v) else v for v in values)
        return False

    def _bias(self, rule: Rule, module: str, weight: str, outputs: int) -> str | None:
        name = f"{module}.{rule.bias}".removeprefix(".") if rule.bias else bias_of(weight)
        if name == weight or name not in self.tensors:
            return None
        shape, expected = tuple(self.tensors[name].shape), 3 * outputs if rule.bias else outputs
        if shape != (expected,):
            raise ConfigError(
                f"{self.where}: {name!r} has shape {_short(shape)}; {weight!r} has {outputs} outputs"
            )
        return name

    def _one_bias(self, name: str, size: Geometry) -> str | None:
        """The bias of the queries alone."""
        if name not in self.tensors:
            return None
        shape, expected = tuple(self.tensors[name].shape), size.n_heads * size.d_head
        if shape != (expected,):
            raise ConfigError(
                f"{self.where}: {name!r} has shape {_short(shape)}; the queries have {expected} rows"
            )
        return name

    def _norm(self, rule: Rule, scope: Scope, at: Place) -> tuple[str | None, str]:
        if rule.pre_norm_if and scope.flag(rule.pre_norm_if) is False:
            return None, "post"
        if not rule.norm:
            return None, rule.norm_kind
        for norm in rule.norm.split("|"):
            path = f"{at.component}.{at.layer}.{norm}"
            if f"{path}.weight" in self.tensors:
                return path, rule.norm_kind
        return None, "none"

    def _sharing(self, rule: Rule, scope: Scope, number: int) -> tuple[int, tuple[int, ...] | None]:
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
        served = tuple(
            i for i in range(n) if int(i / (n / g)) == number
        )  # the rounding of the model's own code
        return (served[0], served) if served else (number, None)

    def _skip(self, pattern: str, reason: str) -> None:
        for module, names in sorted(modules_of(pattern, self.tensors).items()):
            if not self.seen.issuperset(names):
                self.skipped.append({"module": module, "reason": reason})
            self.seen.update(names)

    def _reduced(self, module: str) -> bool:
        """Whether keys are read from a shortened sequence: the two sides have different inputs."""
        return any(
            f"{module}.{name}" in self.paths
            for name in ("sr", "sequence_reduction", "sequences_reduction", "spatial_reduction")
        )

    def _no_softmax(self, module: str) -> str | None:
        """Why a module with queries and keys has no form between tokens, as what stands beside them shows."""
        if any(f"{module}.{name}" in self.tensors for name in ("A_log", "dt_bias", "query_decay")):
            return "linear attention: no softmax over scores"
        if any(f"{module}.{name}" in self.paths for name in CONVOLUTIONS):
            return "a convolution stands between the projection and the score"
        return None

    @cached_property
    def parts(self) -> list[ConfigPart]:
        """The parts of the config that may speak of heads."""
        return config_parts(self.config)

    @cached_property
    def paths(self) -> frozenset[str]:
        """The modules that tensors stand in, and those three levels around them."""
        found, level = set[str](), set(self.tensors)
        for _ in range(4):
            level = {name.rpartition(".")[0] for name in level}
            found |= level
        return frozenset(found - {""})

    def _report_terms(self, layers: list[AttentionLayer]) -> None:
        """Terms of the scores that the forms do not have, once per stack of layers."""
        for note in self.family.notes:
            if _counts(note, self.config):
                values = self.config or {}
                reason = "".join(_words(values.get(p, p)) for p in re.split(r"[{}]", note.reason))
                for component in {a.component: None for a in layers if place(note.module, a.module)}:
                    self.skipped.append({"module": component, "reason": reason})

    def _report_missing(self, layers: list[AttentionLayer]) -> None:
        """A config that promises more layers than the weights hold is a hint that a file is missing."""
        for rule in self.family.rules:
            if rule.shared:
                continue
            scope = Scope(self.config, rule, self.where, self.arch)
            promised = scope.count(rule.layers, 0) if layers else None
            for component in {a.component: None for a in layers if place(rule.module, a.module)}:
                have = {a.layer for a in layers if a.component == component}
                if promised and len(have) < promised[1]:
                    what, count = promised
                    reason = f"{scope.where}: {what} is {count}, and {len(have)} layers were found"
                    entry = {"module": component, "reason": reason}
                    if entry not in self.skipped:
                        self.skipped.append(entry)

    def _report_leftovers(self) -> None:
        """Anything else that is named like a query projection is mentioned, not passed over in silence."""
        for name in sorted(n for n in self.tensors if n not in self.seen and QUERY.search(n[-MAX_NAME:])):
            shape = self.tensors[name].shape
            if len(shape) == 2 and len(self.skipped) < 1000:
                path = name.rpartition(".")[0]
                reason = f"{path[-200:]} is not described by the layout of {self.family.model_type!r}"
                self.skipped.append({"module": path.rpartition(".")[0], "reason": reason})


def _counts(entry: Rule | Note, config: Mapping[str, Any] | None) -> bool:
    """Whether the config has the values with which this rule or note counts."""
    defaults = entry.unless_set if isinstance(entry, Rule) else {}
    return all((config or {}).get(key, defaults.get(key)) == value for key, value in entry.when.items())


def _words(value: Any) -> str:
    """A config value in a sentence."""
    text = ", ".join(map(str, value)) if isinstance(value, list) else str(value)
    return text[:100]


def _mask(rule: Rule, scope: Scope) -> Literal["causal", "bidirectional", "unknown"]:
    if rule.not_causal_if_false and scope.flag(rule.not_causal_if_false) is False:
        return "bidirectional"
    if rule.causal_if and scope.flag(rule.causal_if) is not None:
        return "causal" if scope.flag(rule.causal_if) else "bidirectional"
    if rule.bidirectional_if and scope.flag(rule.bidirectional_if):
        return "bidirectional"
    return rule.mask


def _matrix(name: str, shape: Sequence[int], transposed: bool) -> tuple[int, int]:
    """(outputs, inputs) of a stored projection."""
    if len(shape) != 2 or 0 in shape:
        raise ConfigError(f"tensor {name!r} has shape {_short(shape)}; a projection is a matrix")
    return (int(shape[1]), int(shape[0])) if transposed else (int(shape[0]), int(shape[1]))


def _short(shape: Sequence[int]) -> str:
    text = str(tuple(shape[:8]))
    return text if len(shape) <= 8 else f"{text[:-1]}, ... {len(shape)} sides)"
