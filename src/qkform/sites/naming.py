"""From the parameters of a Hugging Face model to the tensors of its files: other names, sometimes cut otherwise.

transformers 5 renames weights when it saves, and for some families splits or joins them (live q_proj, k_proj and
v_proj; in the file one Wqkv). The families of `layouts` know the files. Which tensor comes from which parameter is
learnt from transformers itself: its own conversion is run on tensors without memory, and where it does more than
rename, once more on row numbers in place of weights.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

# What foreign code raises when it meets what it does not expect, beside its own SkipParameters. Anything else is a
# fault to be seen.
_FAILURES = (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)


@dataclass(frozen=True, eq=False)
class Origin:
    """Where a tensor comes from: one parameter as it is, or rows out of several, laid end to end."""

    parameters: tuple[str, ...]
    rows: NDArray[np.int64] | None = None  # numbers in the rows of all `parameters`; None: as it is
    shape: tuple[int, ...] = ()


def origins(model: Any, shapes: Mapping[str, tuple[int, ...]]) -> tuple[dict[str, Origin], str | None]:
    """Tensors as `model.save_pretrained` would name and cut them, each with its origin among the parameters; a doubt.

    `model` is a PreTrainedModel and `shapes` its parameters by name. Where this version of transformers converts
    nothing, or cannot undo what it did, the names stay; the second case is the doubt, in words: what the family of
    the model says of its files may then not hold for what is in memory.
    """
    loading = sys.modules.get("transformers.core_model_loading")
    revert = getattr(loading, "revert_weight_conversion", None)
    same = {name: Origin((name,), None, shape) for name, shape in shapes.items()}
    if revert is None:
        version = str(getattr(sys.modules.get("transformers"), "__version__", ""))
        major = version.partition(".")[0]
        converts = major.isdigit() and int(major) >= 5
        return same, _doubt(f"transformers {version} has no revert_weight_conversion") if converts else None
    failures = (*_FAILURES, getattr(loading, "SkipParameters", ValueError))
    import torch

    empty = {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}
    try:
        with torch.no_grad():
            saved = revert(model, dict(empty))
        shown = {name: tuple(tensor.shape) for name, tensor in saved.items()}
    except failures as error:
        return same, _doubt(f"{type(error).__name__}: {error!s:.200}")
    names = {id(tensor): name for name, tensor in empty.items()}
    found: dict[str, Origin] = {}
    for name, tensor in saved.items():
        origin = names.get(id(tensor))
        if origin is not None:
            found[name] = same[origin]
    kept = {origin.parameters[0] for origin in found.values()}
    changed = {n: shape for n, shape in shapes.items() if n not in kept and len(shape) in (1, 2)}
    if changed:
        try:
            found |= _rearranged(revert, model, changed, shown)
        except failures as error:
            why = f"{type(error).__name__}: {error!s:.200}"
            return found, f"its files cut some of its weights otherwise, how is not known ({why}): left out"
    return found, None


def _doubt(why: str) -> str:
    return f"what its files call these weights and how they order them is not known ({why}): read as it is in memory"


def _rearranged(
    revert: Any, model: Any, shapes: Mapping[str, tuple[int, ...]], saved: Mapping[str, tuple[int, ...]]
) -> dict[str, Origin]:
    """Origins of tensors that are cut or joined along their rows; others are left out."""
    import torch

    starts = np.cumsum([0, *(shape[0] for shape in shapes.values())])
    names = list(shapes)
    numbers = {}
    for start, (name, shape) in zip(starts, shapes.items(), strict=False):
        rows = torch.arange(int(start), int(start) + shape[0])
        numbers[name] = rows[:, None] if len(shape) == 2 else rows
    with torch.no_grad():
        moved = revert(model, numbers)
    found = {}
    for name, tensor in moved.items():
        if name not in saved:
            continue
        shape = saved[name]
        if tuple(tensor.shape) != (shape[0], 1)[: len(shape)] or len(shape) > 2:
            continue
        codes = tensor.reshape(-1).numpy().astype(np.int64)
        owners = np.searchsorted(starts, codes, side="right") - 1
        used = list(dict.fromkeys(owners.tolist()))
        widths = {shapes[names[i]][1:] for i in used}
        if widths != {shape[1:]}:  # not whole rows
            continue
        offsets = np.cumsum([0, *(shapes[names[i]][0] for i in used)])
        local = np.zeros_like(codes)
        for i, offset in zip(used, offsets, strict=False):
            mine = owners == i
            local[mine] = codes[mine] - starts[i] + offset
        found[name] = Origin(tuple(names[i] for i in used), local, shape)
    return found
