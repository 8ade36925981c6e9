"""A live model with the face of a checkpoint: tensors, a config, and where its attentions are."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qkform.errors import ConfigError, LayoutError, SourceError
from qkform.layouts import AttentionLayer, Layout, Manual, Overrides, find_layers
from qkform.layouts.manual import QUERY
from qkform.layouts.rules import families
from qkform.sites import headwise
from qkform.sites.naming import Origin, origins
from qkform.sites.parameters import Parameter, Tree, is_module, tree, unwrapped

_HEADS = ("num_heads", "n_heads", "num_attention_heads", "n_head", "nhead", "nheads", "heads")


@dataclass(frozen=True)
class LiveTensor:
    """One tensor as a file would hold it: (outputs, inputs), or (inputs, outputs), or a bias."""

    shape: tuple[int, ...]
    origin: Origin
    per_head: bool = False  # the parameter is (n_heads, d_model, d_head), or (n_heads, d_head)


@dataclass(frozen=True)
class _Part:
    """A part of the model whose attentions are found together: a Hugging Face model, torch's modules, the rest."""

    kind: str  # "family", "torch", "headwise"
    path: str
    module: Any


class LiveModel:
    """What `qkform.checkpoints.Checkpoint` is for files, for a model in memory. It never changes the model.

    `tensors` go by the names a file of this model has (see `naming`); `bytes_read` counts what `read` copied.
    """

    format = "live"
    config_path: Path | None = None
    revision: str | None = None

    def __init__(self, model: Any) -> None:
        self.root = unwrapped(model) if is_module(model) else model
        self.source = _name(self.root)
        self.bytes_read = 0
        self._tree = tree(self.root) if is_module(model) else Tree({})
        self.modules: Mapping[str, Any] = self._tree.modules
        self.parameters: dict[str, Parameter] = self._tree.parameters()
        self.tensors: dict[str, LiveTensor] = {}
        self.config: Mapping[str, Any] | None = _config(self.root)
        self._parts = list(self._split("", self.root)) if is_module(model) else [_Part("headwise", "", model)]

    def plan(self, needs: Sequence[tuple[str, int | None]]) -> None:
        """Nothing: the weights are at hand."""

    def read(self, name: str, rows: int | None = None) -> NDArray[Any]:
        """A copy of a tensor, or of its first `rows` rows, as numpy of its own floating type.

        A copy, since the model may go on training. Raises SourceError for a parameter without numbers.
        """
        tensor = self.tensors[name]
        arrays = [self.parameters[p].numpy() for p in tensor.origin.parameters]
        if tensor.per_head:
            (array,) = arrays
            whole = np.swapaxes(array, 1, 2).reshape(tensor.shape) if array.ndim == 3 else array.reshape(-1)
            found = np.array(whole[:rows])
        elif tensor.origin.rows is None:
            found = np.array(arrays[0][:rows])
        else:
            found = np.concatenate(arrays)[tensor.origin.rows[:rows]]
        self.bytes_read += found.nbytes
        return found

    def find(self, overrides: Overrides | None = None, manual: Manual | None = None) -> Layout:
        """Every attention of the model, in order; module paths are those of the live model, wrappers left out.

        Raises SourceError for a model that is quantised or sharded, ConfigError or LayoutError as for files.
        """
        try:
            if manual is not None and manual.rule() is not None:
                return self._by_names(overrides, manual)
            return self._by_parts(overrides)
        except (ConfigError, LayoutError):
            self._refuse_unreadable()
            raise

    # ---- parts ---------------------------------------------------------------------------------------------

    def _split(self, path: str, module: Any) -> Iterator[_Part]:
        """The outermost parts that are understood as a whole."""
        kind = self._kind(module)
        if kind is not None:
            yield _Part(kind, path, module)
            return
        for name, child in module.named_children():
            yield from self._split(f"{path}.{name}".removeprefix("."), child)

    def _kind(self, module: Any) -> str | None:
        torch = sys.modules["torch"]
        if _is_pretrained(module):
            return "family"
        if isinstance(module, torch.nn.MultiheadAttention):
            return "torch"
        if headwise.is_attention(module):
            return "headwise"
        if _config(module) is None or any(_is_pretrained(m) for m in module.modules()):
            return None  # a module that only carries the config of a model inside it
        return "family"

    def _by_parts(self, overrides: Overrides | None) -> Layout:
        families = [p for p in self._parts if p.kind == "family"]
        layers: list[AttentionLayer] = []
        skipped: list[Mapping[str, str]] = []
        model_type = None
        for part in families:
            found = self._family(part, overrides)
            model_type = model_type or found.model_type
            layers += found.layers
            skipped += found.skipped
        layers += self._torch([p for p in self._parts if p.kind == "torch"], overrides)
        layers += self._headwise()
        if not layers:
            return self._unknown(overrides)
        if not families:
            skipped += self._leftovers(layers)
        return Layout(model_type, layers, skipped)

    def _family(self, part: _Part, overrides: Overrides | None) -> Layout:
        """A Hugging Face model, or a module of one, by the family of its config."""
        config = _config(part.module)
        dot = f"{part.path}." if part.path else ""
        shapes = {
            name.removeprefix(dot): p.shape for name, p in self.parameters.items() if name.startswith(dot)
        }
        found = (
            origins(part.module, shapes)
            if _is_pretrained(part.module)
            else {name: Origin((name,), None, shape) for name, shape in shapes.items()}
        )
        tensors = {
            dot + name: LiveTensor(o.shape, replace(o, parameters=tuple(dot + p for p in o.parameters)))
            for name, o in found.items()
        }
        try:
            return self._found(tensors, config, overrides)
        except LayoutError:
            for above in _above(config):
                with suppress(LayoutError):
                    return self._found({f"{above}.{n}": t for n, t in tensors.items()}, config, overrides)
            inside = [p for c, m in part.module.named_children() for p in self._split(_join(part.path, c), m)]
            attentions = self._torch([p for p in inside if p.kind == "torch"], overrides)
            if not attentions:
                raise
            model_type = (config or {}).get("model_type")
            return Layout(model_type, attentions, self._leftovers(attentions, dot))

    def _torch(self, parts: Sequence[_Part], overrides: Overrides | None) -> list[AttentionLayer]:
        """nn.MultiheadAttention, whose modules say themselves how many heads they have."""
        layers: list[AttentionLayer] = []
        for heads in dict.fromkeys(p.module.num_heads for p in parts):
            mine = tuple(f"{p.path}." if p.path else "" for p in parts if p.module.num_heads == heads)
            tensors = self._plain(n for n in self.parameters if n.startswith(mine))
            layers += self._found(tensors, {"num_heads": heads}, overrides).layers
        extended = {p.path for p in parts if p.module.bias_k is not None}
        return [replace(a, flags=(*a.flags, "add_bias_kv")) if a.module in extended else a for a in layers]

    def _headwise(self) -> list[AttentionLayer]:
        """Modules and objects with W_Q and W_K as (n_heads, d_model, d_head)."""
        found: list[AttentionLayer] = []
        for part in self._parts:
            if part.kind != "headwise":
                continue
            for attention in headwise.attentions(part.path, part.module, self.root):
                for parameter in attention.parameters():
                    self.parameters[parameter.name] = parameter
                    shape = parameter.shape
                    flat = (shape[0] * shape[2], shape[1]) if len(shape) == 3 else (shape[0] * shape[1],)
                    origin = Origin((parameter.name,), None, flat)
                    self.tensors[parameter.name] = LiveTensor(flat, origin, per_head=True)
                found.append(attention.layer(self.read))
        return found

    def _unknown(self, overrides: Overrides | None) -> Layout:
        """Names alone, with the number of heads that the modules themselves give."""
        overrides = overrides or Overrides()
        if not is_module(self.root):
            raise SourceError(not_a_source(self.root))
        if overrides.heads is None:
            given = {
                getattr(m, name)
                for m in self.modules.values()
                for name in _HEADS
                if isinstance(getattr(m, name, None), int)
            }
            if len(given) == 1:
                overrides = replace(overrides, heads=given.pop())
        return self._found(self._plain(self.parameters), self.config, overrides)

    def _by_names(self, overrides: Overrides | None, manual: Manual) -> Layout:
        """The names a person gave, which are those of the live parameters."""
        return self._found(self._plain(self.parameters), self.config, overrides, manual)

    # ---- layers --------------------------------------------------------------------------------------------

    def _plain(self, names: Iterable[str]) -> dict[str, LiveTensor]:
        shapes = {name: self.parameters[name].shape for name in names}
        return {name: LiveTensor(shape, Origin((name,), None, shape)) for name, shape in shapes.items()}

    def _found(
        self,
        tensors: Mapping[str, LiveTensor],
        config: Mapping[str, Any] | None,
        overrides: Overrides | None,
        manual: Manual | None = None,
    ) -> Layout:
        self.tensors |= tensors
        layout = find_layers(
            dict(sorted(tensors.items())),  # the order of a file: components come in the order of their names
            config,
            self.read,
            source=self.source,
            config_name=f"{self.source}, config" if config else None,
            overrides=overrides,
            manual=manual,
        )
        return replace(layout, layers=[self._shared(self._with_live_path(a)) for a in layout.layers])

    def _shared(self, layer: AttentionLayer) -> AttentionLayer:
        """The layer with all its numbers, where one module stands in several places of a list."""
        places = self._tree.places.get(id(self.modules.get(layer.module)), [])
        head, tail = f"{layer.component}.", layer.module.removeprefix(f"{layer.component}.{layer.layer}")
        numbers = [p.removeprefix(head).removesuffix(tail) for p in places if p.startswith(head)]
        if layer.shared_by is None and len(numbers) > 1 and all(n.isdigit() for n in numbers):
            return replace(layer, shared_by=tuple(int(n) for n in numbers))
        return layer

    def _with_live_path(self, layer: AttentionLayer) -> AttentionLayer:
        """The layer with the path of its module in the model, where that is not the path in the file."""
        origin = self.tensors[layer.q.weight].origin
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

    def _leftovers(self, layers: Sequence[AttentionLayer], inside: str = "") -> list[Mapping[str, str]]:
        """What is named like a query projection and is in none of the attentions that were found."""
        used = {p for a in layers for s in (a.q, a.k) for p in self.tensors[s.weight].origin.parameters}
        rest = [n for n, p in self.parameters.items() if n not in used and len(p.shape) == 2]
        paths = [n.rpartition(".")[0] for n in rest if n.startswith(inside) and QUERY.search(n)]
        return [
            {"module": path.rpartition(".")[0], "reason": f"{path} is not of an attention that is known here"}
            for path in dict.fromkeys(paths)
        ]

    def _refuse_unreadable(self) -> None:
        """Quantised and sharded weights have odd shapes and names: the reason comes before the consequence."""
        ordered = sorted(self.parameters.values(), key=lambda p: QUERY.search(p.name) is None)
        for parameter in ordered:
            parameter.refuse()
        if getattr(self.root, "is_quantized", False) or (self.config or {}).get("quantization_config"):
            raise SourceError(f"{self.source} is quantised; dequantise it first (`model.dequantize()`)")


def open_live(model: Any) -> LiveModel:
    """A live model as a checkpoint. Raises SourceError for an object that is none."""
    if not is_module(model) and not headwise.is_stack(model):
        raise SourceError(not_a_source(model))
    return LiveModel(model)


def not_a_source(thing: Any) -> str:
    return (
        "a source is a path, a hub id, sample:NAME, a torch module, or an object with W_Q and W_K per layer and head, "
        f"not a {type(thing).__name__}; for weights in memory use qkform.BilinearForm(w_q, w_k)"
    )


def _is_pretrained(module: Any) -> bool:
    base = getattr(sys.modules.get("transformers.modeling_utils"), "PreTrainedModel", None)
    return base is not None and isinstance(module, base)


def _config(module: Any) -> Mapping[str, Any] | None:
    """The config of a Hugging Face model, or of a module that carries one."""
    config: Any = getattr(module, "config", None)
    if isinstance(config, Mapping):  # diffusers
        return config if "_class_name" in config else None
    if not isinstance(getattr(config, "model_type", None), str) or not hasattr(config, "to_dict"):
        return None
    found = config.to_dict()
    return found if isinstance(found, Mapping) else None


def _above(config: Mapping[str, Any] | None) -> list[str]:
    """Where in a model of this family a module of it may stand: its names begin further down."""
    family = families().get(str((config or {}).get("model_type")))
    patterns = [rule.module.replace("{layer}", "0").split(".") for rule in family.rules] if family else []
    return [".".join(p[:i]) for p in patterns for i in range(1, len(p) + 1) if not {"**", "{inner}"} & set(p)]


def _name(root: Any) -> str:
    """The class, and where the weights came from: BertModel (bert-base-uncased)."""
    config, cfg = getattr(root, "config", None), getattr(root, "cfg", None)
    for origin in (getattr(config, "name_or_path", None), getattr(cfg, "model_name", None)):
        if isinstance(origin, str) and origin:
            return f"{type(root).__name__} ({origin})"
    return type(root).__name__


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _takewhile_same(columns: Iterable[tuple[str, ...]]) -> Iterator[tuple[str, ...]]:
    for column in columns:
        if len(set(column)) > 1:
            return
        yield column
