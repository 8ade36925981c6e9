"""PEFT's LoRA adapters: the base model as it is, and as the adapter changes it, without building a model.

    merged weight = W + scaling * B A          scaling = alpha / r, or alpha / sqrt(r) with use_rslora
    with DoRA       m * (W + scaling * B A) / |W + scaling * B A|, the length taken over each output's row

in float32. Source: https://huggingface.co/docs/peft/main/en/developer_guides/checkpoint
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from qkform.checkpoints.base import Array, ByteReader, Checkpoint, Need, TensorInfo, read_config, regular_file
from qkform.checkpoints.choice import ADAPTER_CONFIG as CONFIG
from qkform.checkpoints.choice import ADAPTER_WEIGHTS as WEIGHTS
from qkform.checkpoints.choice import Several, choose
from qkform.checkpoints.derived import Derived, Made, Shared
from qkform.checkpoints.opening import open_checkpoint
from qkform.errors import CheckpointError, ConfigError, SourceError, prefixed

MAX_RANK = 65_536
MAX_NAME = 1_024  # characters
MAX_FRONT = 8  # parts of a name that one of the two files may lack

OpenHub = Callable[[str, str | None], Checkpoint]
"""Opens a hub id at a revision (None: the main branch)."""

_ROOT = "base_model.model."
_LORA = re.compile(
    r"(?P<path>.+)\.(?P<part>lora_A|lora_B|lora_magnitude_vector)(?P<adapter>\.[^.]+)??(?P<last>\.weight|\.bias)?"
)
_SAVED = re.compile(r"\.(?:modules_to_save(?:\.[^.]+)??|base_layer)(?=\.(?:weight|bias)$)")
_LITERAL = re.compile(r"\^?[\w.]+\$?")
_CHANGED_BASE = ("pissa", "olora", "corda", "loftq")  # these train on a base that is not the one they name
_UNREAD = {  # settings under which W + scaling * B A is not what the model computes
    "layer_replication": "repeats layers of the base",
    "alora_invocation_tokens": "acts on some tokens only",
    "target_parameters": "changes parameters that are no modules",
    "use_qalora": "pools its inputs (QALoRA)",
    "megatron_config": "is split over Megatron's ranks",
}


@dataclass(frozen=True)
class AdapterFolder:
    """A folder that holds an adapter, and the commit it was fetched at."""

    path: Path
    revision: str | None


def is_adapter(path: Path) -> bool:
    """Whether a folder holds an adapter: its config and its weights, and no model beside them (see `choice`)."""
    try:
        if not (path / CONFIG).is_file():
            return False
        found = choose([entry.name for entry in path.iterdir()])
    except (OSError, ValueError, Several):
        return False
    return found is not None and found.adapter


def open_adapter(
    path: Path,
    source: str | None = None,
    *,
    base: str | Path | None = None,
    open_hub: OpenHub | None = None,
) -> tuple[Checkpoint, Merged]:
    """(base, merged): the model an adapter names, and that model with the adapter in its weights.

    `base` outranks `base_model_name_or_path`, which is a path (from the working folder or from the adapter's) or a hub
    id, given to `open_hub`. Raises SourceError or ConfigError for what is not a LoRA adapter, for one whose weights are
    not a sum (the message says why), and for a base that is not there or lacks a tensor which is changed.
    """
    source = str(path) if source is None else source
    reader = ByteReader()
    config = read_config(regular_file(path / CONFIG), reader)
    _check(config, path / CONFIG)
    weights = next((path / name for name in WEIGHTS if (path / name).exists()), None)
    if weights is None:
        raise SourceError(f"{source} has an {CONFIG} and no weights ({' or '.join(WEIGHTS)})")
    adapter = open_checkpoint(weights, source)
    below = Shared(_open_base(config, path, base, open_hub))
    return below, Merged(below, adapter, source, reader, _changes(adapter, below, config, path))


class Merged(Derived):
    """The base with an adapter in it."""

    def __init__(
        self, base: Checkpoint, adapter: Checkpoint, source: str, reader: ByteReader, made: Mapping[str, Made]
    ) -> None:
        super().__init__(base, made)
        self.source, self.format = source, f"{base.format} + lora"
        self._adapter, self._reader = adapter, reader

    @property
    def bytes_read(self) -> int:
        """Bytes taken from the adapter and from the base, those that the base alone was read for included."""
        return self.base.bytes_read + self.bytes_of_adapter

    @property
    def bytes_of_adapter(self) -> int:
        return self._adapter.bytes_read + self._reader.bytes_read

    def plan_with_base(self, layers: Sequence[tuple[list[Need], list[Need]]]) -> None:
        """Plan to read (of the base, of this) layer by layer: what both read is fetched and held once."""
        left = iter(self._kept.plan([need for _, of_merged in layers for need in of_merged], self._nbytes))
        below: list[Need] = []
        for of_base, of_merged in layers:
            below += [*of_base, *self._below(islice(left, len(of_merged)))]
        self.base.plan(below)


# ---- the config


def _check(config: Mapping[str, Any], where: Path) -> None:
    """Refuse what is not W + scaling * B A."""
    kind = config.get("peft_type")
    if kind != "LORA":
        raise SourceError(
            f"{where}: peft_type is {kind!r:.60}; LORA is read. Merge it with peft (`merge_and_unload`), save, and "
            "scan that folder"
        )
    start = config.get("init_lora_weights")
    if isinstance(start, str) and start.lower().startswith(_CHANGED_BASE):
        raise SourceError(
            f"{where}: init_lora_weights is {start!r:.60}, so the adapter was trained on a base that was changed "
            "first; convert it with peft (`path_initial_model_for_weight_conversion`), or merge and save it"
        )
    for key, what in _UNREAD.items():
        if config.get(key):
            raise SourceError(f"{where}: {key} is set: the adapter {what}, so it has no merged weights here")


def _number(config: Mapping[str, Any], key: str, where: Path) -> float:
    value = config.get(key)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not abs(value) <= 1e9:
        raise ConfigError(f"{where}: {key} is {str(value)[:60]!r}; expected a number")
    return float(value)


def _flag(config: Mapping[str, Any], key: str, where: Path) -> bool:
    value = config.get(key)
    if value is not None and not isinstance(value, bool):
        raise ConfigError(f"{where}: {key} is {str(value)[:60]!r}; expected true or false")
    return bool(value)


def _alpha(config: Mapping[str, Any], module: str, where: Path) -> float:
    """lora_alpha, or what alpha_pattern says for this module: a key fits a whole path or its end."""
    patterns = config.get("alpha_pattern") or {}
    if not isinstance(patterns, Mapping):
        raise ConfigError(f"{where}: alpha_pattern is {str(patterns)[:60]!r}; expected an object")
    for key in patterns:
        if not _LITERAL.fullmatch(key):  # an expression from a file could run for ever
            raise ConfigError(
                f"{where}: alpha_pattern has the expression {key[:80]!r}; names of modules are read, "
                "merge the adapter with peft (`merge_and_unload`) and save it"
            )
        name = key.removeprefix("^").removesuffix("$")
        if module == name or (not key.startswith("^") and module.endswith(f".{name}")):
            return _number(patterns, key, where)
    return _number(config, "lora_alpha", where)


def _open_base(
    config: Mapping[str, Any], path: Path, base: str | Path | None, open_hub: OpenHub | None
) -> Checkpoint:
    try:
        return _opened_base(config, path, base, open_hub)
    except SourceError as error:
        raise prefixed(error, f"{path}: the base model of this adapter") from None


def _opened_base(
    config: Mapping[str, Any], path: Path, base: str | Path | None, open_hub: OpenHub | None
) -> Checkpoint:
    where = path / CONFIG
    if base is None:
        base = config.get("base_model_name_or_path")
        if not isinstance(base, str) or not base:
            raise ConfigError(
                f"{where}: base_model_name_or_path is {str(base)[:60]!r}; expected the base model's folder or hub id"
            )
    for place in (Path(base), path / base):
        try:
            found = place.exists()
        except (OSError, ValueError):
            found = False
        if found:
            return open_checkpoint(place, str(base) if place == Path(base) else str(place))
    if open_hub is not None and re.fullmatch(r"\w[\w.-]*(/\w[\w.-]*)?", str(base)):
        revision = config.get("revision")
        return open_hub(str(base), revision if isinstance(revision, str) else None)
    raise SourceError(
        f"{where} names the base model {str(base)[:200]!r}, which is not here: no such file or folder beside the "
        "adapter or in the working folder"
    )


# ---- what changes


def _changes(adapter: Checkpoint, base: Checkpoint, config: Mapping[str, Any], path: Path) -> dict[str, Made]:
    """The base's tensors that the adapter changes or replaces, by the base's name."""
    where = path / CONFIG
    modules: dict[str, dict[str, str]] = {}  # module -> part -> name of its tensor
    made: dict[str, Made] = {}
    names = _Names(base.tensors)
    for name, info in adapter.tensors.items():
        if len(name) > MAX_NAME:
            raise CheckpointError(f"{path} has a tensor with a name of {len(name):,} characters")
        plain = name.removeprefix(_ROOT)
        found = _LORA.fullmatch(plain)
        if found is not None and found["last"] == ".bias":
            raise SourceError(
                f"{path}: {name[:200]!r} is a bias of the adapter (lora_bias), which is not read"
            )
        if found is not None:
            parts = modules.setdefault(found["path"], {})
            if found["part"] in parts:
                raise CheckpointError(f"{path} holds two adapters for {found['path'][:200]!r}; one is read")
            parts[found["part"]] = name
        elif ".lora_embedding_" in f".{plain}":
            continue  # of a table of tokens: no projection
        else:
            target = names.find(_SAVED.sub("", plain))
            if target is not None:
                if info.shape != base.tensors[target].shape:
                    raise CheckpointError(
                        f"{path}: {name[:200]!r} has shape {info.shape}, and the base's {base.tensors[target].shape}"
                    )
                if target in made:
                    raise CheckpointError(_twice(path, target))
                made[target] = _replaced(adapter, name, info)
    for module, parts in modules.items():
        target = names.find(f"{module}.weight") or names.find(module)
        if target is None:
            raise CheckpointError(
                f"{path} changes {module[:200]!r}, and the base {base.source} has no such weight: is it another model?"
            )
        if target in made:
            raise CheckpointError(_twice(path, target))
        made[target] = _merged(adapter, base, target, module, parts, config, where)
    return made


def _twice(path: Path, target: str) -> str:
    """Two entries of an adapter that change one tensor: which of them the model has, or both, is not known."""
    return (
        f"{path} holds two adapters for {target[:200]!r}, or one and a saved module in its place; one is read: merge "
        "them with peft (`merge_and_unload`), save, and scan that folder"
    )


class _Names:
    """The base's names, found also by their ends: files leave out, or add, what stands in front."""

    def __init__(self, names: Iterable[str]) -> None:
        self._names = set(names)
        self._by_end: dict[str, list[str]] = {}
        for name in self._names:
            parts = name[-MAX_NAME:].split(".")
            for start in range(1, min(len(parts) - 1, MAX_FRONT)):
                self._by_end.setdefault(".".join(parts[start:]), []).append(name)

    def find(self, name: str) -> str | None:
        """The base's name for a tensor: the same, or one with more or less in front, if only one is such."""
        if name in self._names:
            return name
        parts = name.split(".")
        for start in range(1, min(len(parts) - 1, MAX_FRONT)):
            if (shorter := ".".join(parts[start:])) in self._names:
                return shorter
        longer = self._by_end.get(name, [])
        return longer[0] if len(longer) == 1 else None


def _replaced(adapter: Checkpoint, name: str, info: TensorInfo) -> Made:
    return Made(info, lambda rows: [], lambda rows: adapter.read(name, rows))


def _merged(
    adapter: Checkpoint,
    base: Checkpoint,
    target: str,
    module: str,
    parts: Mapping[str, str],
    config: Mapping[str, Any],
    where: Path,
) -> Made:
    """The base's weight with B A in it, or its refusal in an error that names the module."""
    what = f"{where.parent}: the adapter of {module[:200]!r}"
    if "lora_A" not in parts or "lora_B" not in parts:
        raise CheckpointError(f"{what} has {', '.join(sorted(parts))}; lora_A and lora_B are needed")
    a, b = adapter.tensors[parts["lora_A"]].shape, adapter.tensors[parts["lora_B"]].shape
    info = base.tensors[target]
    if len(a) != 2 or len(b) != 2 or a[0] != b[1] or not 0 < a[0] <= MAX_RANK:
        raise CheckpointError(f"{what} has A of shape {a} and B of shape {b}: not of one rank")
    out_in = (b[0], a[1])
    turned = _is_turned(info.shape, out_in, _flag(config, "fan_in_fan_out", where))
    if turned is None:
        raise CheckpointError(
            f"{what} changes {out_in[1]} inputs to {out_in[0]} outputs, and the base's {target!r} "
            f"has shape {info.shape}"
        )
    rank = a[0]  # what rank_pattern says is what was saved
    alpha = _alpha(config, module, where)
    scaling = alpha / (math.sqrt(rank) if _flag(config, "use_rslora", where) else rank)
    magnitude = parts.get("lora_magnitude_vector")
    if magnitude is None and _flag(config, "use_dora", where):
        raise CheckpointError(f"{what} has no lora_magnitude_vector, and the config says use_dora")
    if magnitude is not None and math.prod(adapter.tensors[magnitude].shape) != out_in[0]:
        raise CheckpointError(f"{what} has magnitudes of shape {adapter.tensors[magnitude].shape}")

    def read(rows: int | None) -> Array:
        whole = turned and magnitude is not None  # a length runs over all inputs, which are the rows here
        taken = None if whole else rows
        weight = base.read(target, taken)
        kind: Any = np.float64 if weight.dtype == np.float64 else np.float32
        weight = weight.astype(kind)
        low = adapter.read(parts["lora_A"]).astype(kind)  # (r, in)
        high = adapter.read(parts["lora_B"], None if turned else taken).astype(kind)  # (out, r)
        low = low[:, :taken] if turned else low
        with np.errstate(all="ignore"):
            delta = kind(scaling) * (high @ low)
            weight += delta.T if turned else delta
            if magnitude is not None:
                sizes = adapter.read(magnitude).astype(kind).reshape(-1)
                axis = 0 if turned else 1
                length = np.linalg.norm(weight, axis=axis, keepdims=True)
                sizes = sizes[None, :] if turned else sizes[: len(weight), None]
                weight *= sizes / length
        out: Array = weight[:rows] if whole else weight
        return out

    def needs(rows: int | None) -> list[Need]:
        return [(target, None if turned and magnitude is not None else rows)]

    return Made(info, needs, read)


def _is_turned(stored: tuple[int, ...], out_in: tuple[int, int], flag: bool) -> bool | None:
    """Whether the base keeps the weight as (in, out), as Conv1D does; None where neither fits."""
    fits = [turned for turned in (False, True) if stored == (out_in[::-1] if turned else out_in)]
    return flag if len(fits) == 2 else fits[0] if fits else None
