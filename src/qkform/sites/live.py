"""A live model with the face of a checkpoint: named tensors, read when they are asked for, and a config."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qkform.errors import ConfigError, LayoutError, SourceError, worded
from qkform.layouts import Layout, Manual, Overrides
from qkform.layouts.manual import QUERY
from qkform.sites import headwise
from qkform.sites.naming import Origin
from qkform.sites.parameters import Parameter, Tree, ask, is_module, tree, unwrapped


@dataclass(frozen=True, eq=False)
class LiveTensor:
    """One tensor as a file would hold it: (outputs, inputs), or (inputs, outputs), or a bias."""

    shape: tuple[int, ...]
    origin: Origin
    per_head: bool = False  # the parameter is (n_heads, d_model, d_head), or (n_heads, d_head)


class LiveModel:
    """What `qkform.checkpoints.Checkpoint` is for files, for a model in memory. It never changes the model.

    `tensors` go by the names that a file of this model has (see `naming`) and are there after `find`; `bytes_read`
    counts what `read` copied.
    """

    format = "live"
    config_path: Path | None = None
    revision: str | None = None

    def __init__(self, model: Any) -> None:
        self.root = unwrapped(model) if is_module(model) else model
        self.source = _name(self.root)
        self.bytes_read = 0
        self.tree = tree(self.root) if is_module(model) else Tree({})
        self.parameters: dict[str, Parameter] = self.tree.parameters()
        self.tensors: dict[str, LiveTensor] = {}
        self.config: Mapping[str, Any] | None = config_of(self.root)

    def plan(self, needs: Sequence[tuple[str, int | None]]) -> None:
        """Nothing: the weights are at hand."""

    def read(self, name: str, rows: int | None = None) -> NDArray[Any]:
        """A copy of a tensor, or of its first `rows` rows, as numpy of its own floating type.

        A copy, since the model may go on training. Sharded parameters (DTensor) are gathered: every rank has to take
        part. Raises SourceError for a parameter without numbers.
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
            found = np.concatenate(arrays)[tensor.origin.rows[:rows]]  # out of order, and of several
        self.bytes_read += found.nbytes
        return found

    def find(self, overrides: Overrides | None = None, manual: Manual | None = None) -> Layout:
        """Every attention of the model, in order; module paths are those of the live model, wrappers left out.

        Raises SourceError for a model that is quantised or sharded, ConfigError or LayoutError as for files.
        """
        from qkform.sites.attentions import Finder

        try:
            return Finder(self, overrides or Overrides()).find(manual)
        except (ConfigError, LayoutError) as error:
            self._refuse_unreadable()
            raise worded(error, _in_python(str(error))) from None

    def plain(self, names: Iterable[str]) -> dict[str, LiveTensor]:
        """Parameters as tensors of the same name."""
        shapes = {name: self.parameters[name].shape for name in names}
        return {name: LiveTensor(shape, Origin((name,), None, shape)) for name, shape in shapes.items()}

    def _refuse_unreadable(self) -> None:
        """Quantised and sharded weights have odd shapes and names: the reason comes before the consequence."""
        for parameter in self.parameters.values():
            asks = parameter.name.replace("key", "query").replace("k_proj", "q_proj")
            if QUERY.search(asks) or parameter.attribute == "_flat_param":
                parameter.refuse()
        if ask(self.root, "is_quantized") or (self.config or {}).get("quantization_config"):
            raise SourceError(f"{self.source} is quantised; dequantise it first (`model.dequantize()`)")


def open_live(model: Any) -> LiveModel:
    """A live model as a checkpoint. Raises SourceError for an object that is none."""
    if not is_module(model) and not headwise.is_stack(model):
        raise SourceError(not_a_source(model))
    return LiveModel(model)


def not_a_source(thing: Any) -> str:
    half = headwise.half(thing)
    if half is not None:
        return f"a {type(thing).__name__} is no attention that can be scanned: {half}"
    return (
        "a source is a path, a hub id, sample:NAME, a torch module, or an object with W_Q and W_K per layer and head, "
        f"not a {type(thing).__name__}; for weights in memory use qkform.BilinearForm(w_q, w_k)"
    )


def config_of(module: Any) -> Mapping[str, Any] | None:
    """The config of a Hugging Face model, or of a module that carries one."""
    config: Any = ask(module, "config")
    if isinstance(config, Mapping):  # diffusers
        return config if "_class_name" in config else None
    if not isinstance(ask(config, "model_type"), str) or not hasattr(config, "to_dict"):
        return None
    try:
        found = config.to_dict()
    except Exception as error:  # foreign code may raise anything
        raise SourceError(
            f"the config of a {type(module).__name__} cannot be read: {type(error).__name__}: {error!s:.200}"
        ) from error
    return found if isinstance(found, Mapping) else None


def _name(root: Any) -> str:
    """The class, and where the weights came from: BertModel (bert-base-uncased)."""
    for origin in (ask(ask(root, "config"), "name_or_path"), ask(ask(root, "cfg"), "model_name")):
        if isinstance(origin, str) and origin:
            return f"{type(root).__name__} ({origin})"
    return type(root).__name__


def _in_python(text: str) -> str:
    """A message about a file, for someone who has a model: keywords in place of flags, and no folder to look in."""
    text = text.replace("put the model's config.json beside the weights, or pass", "pass")
    text = text.replace("has no config.json", "has no config of a known kind")
    text = re.sub(r"--heads N --q ('[^']*') --k ('[^']*')", r"heads=N, q=\1, k=\2", text)
    return re.sub(r"(?<!\w)--([a-z]+(?:-[a-z]+)*)", lambda flag: flag[1].replace("-", "_") + "=", text)
