"""Where the attentions of a live model are: part by part, each found in the way that fits it."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from qkform.errors import ConfigError, LayoutError, SourceError
from qkform.layouts import AttentionLayer, Layout, Manual, Overrides, find_layers
from qkform.layouts.facts import without_attention
from qkform.layouts.manual import QUERY
from qkform.layouts.order import WHOLE
from qkform.layouts.rules import families
from qkform.layouts.scopes import KEYS
from qkform.sites import headwise
from qkform.sites.live import LiveModel, LiveTensor, config_of, not_a_source
from qkform.sites.naming import Origin, origins
from qkform.sites.parameters import ask, clean, is_module
from qkform.sites.standing import above

_HEADS = (*KEYS["heads"], "nheads", "heads")  # as in configs, and what modules alone call them


@dataclass(frozen=True, eq=False)
class Part:
    """A part of the model whose attentions are found together.

    kind    "family": a Hugging Face model or a module of one; "torch": an nn.MultiheadAttention; "headwise": an
            attention, or an object, with W_Q and W_K per head
    """

    kind: str
    path: str
    module: Any

    @property
    def prefix(self) -> str:
        return f"{self.path}." if self.path else ""


class Finder:
    """Finds the attentions of one live model, and leaves the tensors they are read from in `live.tensors`."""

    def __init__(self, live: LiveModel, overrides: Overrides) -> None:
        self.live, self.overrides = live, overrides

    def find(self, manual: Manual | None) -> Layout:
        live = self.live
        if (
            manual is not None and manual.rule() is not None
        ):  # names a person gave are those of live parameters
            return self._found(live.plain(live.parameters), live.config, manual=manual)
        whole = list(split("", live.root)) if is_module(live.root) else [Part("headwise", "", live.root)]
        layout = self._parts(whole)
        halves = self._halves()
        if not layout.layers:
            try:
                layout = self._names_alone()
            except LayoutError as error:
                if not halves:
                    raise
                (first, *_) = halves
                what = first["module"] or "The model"
                raise LayoutError(
                    f"{live.source}: no attention was found. {what} is none: {first['reason']}"
                ) from error
            return replace(layout, skipped=[*layout.skipped, *halves])
        apart = tuple(p.prefix for p in whole if p.kind == "family")
        return replace(layout, skipped=[*layout.skipped, *halves, *self._leftovers(layout.layers, apart)])

    # ---- parts ---------------------------------------------------------------------------------------------

    def _parts(self, parts: Sequence[Part]) -> Layout:
        """The attentions of several parts. A family that is not known is an error only where nothing else is found."""
        layers: list[AttentionLayer] = []
        skipped: list[Mapping[str, str]] = []
        unknown: list[tuple[Part, LayoutError]] = []
        model_type = None
        for part in (p for p in parts if p.kind == "family"):
            try:
                found = self._family(part)
            except LayoutError as error:
                unknown.append((part, error))
                continue
            model_type = model_type or found.model_type
            layers += found.layers
            skipped += found.skipped
        layers += self._torch([p for p in parts if p.kind == "torch"])
        layers += self._headwise([p for p in parts if p.kind == "headwise"])
        if unknown and not layers:
            raise unknown[0][1]
        skipped += [{"module": p.path, "reason": _unknown(p, error)} for p, error in unknown]
        return Layout(model_type, layers, skipped)

    def _family(self, part: Part) -> Layout:
        """By the family of its config: under the names of its files, of the live model, or those of a larger one."""
        config, dot = config_of(part.module), part.prefix
        names = [n for n in self.live.parameters if n.startswith(dot)]
        alive = self.live.plain(names)
        doubt = None
        if is_pretrained(part.module):
            shapes = {n.removeprefix(dot): self.live.parameters[n].shape for n in names}
            found, doubt = origins(part.module, shapes)
            tensors = {
                dot + name: LiveTensor(o.shape, replace(o, parameters=tuple(dot + p for p in o.parameters)))
                for name, o in found.items()
            }
        else:
            tensors = self._placed(part, config, alive)
        noted = [] if doubt is None else [{"module": _name(part), "reason": doubt}]
        try:
            layout = self._found(tensors, config)
            return replace(layout, skipped=[*noted, *layout.skipped])
        except LayoutError as error:
            if tensors.keys() != alive.keys():
                with suppress(LayoutError):
                    layout = self._found(alive, config)
                    return replace(layout, skipped=[*noted, *_fused(part, layout), *layout.skipped])
            placed = self._placed(part, config, tensors)
            if placed.keys() != tensors.keys():  # an encoder or a decoder without the model around it
                with suppress(LayoutError):
                    layout = self._found(placed, config)
                    return replace(layout, skipped=[*noted, *layout.skipped])
            parts = [p for name, m in part.module.named_children() for p in split(clean(dot + name), m)]
            with suppress(LayoutError):
                inside = self._parts(parts)
                if inside.layers:
                    left = self._leftovers(
                        inside.layers, tuple(p.prefix for p in parts if p.kind == "family"), dot
                    )
                    model_type = (config or {}).get("model_type")
                    return replace(inside, model_type=model_type, skipped=[*noted, *inside.skipped, *left])
            raise error

    def _placed(
        self, part: Part, config: Mapping[str, Any] | None, tensors: Mapping[str, LiveTensor]
    ) -> dict[str, LiveTensor]:
        """Tensors of a part by names that say where in a model of its family it stands; its own path stays in front,
        since several parts may stand in one place.
        """
        dot = part.prefix
        given = ask(part.module, "is_decoder")
        start = above(
            config,
            (name.removeprefix(dot) for name in tensors),
            part.path,
            given if isinstance(given, bool) else None,
        )
        return {f"{dot}{start}{name.removeprefix(dot)}": tensor for name, tensor in tensors.items()}

    def _torch(self, parts: Sequence[Part]) -> list[AttentionLayer]:
        """nn.MultiheadAttention, whose modules say themselves how many heads they have."""
        layers: list[AttentionLayer] = []
        given = [(p, ask(p.module, "num_heads")) for p in parts]
        for part, heads in given:
            if not isinstance(heads, int):
                raise ConfigError(
                    f"{_name(part)}: num_heads is {heads!r:.60}; expected a positive whole number"
                )
        for heads in dict.fromkeys(heads for _, heads in given):
            mine = tuple(part.prefix for part, its in given if its == heads)
            names = [n for n in self.live.parameters if n.startswith(mine)]
            layers += self._found(self.live.plain(names), {"num_heads": heads}).layers
        extended = {p.path for p in parts if ask(p.module, "bias_k") is not None}
        return [replace(a, flags=(*a.flags, "add_bias_kv")) if a.module in extended else a for a in layers]

    def _headwise(self, parts: Sequence[Part]) -> list[AttentionLayer]:
        """Modules and objects with W_Q and W_K as (n_heads, d_model, d_head)."""
        found = []
        for part in parts:
            for attention in headwise.attentions(part.path, part.module, self.live.root):
                for parameter in attention.parameters():
                    self.live.parameters[parameter.name] = parameter
                    shape = parameter.shape
                    flat = (shape[0] * shape[2], shape[1]) if len(shape) == 3 else (shape[0] * shape[1],)
                    origin = Origin((parameter.name,), None, flat)
                    self.live.tensors[parameter.name] = LiveTensor(flat, origin, per_head=True)
                found.append(attention.layer(self.live.read))
        return found

    def _names_alone(self) -> Layout:
        """Names alone, with the number of heads that the modules themselves give."""
        if not is_module(self.live.root):
            raise SourceError(not_a_source(self.live.root))
        if self.overrides.heads is None:
            values = [ask(m, name) for m in self.live.tree.modules.values() for name in _HEADS]
            given = {v for v in values if isinstance(v, int) and not isinstance(v, bool) and v > 0}
            if len(given) == 1:
                self.overrides = replace(self.overrides, heads=given.pop())
        return self._found(self.live.plain(self.live.parameters), self.live.config)

    # ---- layers --------------------------------------------------------------------------------------------

    def _found(
        self,
        tensors: Mapping[str, LiveTensor],
        config: Mapping[str, Any] | None,
        manual: Manual | None = None,
    ) -> Layout:
        self.live.tensors |= tensors
        layout = find_layers(
            dict(sorted(tensors.items())),  # the order of a file: components come in the order of their names
            config,
            self.live.read,
            source=self.live.source,
            config_name=f"{self.live.source}, config" if config else None,
            overrides=self.overrides,
            manual=manual,
        )
        return replace(layout, layers=[self._shared(self._with_live_path(a)) for a in layout.layers])

    def _shared(self, layer: AttentionLayer) -> AttentionLayer:
        """The layer with all its numbers, where one module stands in several places of a list."""
        places = self.live.tree.places.get(id(self.live.tree.modules.get(layer.module)), [])
        head, tail = f"{layer.component}.", layer.module.removeprefix(f"{layer.component}.{layer.layer}")
        numbers = [p.removeprefix(head).removesuffix(tail) for p in places if p.startswith(head)]
        if layer.shared_by is None and len(numbers) > 1 and all(n.isdigit() for n in numbers):
            return replace(layer, shared_by=tuple(int(n) for n in numbers))
        return layer

    def _with_live_path(self, layer: AttentionLayer) -> AttentionLayer:
        """The layer with the path of its module in the model, where that is not the path in the file."""
        origin = self.live.tensors[layer.q.weight].origin
        if origin.parameters == (layer.q.weight,):
            return layer
        split = [name.split(".")[:-1] for name in origin.parameters]
        if len(split) == 1:
            inside = layer.q.weight.removeprefix(layer.module).strip(".").count(".")
            path = split[0][: len(split[0]) - inside]
        else:  # a tensor of the file that the model keeps in parts
            shared = zip(*split, strict=False)
            path = [parts[0] for parts in _takewhile_same(shared)]
        numbered = sum(part.isdigit() for part in layer.module.removeprefix(layer.component).split("."))
        at = [i for i, part in enumerate(path) if part.isdigit()]
        component = path[: at[-numbered]] if 0 < numbered <= len(at) else path
        return replace(layer, module=".".join(path), component=".".join(component))

    def _leftovers(
        self, layers: Sequence[AttentionLayer], apart: tuple[str, ...], inside: str = ""
    ) -> list[Mapping[str, str]]:
        """What is named like a query projection and is in no attention that was found; `apart` look after their own."""
        tensors, parameters = self.live.tensors, self.live.parameters
        read = {p for a in layers for s in (a.q, a.k) for p in tensors[s.weight].origin.parameters}
        weights = {(id(parameters[name].owner), parameters[name].attribute) for name in read}
        used = {n for n, p in parameters.items() if (id(p.owner), p.attribute) in weights}  # under all names
        paths = [
            name.rpartition(".")[0]
            for name, parameter in parameters.items()
            if name not in used and len(parameter.shape) == 2 and QUERY.search(name)
            if name.startswith(inside) and not name.startswith(apart)
        ]
        return [
            {"module": path.rpartition(".")[0], "reason": f"{path} is not of an attention that is known here"}
            for path in dict.fromkeys(paths)
        ]

    def _halves(self) -> list[Mapping[str, str]]:
        """Modules that have one of W_Q and W_K as attentions have them, and not the other."""
        halves = ((path, headwise.half(module)) for path, module in self.live.tree.modules.items())
        return [{"module": path, "reason": reason} for path, reason in halves if reason is not None]


def _name(part: Part) -> str:
    return part.path or type(part.module).__name__


def _unknown(part: Part, error: LayoutError) -> str:
    """Why a part has no attention that is known, in the few words of a list."""
    model_type = (config_of(part.module) or {}).get("model_type")
    instead = without_attention(model_type)
    if instead is not None:
        return f"{model_type} has no softmax attention: {instead}"
    if model_type not in families():
        return f"no layout for model_type {model_type!r:.80}"
    return str(error)


def _fused(part: Part, layout: Layout) -> list[Mapping[str, str]]:
    """A note where the order of a fused weight was taken from the names in memory, since those of the file fit none."""
    if all(s.part == WHOLE for a in layout.layers for s in (a.q, a.k)):
        return []
    reason = (
        "the names of its files fit no layout: the order of its fused weights is that of its names in memory"
    )
    return [{"module": _name(part), "reason": reason}]


def split(path: str, module: Any) -> Iterator[Part]:
    """The outermost parts that are understood as a whole."""
    kind = _kind(module)
    if kind is not None:
        yield Part(kind, path, module)
        return
    for name, child in module.named_children():
        yield from split(clean(f"{path}.{name}").removeprefix("."), child)


def _kind(module: Any) -> str | None:
    torch = sys.modules["torch"]
    if is_pretrained(module):
        return "family"
    if isinstance(module, torch.nn.MultiheadAttention):
        return "torch"
    if headwise.is_attention(module):
        return "headwise"
    if config_of(module) is None or any(is_pretrained(m) for m in module.modules()):
        return None  # a module that only carries the config of a model inside it
    return "family"


def is_pretrained(module: Any) -> bool:
    base = getattr(sys.modules.get("transformers.modeling_utils"), "PreTrainedModel", None)
    return base is not None and isinstance(module, base)


def _takewhile_same(columns: Iterable[tuple[str, ...]]) -> Iterator[tuple[str, ...]]:
    for column in columns:
        if len(set(column)) > 1:
            return
        yield column
