"""Names, shapes and a config -> every attention of a model, in order, and what was seen and not scored."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol

from qkform.errors import ConfigError, LayoutError
from qkform.layouts.geometry import Overrides, Scope, geometry
from qkform.layouts.layer import Array, AttentionLayer, Part, Stored
from qkform.layouts.rules import MAX_NAME, Family, Rule, bias_of, families, module_pattern


class HasShape(Protocol):
    @property
    def shape(self) -> tuple[int, ...]: ...


@dataclass(frozen=True)
class Manual:
    """Where Q and K are, in a person's own words: tensor names with {layer} for the layer's number."""

    q: str | None = None
    k: str | None = None
    transposed: bool = False  # stored (in, out)

    def __post_init__(self) -> None:
        if (self.q is None) != (self.k is None):
            raise LayoutError("--q and --k go together: one names the query weights, one the key weights")


@dataclass(frozen=True)
class Layout:
    """What was found in one checkpoint."""

    model_type: str | None
    layers: Sequence[AttentionLayer]
    skipped: Sequence[Mapping[str, str]]


def find_layers(
    tensors: Mapping[str, HasShape],
    config: Mapping[str, Any] | None,
    read: Callable[[str], Array],
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
    overrides, manual = overrides or Overrides(), manual or Manual()
    where = config_name or source
    model_type, arch = _model_type(config, where)
    if manual.q is not None and manual.k is not None:
        rule = _manual_rule(manual.q, manual.k, manual.transposed)
        family = Family(model_type or "unknown", "the command line", (rule,))
    else:
        family = _family(model_type, arch, tensors, overrides, source, where)
    finder = _Finder(tensors, config, read, family, where, arch or "", overrides)
    layers, skipped = finder.find()
    if not layers:
        raise LayoutError(
            f"{source}: no tensor fits the layout of {family.model_type!r} ({family.file}). "
            f"{candidates(tensors)}"
        )
    return Layout(arch or model_type, layers, skipped)


def _model_type(config: Mapping[str, Any] | None, where: str) -> tuple[str | None, str | None]:
    """(model_type, GGUF architecture) of a config."""
    if config is None:
        return None, None
    for key in ("general.architecture", "model_type"):
        value = config.get(key)
        if value is None:
            continue
        if not isinstance(value, str):
            raise ConfigError(f"{where}: {key} is {value!r:.60}; expected a name")
        return (None, value) if key == "general.architecture" else (value, None)
    return None, None


def _family(
    model_type: str | None,
    arch: str | None,
    tensors: Mapping[str, HasShape],
    overrides: Overrides,
    source: str,
    where: str,
) -> Family:
    known = families()
    if arch is not None:
        family = known.get(f"gguf:{arch}", known["gguf:*"])
        return replace(family, model_type=arch)
    if model_type is not None and model_type in known:
        return known[model_type]
    torch = known["torch"]
    if _fits(torch, tensors) and (model_type is None or _is_whole(torch, tensors)):
        return torch
    if model_type is None and overrides.heads is not None:
        fitting = [f for n, f in known.items() if not n.startswith("gguf:") and _fits(f, tensors)]
        # Families that keep Q and K in the same place are one family here; the mask is then unknown.
        places = {
            tuple((r.module, r.q, r.k, r.fused, r.order, r.transposed) for r in f.rules) for f in fitting
        }
        if len(places) == 1:
            rules = tuple(
                replace(r, mask="unknown", causal_if="", bidirectional_if="", norm_kind="unknown", norm="")
                for r in fitting[0].rules
            )
            return replace(fitting[0], model_type="unknown", rules=rules)
    if model_type is None:
        found = f"{where} has no model_type" if where != source else f"{source} has no config.json"
        remedy = "put the model's config.json beside the weights, or pass --heads, --q and --k"
    else:
        found = f"{source}: no layout for model_type {model_type!r:.80}"
        names = ", ".join(n for n in known if not n.startswith("gguf:"))
        remedy = f"known: {names}; or pass --heads, --q and --k"
    raise LayoutError(f"{found}; {remedy}. {candidates(tensors)}")


def _fits(family: Family, tensors: Mapping[str, HasShape]) -> bool:
    return any(_matches(rule, rule.q_tensor, tensors) for rule in family.rules)


def _is_whole(family: Family, tensors: Mapping[str, HasShape]) -> bool:
    """Whether nothing else looks like a query projection: a stray module does not make a model of it."""
    mine = {name for rule in family.rules for name, _ in _matches(rule, rule.q_tensor, tensors)}
    others = (name for name, info in tensors.items() if name not in mine and len(info.shape) == 2)
    return not any(_QUERY.search(name[-MAX_NAME:]) for name in others)


def _matches(rule: Rule, tensor: str, tensors: Mapping[str, HasShape]) -> list[tuple[str, re.Match[str]]]:
    """(tensor name, match of its module) for every tensor of that name in a module that fits the rule."""
    out = []
    for name in tensors:
        if len(name) > MAX_NAME or not name.endswith(tensor):
            continue
        module = name[: len(name) - len(tensor)]
        if module and not module.endswith("."):
            continue
        match = rule.pattern.fullmatch(module.removesuffix("."))
        if match is not None:
            out.append((name, match))
    return out


class _Finder:
    def __init__(
        self,
        tensors: Mapping[str, HasShape],
        config: Mapping[str, Any] | None,
        read: Callable[[str], Array],
        family: Family,
        where: str,
        arch: str,
        overrides: Overrides,
    ) -> None:
        self.tensors, self.config, self.read = tensors, config, read
        self.family, self.where, self.arch, self.overrides = family, where, arch, overrides
        self.seen: set[str] = set()
        self.skipped: list[dict[str, str]] = []

    def find(self) -> tuple[list[AttentionLayer], list[dict[str, str]]]:
        for skip in self.family.skips:
            self._skip(skip.module, skip.reason)
        found: list[tuple[int, AttentionLayer]] = []
        for order, rule in enumerate(self.family.rules):
            for name, match in _matches(rule, rule.q_tensor, self.tensors):
                if name not in self.seen:
                    layer = self._layer(rule, name, match)
                    if layer is not None:
                        found.append((order, layer))
        components = {layer.component: None for _, layer in found}
        rank = {component: i for i, component in enumerate(components)}
        found.sort(key=lambda item: (rank[item[1].component], item[1].layer, item[0], item[1].module))
        layers = [layer for _, layer in found]
        self._report_missing(layers)
        self._report_leftovers()
        return layers, self.skipped

    def _layer(self, rule: Rule, q_name: str, match: re.Match[str]) -> AttentionLayer | None:
        module = match.group(0)
        dot = "." if module else ""
        k_name = f"{module}{dot}{rule.k_tensor}"
        self.seen |= {q_name, k_name}
        if k_name not in self.tensors:
            self.skipped.append({"module": module, "reason": f"has {rule.q_tensor} but no {rule.k_tensor}"})
            return None
        component, number = _place(match)
        scope = Scope(self.config, rule, self.where, self.arch)
        q_shape, k_shape = (
            _matrix(name, self.tensors[name].shape, rule.transposed) for name in (q_name, k_name)
        )
        size = geometry(rule, scope, self.overrides, number, (q_name, *q_shape), (k_name, *k_shape))
        if rule.attention == "self" and q_shape[1] != k_shape[1]:
            raise ConfigError(
                f"{self.where}: {q_name!r} takes {q_shape[1]} inputs and {k_name!r} {k_shape[1]}: "
                "not one layer's"
            )
        layer, shared_by = self._sharing(rule, scope, number)
        norm, norm_kind = self._norm(rule, scope, match)
        normed = any(f"{module}{dot}{n}.weight" in self.tensors for n in rule.qk_norm)
        q_part, k_part = _parts(rule)
        return AttentionLayer(
            component=component,
            module=module,
            layer=layer,
            shared_by=shared_by,
            attention=rule.attention,
            mask=_mask(rule, scope),
            n_heads=size.n_heads,
            n_kv_heads=size.n_kv_heads,
            d_model=q_shape[1],
            d_head=size.d_head,
            flags=("qk_norm",) if normed else (),
            norm=norm,
            norm_kind=norm_kind,
            q=Stored(q_name, self._bias(q_name, q_shape[0]), q_part, rule.transposed),
            k=Stored(k_name, self._bias(k_name, k_shape[0]), k_part, rule.transposed),
            read=self.read,
        )

    def _bias(self, weight: str, outputs: int) -> str | None:
        name = bias_of(weight)
        if name not in self.tensors:
            return None
        shape = self.tensors[name].shape
        if tuple(shape) != (outputs,):
            raise ConfigError(
                f"{self.where}: {name!r} has shape {tuple(shape)}; {weight!r} has {outputs} outputs"
            )
        return name

    def _norm(self, rule: Rule, scope: Scope, match: re.Match[str]) -> tuple[str | None, str]:
        if rule.pre_norm_if and scope.flag(rule.pre_norm_if) is False:
            return None, "post"
        if not rule.norm:
            return None, rule.norm_kind
        component, number = _place(match)
        path = f"{component}.{number}.{rule.norm}"
        return (path, rule.norm_kind) if f"{path}.weight" in self.tensors else (None, "none")

    def _sharing(self, rule: Rule, scope: Scope, number: int) -> tuple[int, list[int] | None]:
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
        served = [i for i in range(n) if int(i / (n / g)) == number]  # the rounding of the model's own code
        return (served[0], served) if served else (number, None)

    def _skip(self, module: str, reason: str) -> None:
        pattern = module_pattern(module)
        hit = set()
        for name in self.tensors:
            if len(name) > MAX_NAME:
                continue
            parts = name.split(".")
            for end in range(1, len(parts)):
                if pattern.fullmatch(".".join(parts[:end])):
                    self.seen.add(name)
                    hit.add(".".join(parts[:end]))
                    break
        self.skipped += [{"module": m, "reason": reason} for m in sorted(hit)]

    def _report_missing(self, layers: list[AttentionLayer]) -> None:
        """A config that promises more layers than the weights hold is a hint that a file is missing."""
        for rule in self.family.rules:
            if rule.shared:
                continue
            scope = Scope(self.config, rule, self.where, self.arch)
            promised = scope.count(rule.layers, 0) if layers else None
            for component in {a.component: None for a in layers if rule.pattern.fullmatch(a.module)}:
                have = {a.layer for a in layers if a.component == component}
                if promised and len(have) < promised[1]:
                    what, count = promised
                    reason = f"{scope.where}: {what} is {count}, and {len(have)} layers were found"
                    entry = {"module": component, "reason": reason}
                    if entry not in self.skipped:
                        self.skipped.append(entry)

    def _report_leftovers(self) -> None:
        """Anything else that is named like a query projection is mentioned, not passed over in silence."""
        for name in sorted(n for n in self.tensors if n not in self.seen and _QUERY.search(n[-MAX_NAME:])):
            shape = self.tensors[name].shape
            if len(shape) == 2 and len(self.skipped) < 1000:
                path = name.rpartition(".")[0]
                reason = f"{path[-200:]} is not described by the layout of {self.family.model_type!r}"
                self.skipped.append({"module": path.rpartition(".")[0], "reason": reason})


def _place(match: re.Match[str]) -> tuple[str, int]:
    """(component, layer number): the path up to the layer list, and the position in it."""
    groups = match.groupdict()
    if groups.get("layer") is not None:
        return match.string[: match.start("layer")].removesuffix("."), int(groups["layer"])
    parts = match.group(0).split(".")  # a rule without {layer}: the last number in the path
    for i in range(len(parts) - 1, -1, -1):
        if parts[i].isascii() and parts[i].isdigit() and len(parts[i]) < 7:
            return ".".join(parts[:i]), int(parts[i])
    return match.group(0), 0


def _parts(rule: Rule) -> tuple[Part, Part]:
    if rule.fused and rule.order == "q|k|v":
        return "q|k|v: q", "q|k|v: k"
    if rule.fused and rule.order == "heads x [q|k|v]":
        return "heads x [q|k|v]: q", "heads x [q|k|v]: k"
    if rule.fused:
        raise LayoutError(f"{rule.family}: no fused order {rule.order!r}")
    return "whole", "k|v: k" if rule.kv_fused else "whole"


def _mask(rule: Rule, scope: Scope) -> Literal["causal", "bidirectional", "unknown"]:
    if rule.causal_if and scope.flag(rule.causal_if) is not None:
        return "causal" if scope.flag(rule.causal_if) else "bidirectional"
    if rule.bidirectional_if and scope.flag(rule.bidirectional_if):
        return "bidirectional"
    return rule.mask


def _matrix(name: str, shape: Sequence[int], transposed: bool) -> tuple[int, int]:
    """(outputs, inputs) of a stored projection."""
    if len(shape) != 2 or 0 in shape:
        raise ConfigError(f"tensor {name!r} has shape {tuple(shape)}; a projection is a matrix")
    return (int(shape[1]), int(shape[0])) if transposed else (int(shape[0]), int(shape[1]))


def _manual_rule(q: str, k: str, transposed: bool) -> Rule:
    """The rule that two patterns like blocks.{layer}.attn.wq.weight describe."""
    q_parts, k_parts = q.split("."), k.split(".")
    if q == k:
        raise LayoutError(f"--q and --k name the same tensor {q!r}; fused weights need a known family")
    shared = 0
    while shared < min(len(q_parts), len(k_parts)) - 1 and q_parts[shared] == k_parts[shared]:
        shared += 1
    tails = [".".join(p[shared:]) for p in (q_parts, k_parts)]
    if any("{layer}" in t for t in tails):
        raise LayoutError(
            f"--q {q!r} and --k {k!r} differ before {{layer}}: they must share the path of the layer"
        )
    module = ".".join(q_parts[:shared])
    return Rule(
        family="manual",
        module=module,
        q=tails[0].removesuffix(".weight"),
        k=tails[1].removesuffix(".weight"),
        transposed=transposed,
        heads=("num_attention_heads", "n_heads", "n_head", "num_heads"),
        kv_heads=("num_key_value_heads", "n_kv_heads"),
        head_dim=("head_dim",),
        d_model=(),
        layers=(),
    )


_QUERY = re.compile(
    r"(?:^|[._])(?:q|wq|q_proj|query|q_lin|to_q|query_key_value|qkv|qkv_proj|wqkv|c_attn|in_proj_weight|attn_q|attn_qkv)"
    r"(?:\.weight|$)",
    re.IGNORECASE,
)
_ATTENTION = re.compile(r"(?i)att|query|key|qkv|\bq\b|\bk\b|q_proj|k_proj|wq|wk")


def candidates(tensors: Mapping[str, HasShape], limit: int = 12) -> str:
    """A sentence that lists matrices which may be Q or K, layers folded together, and flags to use them."""
    folded: dict[tuple[str, tuple[int, ...]], int] = {}
    for name, info in tensors.items():
        if len(name) <= MAX_NAME and len(info.shape) == 2:
            key = (re.sub(r"(?<=\.)\d+(?=\.)", "{layer}", name, count=1), tuple(info.shape))
            folded[key] = folded.get(key, 0) + 1
    likely = {key: n for key, n in folded.items() if _ATTENTION.search(key[0])} or folded
    if not likely:
        return f"It holds {len(tensors)} tensors and no matrix among them."
    lines = [f"{name[:120]} {shape}" + (f" x {n}" if n > 1 else "") for (name, shape), n in likely.items()]
    rest = f"; and {len(lines) - limit} more" if len(lines) > limit else ""
    example = next(iter(likely))[0][:120]
    return (
        f"Matrices that may be meant: {'; '.join(lines[:limit])}{rest}. "
        f"For example: --heads 12 --q '{example}' --k '...'"
    )
