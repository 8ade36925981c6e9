"""The parameters of a live model: under clean names, as numpy, and why some of them cannot be read."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeGuard

import numpy as np
from numpy.typing import NDArray

from qkform.errors import SourceError

# What compiling, sharding, checkpointing and adapters put into a path; the same model has the same names without.
_WRAPPERS = frozenset({"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module", "base_layer"})
_FLOATS = frozenset({"torch.float64", "torch.float32", "torch.float16", "torch.bfloat16"})
_MERGE = "merge it first (`model.merge_and_unload()`), or scan the model without it"


@dataclass(frozen=True)
class Parameter:
    """One parameter: the attribute of the module that holds it, so that a parametrized weight is read as it acts."""

    name: str  # path in the model, wrappers left out
    owner: Any
    attribute: str
    shape: tuple[int, ...]
    index: int | None = None  # one entry of a stack of layers
    adapted: bool = False  # what the model computes with is this and an adapter's part

    @property
    def value(self) -> Any:
        """The tensor itself; a parameter, unless it is parametrized or one of a stack."""
        value = getattr(self.owner, self.attribute)
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
        inner = next((children[name] for name in children if name in _WRAPPERS), None)
        if inner is None and list(children) == ["module"] and not any(True for _ in model.parameters(False)):
            inner = children["module"]
        if inner is None or inner is model:
            return model
        model = inner


def clean(path: str) -> str:
    return ".".join(part for part in path.split(".") if part not in _WRAPPERS)


@dataclass(frozen=True)
class Tree:
    """The modules of an unwrapped model by clean path; what is inside a wrapper takes its place."""

    modules: Mapping[str, Any]
    adapted: frozenset[str] = frozenset()  # paths of modules that an adapter wraps
    places: Mapping[int, list[str]] = field(
        default_factory=dict
    )  # by id: all paths of a module that has several

    def parameters(self) -> dict[str, Parameter]:
        """Every parameter by clean name; a parametrized one appears once, under the name it goes by."""
        return {p.name: p for path in self.modules for p in self._own(path)}

    def _own(self, path: str) -> Iterator[Parameter]:
        module, adapted = self.modules[path], path in self.adapted
        dot = f"{path}." if path else ""
        for attribute, value in module.named_parameters(recurse=False):
            yield Parameter(dot + attribute, module, attribute, _shape(value), adapted=adapted)
        parametrized = getattr(module, "parametrizations", None)
        if is_module(parametrized):
            import torch

            for attribute in parametrized:
                with torch.no_grad():
                    shape = tuple(getattr(module, attribute).shape)
                yield Parameter(dot + attribute, module, attribute, shape, adapted=adapted)


def tree(root: Any) -> Tree:
    paths = {
        path: module for path, module in root.named_modules() if "parametrizations" not in path.split(".")
    }
    adapted = frozenset(clean(path) for path in paths if "base_layer" in path.split("."))
    places: dict[int, list[str]] = {}
    for path, module in root.named_modules(remove_duplicate=False):
        places.setdefault(id(module), []).append(clean(path))
    several = {key: named for key, named in places.items() if len(named) > 1}
    return Tree({clean(path): module for path, module in paths.items()}, adapted, several)


def _shape(value: Any) -> tuple[int, ...]:
    """As the model sees it: sharded and packed parameters keep it elsewhere."""
    for shape in (
        getattr(value, "ds_shape", None),
        getattr(getattr(value, "quant_state", None), "shape", None),
    ):
        if shape is not None:
            return tuple(shape)
    return () if type(value).__name__.startswith("Uninitialized") else tuple(value.shape)
