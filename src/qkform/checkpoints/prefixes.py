"""Names as the model has them: what compiled, distributed or parametrised training puts into them is taken out."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from collections.abc import Set as AbstractSet

import numpy as np

from qkform.checkpoints.base import Array, Checkpoint, Need, TensorInfo
from qkform.checkpoints.derived import Derived, Made, refused
from qkform.wrappers import DATA_PARALLEL, WRAPPERS

_PARAMETRIZED = re.compile(r"(?P<path>(?:.*\.)?)parametrizations\.(?P<name>[^.]+)\.(?P<rest>[^.]+(?:\..+)?)")
_LEGACY_NORM = re.compile(r"(?P<path>(?:.*\.)?)(?P<name>weight)_(?P<rest>[gv])")
_ORIGINALS = {"original": "", "original0": "g", "original1": "v", "g": "g", "v": "v"}


def plain_names(checkpoint: Checkpoint) -> Checkpoint:
    """The checkpoint under the names that its model has without wrappers and parametrisations.

    Where two tensors would then have one name, `module` is taken for a module of the model; where they still
    would, all names stay.
    """
    found = checkpoint.tensors
    names = _unwrapped(found, {*WRAPPERS, DATA_PARALLEL}) or _unwrapped(found, set(WRAPPERS))
    renamed = {new: name for name, new in names.items() if new != name}
    view: Checkpoint = Derived(checkpoint, {}, renamed=renamed) if renamed else checkpoint
    return _without_parametrizations(view)


def _unwrapped(names: Iterable[str], wrappers: AbstractSet[str]) -> dict[str, str]:
    """Each name without the parts that are wrappers; nothing where that makes two of them the same.

    The last part is a parameter's own name.
    """
    new = {}
    for name in names:
        *path, last = name.split(".")
        new[name] = ".".join([*(part for part in path if part not in wrappers), last])
    return new if len(set(new.values())) == len(new) else {}


def _without_parametrizations(checkpoint: Checkpoint) -> Checkpoint:
    """`X.parametrizations.weight.original*` and `X.weight_g`, `X.weight_v` as `X.weight`."""
    groups: dict[str, dict[str, str]] = {}
    for name in checkpoint.tensors:
        found = _PARAMETRIZED.fullmatch(name) or _LEGACY_NORM.fullmatch(name)
        if found is not None:
            rest = found["rest"]
            groups.setdefault(found["path"] + found["name"], {})[_ORIGINALS.get(rest, rest)] = name
    made: dict[str, Made] = {}
    hidden: list[str] = []
    for target, parts in groups.items():
        if set(parts) in ({"g"}, {"v"}) or (
            target in checkpoint.tensors and "" not in parts and len(parts) < 2
        ):
            continue
        hidden += parts.values()
        made[target] = _parametrized(checkpoint, target, parts)
    return Derived(checkpoint, made, hidden) if made else checkpoint


def _parametrized(checkpoint: Checkpoint, target: str, parts: Mapping[str, str]) -> Made:
    """The weight that the stored parts make, or its refusal.

    Weight norm alone is known by its parts. One `original` may be anything: a symmetric or an orthogonal weight that
    is computed without tensors of its own leaves the same names as one that is kept as it is.
    """
    tensors = checkpoint.tensors
    first = tensors[parts.get("") or parts.get("v") or next(iter(parts.values()))]
    if target in tensors:
        other = next(iter(parts.values()))
        return refused(
            tensors[target],
            f"tensor {target[-200:]!r} stands beside {other[-200:]!r}, of which the model computes it: which of the "
            "two it has is not known; save the model again from torch",
        )
    if set(parts) == {"g", "v"} and len(first.shape) == 2:
        gain, direction = parts["g"], parts["v"]
        sides = tuple(tensors[gain].shape)
        if sides == (first.shape[0], 1) and first.shape[0] > 1:
            return _weight_norm(checkpoint, gain, direction, first)
    found = ", ".join(repr(name[-120:]) for name in sorted(parts.values())[:4])
    return refused(
        first,
        f"tensor {target!r} is parametrized: the model computes it from {found}, and how is not in the file; scan "
        "the live model, or call torch.nn.utils.parametrize.remove_parametrizations first and save it again",
    )


def _weight_norm(checkpoint: Checkpoint, gain: str, direction: str, info: TensorInfo) -> Made:
    """weight = g * v / |v|, the length taken over each row: torch's weight_norm with dim 0."""

    def needs(rows: int | None) -> list[Need]:
        return [(gain, rows), (direction, rows)]

    def read(rows: int | None) -> Array:
        v = checkpoint.read(direction, rows)
        wide = v.astype(np.float64 if v.dtype == np.float64 else np.float32)
        with np.errstate(all="ignore"):  # a row of zeros has no direction: NaN, as torch has it
            length = np.linalg.norm(wide, axis=1, keepdims=True)
            out: Array = wide * (checkpoint.read(gain, rows).astype(wide.dtype) / length)
        return out

    return Made(info, needs, read)
