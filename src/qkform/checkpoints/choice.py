"""Which files of a folder are the model: decided by names alone, the same for folders here and lists of the hub.

Of several formats the first of `FORMATS` is taken; in it `model.*` and `pytorch_model.*` come first, an index before a
file, then what is there alone: one index, one file, one whole set of shards. A model beside an adapter wins: the folder
is an adapter only where it holds an adapter and no one model.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import PurePath

from qkform.errors import SourceError

SAFETENSORS, GGUF, ONNX, NPZ = (".safetensors",), (".gguf",), (".onnx",), (".npz",)
PICKLED = (".bin", ".pt", ".pth", ".ckpt")
FORMATS = (SAFETENSORS, PICKLED, GGUF, ONNX, NPZ)
READ = tuple(suffix for suffixes in FORMATS for suffix in suffixes)
INDEX = ".index.json"
ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_WEIGHTS = ("adapter_model.safetensors", "adapter_model.bin")

# Beside a model's weights, and none.
_NO_WEIGHTS = re.compile(
    r"(training_args|optimizer|scheduler|scaler|rng_state|random_states|tokenizer|vocab|adapter_model|zero_pp_rank"
    r"|.*optim_states|consolidated_params).*",
    re.IGNORECASE,
)
_SHARD = re.compile(r"(?P<stem>.*)-(?P<no>[0-9]{1,6})-of-(?P<count>[0-9]{1,6})(?P<suffix>\.[^.]+)", re.DOTALL)


@dataclass(frozen=True)
class Choice:
    """The model of a folder: its files, or the index that names them."""

    suffix: str  # of its format, in small letters
    files: tuple[str, ...] = ()
    index: str | None = None
    adapter: bool = False  # an adapter's config and weights


class Several(SourceError):
    """A folder holds several models of one format."""

    def __init__(self, names: Sequence[str], what: str) -> None:
        super().__init__(f"{len(names)} {what} ({', '.join(names[:5])}{', ...' if len(names) > 5 else ''})")
        self.names = tuple(names)


def choose(names: Collection[str]) -> Choice | None:
    """The model, or the adapter, in a folder of files with these names; None where there is none, else `Several`."""
    weights = next((name for name in ADAPTER_WEIGHTS if name in names), None)
    adapter = None
    if weights is not None and ADAPTER_CONFIG in names:
        adapter = Choice(suffix_of(weights), (ADAPTER_CONFIG, weights), adapter=True)
    try:
        return _model(sorted(names)) or adapter
    except Several:
        if adapter is None:
            raise
        return adapter


def choose_file(name: str, names: Collection[str]) -> Choice:
    """A file that was named, with the others of `names` that belong to it; `names` are in the same folder."""
    suffix = suffix_of(name)
    if name.endswith(INDEX):
        return Choice(suffix_of(name.removesuffix(INDEX)), index=name)
    part = _SHARD.fullmatch(name)
    if suffix in GGUF and part:  # the other parts of a split file
        return Choice(suffix, tuple(sorted(n for n in names if _set_of(n) == _set_of(name))))
    if suffix in ONNX:  # its data
        return Choice(suffix, (name, *sorted(n for n in names if n.startswith(name) and n != name)))
    return Choice(suffix, (name,))


def is_weights(name: str) -> bool:
    return suffix_of(name) in READ and not _NO_WEIGHTS.fullmatch(PurePath(name).name)


def suffix_of(name: str) -> str:
    return PurePath(name).suffix.lower()


def _model(names: Sequence[str]) -> Choice | None:
    return next((found for suffixes in FORMATS if (found := _of_format(names, suffixes))), None)


def _of_format(names: Sequence[str], suffixes: Sequence[str]) -> Choice | None:
    files = [n for n in names if suffix_of(n) in suffixes and is_weights(n)]
    indexes = [
        n for n in names if n.endswith(tuple(s + INDEX for s in suffixes)) and is_weights(n[: -len(INDEX)])
    ]
    for stem in ("model", "pytorch_model"):
        for suffix in suffixes:
            if stem + suffix + INDEX in indexes:
                return Choice(suffix, index=stem + suffix + INDEX)
            if stem + suffix in files:
                return choose_file(stem + suffix, names)
    if len(indexes) > 1:
        raise Several(indexes, "indexes, each of a model")
    if indexes:
        return choose_file(indexes[0], names)
    if not files:
        return None
    suffix = suffix_of(files[0])
    if suffix in GGUF:  # a split file counts once; that parts of it are missing is told when it is opened
        files = list({_set_of(n) or (n, "", ""): n for n in reversed(files)}.values())[::-1]
    if len(files) == 1:
        return choose_file(files[0], names)
    if _one_set_of_shards(files):
        return Choice(suffix, tuple(files))
    raise Several(files, f"{suffix.removeprefix('.')} files and no index")


def _set_of(name: str) -> tuple[str, str, str] | None:
    """What all shards of one model have in common."""
    found = _SHARD.fullmatch(name)
    return (found["stem"], found["count"], found["suffix"]) if found else None


def _one_set_of_shards(names: Sequence[str]) -> bool:
    """True for a complete set model-00001-of-0000N.safetensors .. without its index."""
    sets = {_set_of(name) for name in names}
    first = next(iter(sets))
    return len(sets) == 1 and first is not None and len(names) == int(first[1])
