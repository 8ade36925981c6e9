"""Fused weights split in place: one stored tensor, two leaf parameters, so that queries and keys can learn at a rate
of their own.

A module that holds Q, K and V in one tensor (`c_attn`, `query_key_value`, `in_proj_weight`) has one learning rate for
all of them, whatever is done to its gradient: Adam divides it out again. After `split_` the module has the parameters
`parametrizations.weight.qk` and `parametrizations.weight.rest` instead of `weight`, and `weight` is what they make
together: the same numbers, bit for bit. Files do not know: `state_dict` and `load_state_dict` carry the fused tensor
under its own name. `unsplit_` folds back.

This is not torch.nn.utils.parametrize: that writes `parametrizations.weight.original0` into files, from which
`from_pretrained` initialises the weight anew, and its modules cannot be pickled. The place of the parts is the same,
`module.parametrizations`, so that `torch.nn.utils.parametrize.is_parametrized` and `qkform.sites` see them. As there,
`weight` is made anew each time it is asked for: what writes into it in place writes into a copy, and is lost.
"""

from __future__ import annotations

from functools import cache
from itertools import groupby
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from qkform.errors import SurgeryError
from qkform.surgery.root import keeper

_ORDER = "_split_order"  # attribute of a split module: the names of its parameters as they stood before


class Parts(nn.Module):  # type: ignore[misc]
    """The two parts of one fused tensor; calling it joins them.

    fused    the tensor, of any shape
    chosen   (rows,) bool: which rows along `dim` are queries and keys
    """

    def __init__(self, fused: torch.Tensor, chosen: NDArray[np.bool_], dim: int) -> None:
        super().__init__()
        self.dim = dim
        self.repeats, runs = _pattern(chosen)
        self.runs = tuple(runs)
        qk, rest = self.cut(fused.detach())
        self.qk = nn.Parameter(qk, fused.requires_grad)
        self.rest = nn.Parameter(rest, fused.requires_grad)

    def cut(self, fused: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The query and key rows of a fused tensor, in their order, and the other rows: copies."""
        dim = self.dim
        folded = fused.unflatten(dim, (self.repeats, -1))  # rows as (repeats, rows of one repeat)
        pieces = folded.split([width for _, width in self.runs], dim + 1)
        both = (
            torch.cat([p for p, (is_qk, _) in zip(pieces, self.runs, strict=True) if is_qk == side], dim + 1)
            for side in (True, False)
        )
        qk, rest = (part.flatten(dim, dim + 1).contiguous() for part in both)
        return qk, rest

    def forward(self) -> torch.Tensor:
        """The fused tensor."""
        dim = self.dim
        sides = {
            side: iter(
                part.unflatten(dim, (self.repeats, -1)).split(
                    [width for is_qk, width in self.runs if is_qk == side], dim + 1
                )
            )
            for side, part in ((True, self.qk), (False, self.rest))
        }
        return torch.cat([next(sides[is_qk]) for is_qk, _ in self.runs], dim + 1).flatten(dim, dim + 1)

    # Files hold the fused tensor, which the module writes and reads: nothing of the parts.

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        return

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        *_, strict, _missing, unexpected_keys, _errors = args
        if strict:
            unexpected_keys.extend(key for key in state_dict if key.startswith(prefix))

    def load(self, fused: torch.Tensor, assign: bool) -> None:
        """Take the values of a fused tensor of the right shape; `assign`: its type and device too."""
        qk, rest = self.cut(fused.detach())
        if assign:
            self.qk = nn.Parameter(qk, self.qk.requires_grad)
            self.rest = nn.Parameter(rest, self.rest.requires_grad)
        else:
            with torch.no_grad():
                self.qk.copy_(qk)
                self.rest.copy_(rest)


def split_(model: nn.Module, module: nn.Module, name: str, chosen: NDArray[np.bool_], dim: int = 0) -> None:
    """Split parameter `name` of a module of the model into its chosen rows along `dim` and the others.

    The values stay; gradients and hooks of the parameter are not kept: split before the optimizer is made and before
    the model is wrapped or compiled. Nothing happens where it is split this way already. SurgeryError where the
    parameter is tied, sharded, parametrized otherwise, or split by other rows.
    """
    found = parts(module, name)
    if found is not None:
        if (found.dim, found.repeats, found.runs) != (dim, *_pattern(chosen)):
            raise SurgeryError(
                f"{name!r} of a {type(module).__name__} is split by other rows; unsplit_ it first"
            )
        return
    parameter = module._parameters.get(name)
    if parameter is None or (hasattr(module, "parametrizations") and not is_split(module)):
        raise SurgeryError(
            f"{name!r} of a {type(module).__name__} is no plain parameter and cannot be split; take its "
            "parametrization away first (torch.nn.utils.parametrize.remove_parametrizations)"
        )
    if keeper(model) is not None:
        raise SurgeryError(
            f"{name!r} of a {type(module).__name__} is in a model that is sharded or wrapped for data-parallel "
            "training; call param_groups before it is wrapped"
        )
    places = {(id(m), n) for m in model.modules() for n, p in m._parameters.items() if p is parameter}
    if places - {(id(module), name)}:
        raise SurgeryError(
            f"{name!r} of a {type(module).__name__} is tied to a parameter of another module and cannot be split; "
            "untie them, or leave qk_lr_ratio at 1"
        )
    halves = Parts(parameter, chosen, dim)
    if is_split(module):
        base, names = type(module).split_base, (*module.parametrizations, name)
    else:
        base, names = type(module), (name,)
        setattr(module, _ORDER, tuple(module._parameters))
        module.parametrizations = nn.ModuleDict()
    del module._parameters[name]
    module.__class__ = _split_class(base, names)
    module.parametrizations[name] = halves


def unsplit_(model: nn.Module) -> nn.Module:
    """Fold every split weight of a model back into one parameter, in place; returns the model.

    The values stay, bit for bit; the parameters are new, so an optimizer has to be made anew.

    >>> groups = param_groups(model, lr=3e-4, qk_lr_ratio=4.0)      # doctest: +SKIP
    >>> ...                                                         # doctest: +SKIP
    >>> unsplit_(model)                                             # doctest: +SKIP
    """
    for module in [m for m in model.modules() if is_split(m)]:
        whole = {
            name: nn.Parameter(halves().detach(), halves.qk.requires_grad or halves.rest.requires_grad)
            for name, halves in module.parametrizations.items()
        }
        order = getattr(module, _ORDER)
        del module.parametrizations
        delattr(module, _ORDER)
        module.__class__ = type(module).split_base
        for name, parameter in whole.items():
            module.register_parameter(name, parameter)
        ours = module._parameters
        for name in [n for n in order if n in ours] + [n for n in ours if n not in order]:
            ours[name] = ours.pop(name)
    return model


def is_split(module: nn.Module) -> bool:
    """Whether `split_` has been here."""
    return bool(getattr(type(module), "split_names", ()))


def parts(module: nn.Module, name: str) -> Parts | None:
    """The parts of a parameter that was split; None where it was not."""
    return module.parametrizations[name] if is_split(module) and name in module.parametrizations else None


def _pattern(chosen: NDArray[np.bool_]) -> tuple[int, tuple[tuple[bool, int], ...]]:
    """Rows as repeats of the shortest period, and the runs inside one: (whether queries and keys, how many rows)."""
    rows = chosen.size
    if chosen.all() or not chosen.any():
        raise SurgeryError("nothing to split: all rows, or none, are queries and keys")
    for period in (p for p in range(2, rows + 1) if rows % p == 0):
        if (chosen.reshape(-1, period) == chosen[:period]).all():
            break
    return rows // period, tuple((bool(key), len(list(run))) for key, run in groupby(chosen[:period]))


@cache
def _split_class(base: Any, names: tuple[str, ...]) -> Any:
    """The class of a module whose parameters `names` are made of parts: the base class, and what files see of it."""

    class Split(base):  # type: ignore[misc]
        split_names = names
        split_base = base  # named, since others put classes of their own before ours (FSDP2's fully_shard)

        def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
            super()._save_to_state_dict(destination, prefix, keep_vars)
            for name in names:
                whole = self.parametrizations[name]()
                destination[prefix + name] = whole if keep_vars else whole.detach()

        def _load_from_state_dict(
            self,
            state_dict: dict[str, Any],
            prefix: str,
            local_metadata: dict[str, Any],
            strict: bool,
            missing_keys: list[str],
            unexpected_keys: list[str],
            error_msgs: list[str],
        ) -> None:
            held = {name: state_dict.pop(prefix + name, None) for name in names}
            super()._load_from_state_dict(
                state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
            )
            for name, fused in held.items():
                shape = getattr(self, name).shape
                if fused is None:
                    missing_keys.extend([prefix + name] if strict else [])
                elif fused.shape != shape:
                    error_msgs.append(
                        f"size mismatch for {prefix + name}: copying a param with shape {fused.shape} from "
                        f"checkpoint, the shape in current model is {shape}."
                    )
                else:
                    self.parametrizations[name].load(
                        fused, bool(local_metadata.get("assign_to_params_buffers", False))
                    )
                if fused is not None:
                    state_dict[prefix + name] = fused

        def __reduce_ex__(self, protocol: Any) -> Any:
            return _blank, (base, names), self.__getstate__()

    for name in names:
        setattr(Split, name, _joined(name))
    Split.__name__, Split.__qualname__ = f"Split{base.__name__}", f"Split{base.__qualname__}"
    Split.__module__ = base.__module__
    return Split


def _joined(name: str) -> property:
    def joined(module: Any) -> Any:
        return module.parametrizations[name]()

    return property(joined)


def _blank(base: Any, names: tuple[str, ...]) -> Any:
    """A split module without content, for unpickling and copying."""
    cls = _split_class(base, names)
    return cls.__new__(cls)
