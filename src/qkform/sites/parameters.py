"""The parameters of a live model: under clean names, as numpy, and why some of them cannot be read."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeGuard

import numpy as np
from numpy.typing import NDArray

from qkform.errors import SourceError
from qkform.layouts.match import is_number
from qkform.wrappers import ADAPTED, WRAPPERS

_INSIDE = (*WRAPPERS, ADAPTED)  # what a path names beside the modules of the model
_FLOATS = frozenset({"torch.float64", "torch.float32", "torch.float16", "torch.bfloat16"})
_MERGE = "merge it first (`model.merge_and_unload()`), or scan the model without it"


@dataclass(frozen=True, eq=False)
class Parameter:
    """One parameter: the attribute of the module that holds it, so that a parametrized weight is read as it acts.

    With a `root`, the path of the name is followed from there at every use: a module that has been replaced in the
    model since is no longer read or written.
    """

    name: str  # path in the model, wrappers left out
    owner: Any
    attribute: str
    shape: tuple[int, ...]
    index: int | None = None  # one entry of a stack of layers
    adapted: bool = False  # what the model computes with is this and an adapter's part
    root: Any = None  # the model, where it is a torch module

    @property
    def value(self) -> Any:
        """The tensor itself; a parameter, unless it is parametrized or one of a stack.

        SourceError where the model has another module in its place by now, or where computing it fails.
        """
        if self.root is not None:
            still_there(self.root, self.name.rpartition(".")[0], self.owner, self.adapted)
        try:
            value = getattr(self.owner, self.attribute)
        except Exception as error:  # the code of a parametrization or a property may raise anything
            raise SourceError(
                f"cannot read parameter {self.name!r}: computing it raises {type(error).__name__}: {error!s:.200}"
            ) from error
        return value if self.index is None else value[self.index]

    def problem(self) -> str | None:
        """Why its numbers cannot be had, with the remedy; None where they can."""
        value = self.value
        if isinstance(value, np.ndarray):
            return None
        kind = type(value).__name__
        if kind.startswith("Uninitialized"):
            return "it has no shape yet; run the model once first"
        if self.adapted:
            return f"an adapter adds to it; {_MERGE}"
        if hasattr(value, "ds_id") and value.numel() == 0:
            return (
                "it is sharded by DeepSpeed ZeRO-3; gather it first: "
                "`with deepspeed.zero.GatheredParameters(model.parameters())`"
            )
        if self.attribute == "_flat_param" or (
            self.attribute == "weight" and hasattr(self.owner, "in_features") and value.ndim != 2
        ):
            return (
                f"it is a flat or packed {kind} of shape {tuple(value.shape)}; under FSDP scan inside "
                "`FullyShardedDataParallel.summon_full_params(model)`, otherwise dequantise the model"
            )
        if value.device.type == "meta":
            return "it is on the meta device and has no values; load the weights, without offloading"
        if hasattr(value, "full_tensor"):
            return None
        if not _is_plain(value):
            return f"it is a {kind}, a quantised or wrapped tensor; dequantise the model first"
        if str(value.dtype) not in _FLOATS:
            return f"it holds {value.dtype}, quantised weights; dequantise the model, or load it in bfloat16"
        if str(value.layout) != "torch.strided":
            return f"it is a {value.layout} tensor; make it dense first"
        if self.index is None and shape_of(value) != self.shape:
            return (
                f"it had shape {self.shape} and now has {shape_of(value)}; "
                "look at the model again (qkform.sites.find, qkform.layers)"
            )
        return None

    def refuse(self) -> None:
        """SourceError that names the parameter, where its numbers cannot be had."""
        problem = self.problem()
        if problem:
            raise SourceError(f"cannot read parameter {self.name!r}: {problem}")

    def numpy(self) -> NDArray[Any]:
        """Its numbers, on the CPU, in the memory of the model itself where that is possible: copy before keeping."""
        self.refuse()
        value = self.value
        if isinstance(value, np.ndarray):
            return value
        import torch

        with torch.no_grad():
            value = value.detach()
            if hasattr(value, "full_tensor"):
                value = value.full_tensor()
            value = value.cpu()
            if value.dtype == torch.bfloat16:
                import ml_dtypes

                array: NDArray[Any] = value.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
            else:
                array = value.numpy()
        return array


def _is_plain(value: Any) -> bool:
    """A tensor or a parameter, not a subclass that keeps its numbers in another form."""
    torch = sys.modules["torch"]
    return type(value) in (torch.Tensor, torch.nn.Parameter)


def is_module(thing: Any) -> TypeGuard[Any]:
    """Whether `thing` is a torch module, without importing torch: whoever made one has imported it."""
    torch = sys.modules.get("torch")
    return torch is not None and hasattr(torch, "nn") and isinstance(thing, torch.nn.Module)


def is_tensor(thing: Any) -> TypeGuard[Any]:
    torch = sys.modules.get("torch")
    return isinstance(thing, np.ndarray) or (
        torch is not None and hasattr(torch, "Tensor") and isinstance(thing, torch.Tensor)
    )


def unwrapped(model: Any) -> Any:
    """The model inside compiled, data-parallel and sharding wrappers."""
    while True:
        children = dict(model.named_children())
        inner = next((children[name] for name in children if name in _INSIDE), None)
        if inner is None and list(children) == ["module"] and not any(True for _ in model.parameters(False)):
            inner = children["module"]
        if inner is None or inner is model:
            return model
        model = inner


def clean(path: str) -> str:
    return ".".join(part for part in path.split(".") if part not in _INSIDE)


def still_there(root: Any, path: str, module: Any, adapted: bool = False) -> None:
    """SourceError unless `module` is what the model has at a clean path, with or without an adapter as before."""
    found, now_adapted = _at(root, path)
    if found is not module:
        gone = "nothing" if found is None else f"another {type(found).__name__}"
        raise SourceError(
            f"the model has {gone} at {path!r} by now, and what was found there is no longer used; "
            "look at the model again (qkform.sites.find, qkform.layers)"
        )
    if now_adapted and not adapted:
        raise SourceError(f"{path!r} has got an adapter since it was found; {_MERGE}")


def _at(root: Any, path: str) -> tuple[Any, bool]:
    """The module at a clean path, the innermost where wrappers hold it, and whether one of those is an adapter's."""
    chain = _inwards(root, False)
    for part in path.split(".") if path else []:
        inside = [(m._modules[part], adapted) for m, adapted in chain if m._modules.get(part) is not None]
        if not inside:
            return None, False
        chain = _inwards(*inside[-1])
    return chain[-1]


def _inwards(module: Any, adapted: bool) -> list[tuple[Any, bool]]:
    """A module and what it wraps, outermost first, each with whether an adapter has it."""
    chain = [(module, adapted)]
    while True:
        children = module._modules
        name = next((n for n in _INSIDE if children.get(n) is not None), None)
        if name is None:
            return chain
        module, adapted = children[name], adapted or name == ADAPTED
        chain.append((module, adapted))


def ask(thing: Any, name: str) -> Any:
    """An attribute; None where there is none, or where it is a property that raises: nothing is known of it then."""
    try:
        return getattr(thing, name, None)
    except (
        Exception
    ):  # foreign code may raise anything, and scanning a model must not depend on all it offers
        return None


@dataclass(frozen=True, eq=False)
class Tree:
    """The modules of an unwrapped model by clean path; what is inside a wrapper takes its place.

    A module that stands in several places is there once, and once more for every other name that its parent gives
    it: where `key` is `query`, the keys have a path of their own.
    """

    modules: Mapping[str, Any]
    adapted: frozenset[str] = frozenset()  # paths of modules that an adapter wraps
    places: Mapping[int, list[str]] = field(
        default_factory=dict
    )  # by id: all paths of a module that has several
    root: Any = None

    def parameters(self) -> dict[str, Parameter]:
        """Every parameter by clean name; a parametrized one appears once, under the name it goes by."""
        return {p.name: p for path in self.modules for p in self._own(path)}

    def _own(self, path: str) -> Iterator[Parameter]:
        module, adapted = self.modules[path], path in self.adapted
        dot = f"{path}." if path else ""
        for attribute, value in module.named_parameters(recurse=False):
            yield Parameter(dot + attribute, module, attribute, shape_of(value), None, adapted, self.root)
        parametrized = ask(module, "parametrizations")
        if is_module(parametrized):
            import torch

            for attribute in parametrized:
                with torch.no_grad():
                    value = ask(module, attribute)
                if value is None:  # it cannot be computed: its error comes when it is read
                    value = ask(parametrized[attribute], "original")
                yield Parameter(dot + attribute, module, attribute, shape_of(value), None, adapted, self.root)


def tree(root: Any) -> Tree:
    every = {
        path: module
        for path, module in root.named_modules(remove_duplicate=False)
        if "parametrizations" not in path.split(".")
    }
    places: dict[int, list[str]] = {}
    for path, module in every.items():
        places.setdefault(id(module), []).append(path)
    kept: dict[str, Any] = {}
    renamed: set[str] = set()  # under another name that the same parent gives it
    for path, module in every.items():
        above, _, name = path.rpartition(".")
        first = places[id(module)][0]
        if path != first:
            same_parent = above in kept and every[first.rpartition(".")[0]] is every[above]
            if above not in renamed and (not same_parent or is_number(name)):
                continue
            renamed.add(path)
        kept[path] = module
    adapted = frozenset(clean(path) for path in kept if ADAPTED in path.split("."))
    several = {key: [clean(p) for p in paths] for key, paths in places.items() if len(paths) > 1}
    return Tree({clean(path): module for path, module in kept.items()}, adapted, several, root)


def shape_of(value: Any) -> tuple[int, ...]:
    """As the model sees it: sharded and packed parameters keep it elsewhere; () where there is none."""
    for shape in (
        getattr(value, "ds_shape", None),
        getattr(getattr(value, "quant_state", None), "shape", None),
    ):
        if shape is not None:
            return tuple(shape)
    return () if type(value).__name__.startswith("Uninitialized") else tuple(getattr(value, "shape", ()))
