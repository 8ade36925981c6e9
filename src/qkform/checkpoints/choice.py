"""Which files of a hub repository are the model: safetensors to read in parts, or other files to fetch whole."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Protocol

from qkform.checkpoints.opening import INDEX
from qkform.errors import SourceError

_INDEX = ".safetensors" + INDEX
SMALL_BYTES = 2 * 2**30  # an adapter is fetched whole without being asked for; one of this size is no adapter
_NOT_WEIGHTS = re.compile(
    r"(training_args|optimizer|scheduler|scaler|rng_state.*|random_states.*)\.(bin|pt|pth)"
)
_SHARD = re.compile(r"(.+)-\d+-of-(\d{1,9})\.safetensors")
_GGUF_PART = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf", re.IGNORECASE)


class Named(Protocol):
    """What a person named: see `hub.HubName`."""

    @property
    def repo_id(self) -> str: ...
    @property
    def path(self) -> str: ...


@dataclass(frozen=True)
class Ranges:
    """Safetensors files that are read in parts; with an index, it says which."""

    folder: str
    files: tuple[str, ...]
    index: str | None = None


@dataclass(frozen=True)
class Whole:
    """Files that are fetched whole, and which of them (or "": the folder) is then opened."""

    files: tuple[str, ...]
    open: str
    what: str
    small: bool = False


def choose(sizes: Mapping[str, int | None], name: Named, commit: str) -> Ranges | Whole:
    """The model in a repository, or in the folder or file of it that was named."""
    where = f"{name.repo_id} at {commit[:12]}"
    if name.path in sizes:
        folder = _parent(name.path)
        return _one_file(name.path, sizes, folder)
    folder = name.path
    names = _names_in(folder, sizes)
    if folder and not any(file.startswith(f"{folder}/") for file in sizes):
        raise SourceError(f"{where} has no file or folder {folder[:200]!r}{_some(_weights(sizes), name)}")
    found = _safetensors(names, sizes, folder, where, name) or _other(names, sizes, folder, where, name)
    if found is not None:
        return found
    inner = [file for file in _weights(sizes) if not folder or file.startswith(f"{folder}/")]
    if not inner:
        raise SourceError(f"{where} holds no weights among its {len(sizes):,} files")
    raise SourceError(f"{where} has its weights in folders of its own{_some(_folders(inner), name)}")


def _one_file(file: str, sizes: Mapping[str, int | None], folder: str) -> Ranges | Whole:
    if file.endswith(_INDEX):
        return Ranges(folder, (), file)
    if file.endswith(".safetensors"):
        return Ranges(folder, (file,))
    if not _is_weights(file):
        raise SourceError(f"{file[:200]} holds no weights; name the file or folder that does")
    if file.endswith((".bin", ".pt", ".pth")):
        return Whole(_with_config((file,), sizes, folder), file, file)
    return Whole(_with_config(_companions(file, sizes), sizes, folder), file, file)


def _safetensors(
    names: list[str], sizes: Mapping[str, int | None], folder: str, where: str, name: Named
) -> Ranges | Whole | None:
    indexes = [n for n in names if n.endswith(_INDEX)]
    single = [n for n in names if n.endswith(".safetensors")]
    if "model" + _INDEX in indexes:
        return Ranges(folder, (), _join(folder, "model" + _INDEX))
    if "model.safetensors" in single:
        return Ranges(folder, (_join(folder, "model.safetensors"),))
    if "adapter_config.json" in names and "adapter_model.safetensors" in single:
        files = tuple(_join(folder, n) for n in ("adapter_config.json", "adapter_model.safetensors"))
        small = sum(sizes[file] or SMALL_BYTES for file in files) < SMALL_BYTES
        return Whole(_with_config(files, sizes, folder), folder, "an adapter", small=small)
    if len(indexes) == 1:
        return Ranges(folder, (), _join(folder, indexes[0]))
    if len(indexes) > 1:
        raise SourceError(f"{where} holds several models{_some([_join(folder, n) for n in indexes], name)}")
    if len(single) == 1 or _is_one_set(single):
        return Ranges(folder, tuple(_join(folder, n) for n in single))
    if single:
        raise SourceError(
            f"{where} holds {len(single)} safetensors files and no index"
            f"{_some([_join(folder, n) for n in single], name)}"
        )
    return None


def _is_one_set(names: list[str]) -> bool:
    """True for a complete set of shards without an index: model-00001-of-0000N.safetensors and so on."""
    found = [_SHARD.fullmatch(name) for name in names]
    stems = {m.groups() for m in found if m is not None}
    return None not in found and len(stems) == 1 and int(next(iter(stems))[1]) == len(names)


def _other(
    names: list[str], sizes: Mapping[str, int | None], folder: str, where: str, name: Named
) -> Whole | None:
    index = "pytorch_model.bin.index.json"
    if index in names:
        shards = [n for n in names if re.fullmatch(r"pytorch_model-\d+-of-\d+\.bin", n)]
        files = tuple(_join(folder, n) for n in [index, *shards])
        return Whole(_with_config(files, sizes, folder), folder, f"{len(shards)} .bin files")
    for kind in (
        r"pytorch_model\.bin",
        r"adapter_model\.bin",
        r".+\.(bin|pt|pth)",
        r".+\.gguf",
        r".+\.onnx",
        r".+\.npz",
    ):
        found = [n for n in names if re.fullmatch(kind, n, re.IGNORECASE) and _is_weights(n)]
        found = [n for n in found if not (m := _GGUF_PART.fullmatch(n)) or int(m[2]) == 1]
        if len(found) == 1:
            file = _join(folder, found[0])
            extra = [_join(folder, "adapter_config.json")] if "adapter_config.json" in names else []
            files = (*_companions(file, sizes), *extra)
            opened = folder if extra else file
            return Whole(_with_config(files, sizes, folder), opened, found[0])
        if found:
            raise SourceError(f"{where} holds several models{_some([_join(folder, n) for n in found], name)}")
    return None


def _companions(file: str, sizes: Mapping[str, int | None]) -> tuple[str, ...]:
    """A file with those that belong to it: the other parts of a split GGUF file, the data of an ONNX graph."""
    part = _GGUF_PART.fullmatch(file)
    if part:
        return tuple(
            sorted(f for f in sizes if (m := _GGUF_PART.fullmatch(f)) and m.group(1, 3) == part.group(1, 3))
        )
    if file.lower().endswith(".onnx"):
        return (file, *sorted(f for f in sizes if f.startswith(file) and f != file))
    return (file,)


def _with_config(files: tuple[str, ...], sizes: Mapping[str, int | None], folder: str) -> tuple[str, ...]:
    config = _join(folder, "config.json")
    return (*files, config) if config in sizes and config not in files else files


def _is_weights(file: str) -> bool:
    last = PurePosixPath(file).name.lower()
    return last.endswith((".safetensors", ".gguf", ".bin", ".pt", ".pth", ".onnx", ".npz")) and not (
        _NOT_WEIGHTS.fullmatch(last)
    )


def _weights(sizes: Mapping[str, int | None]) -> list[str]:
    return sorted(file for file in sizes if _is_weights(file))


def _folders(files: list[str]) -> list[str]:
    return list(dict.fromkeys(_parent(file) for file in files))


def _some(files: list[str], name: Named) -> str:
    """Choices, as a person would write them."""
    if not files:
        return ""
    more = f" or one of {len(files) - 8} more" if len(files) > 8 else ""
    return "; name one: " + ", ".join(f"hf://{name.repo_id}/{file[:200]}" for file in files[:8]) + more


def _names_in(folder: str, sizes: Mapping[str, int | None]) -> list[str]:
    return sorted(PurePosixPath(file).name for file in sizes if _parent(file) == folder)


def _parent(file: str) -> str:
    return file.rpartition("/")[0]


def _join(folder: str, name: str) -> str:
    return f"{folder}/{name}" if folder else name
