"""Which files of a hub repository are the model: safetensors to read in parts, or other files to fetch whole."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath

from qkform.checkpoints.choice import INDEX, SAFETENSORS, Choice, Several, choose, choose_file, is_weights
from qkform.checkpoints.hub_names import HubName
from qkform.errors import SourceError

SMALL_BYTES = 2 * 2**30  # an adapter is fetched whole without being asked for; one of this size is no adapter


@dataclass(frozen=True)
class Ranges:
    """Safetensors files that are read in parts; with an index, it says which."""

    folder: str
    files: tuple[str, ...]
    index: str | None = None


@dataclass(frozen=True)
class Whole:
    """Files that are fetched whole, with those that an index names, and which (or the folder) is then opened."""

    folder: str
    files: tuple[str, ...]
    open: str
    what: str
    index: str | None = None
    small: bool = False


def listed(sizes: Mapping[str, int | None], name: HubName, commit: str) -> Ranges | Whole:
    """The model in a repository, or in the folder or file of it that was named."""
    where = f"{name.repo_id} at {commit[:12]}"
    if name.path in sizes:
        folder, _, last = name.path.rpartition("/")
        if not is_weights(last.removesuffix(INDEX)):
            raise SourceError(f"{name.path[:200]} holds no weights; name the file or folder that does")
        return _told(choose_file(last, _names_in(folder, sizes)), folder, sizes)
    folder = name.path
    if folder and not any(file.startswith(f"{folder}/") for file in sizes):
        raise SourceError(f"{where} has no file or folder {folder[:200]!r}{_some(_weights(sizes), name)}")
    try:
        found = choose(_names_in(folder, sizes))
    except Several as error:
        several = [_join(folder, one) for one in error.names]
        raise SourceError(f"{where} holds several models{_some(several, name)}") from None
    if found is not None:
        return _told(found, folder, sizes)
    inner = [file for file in _weights(sizes) if not folder or file.startswith(f"{folder}/")]
    if not inner:
        raise SourceError(f"{where} holds no weights among its {len(sizes):,} files")
    raise SourceError(f"{where} has its weights in folders of its own{_some(_folders(inner), name)}")


def _told(found: Choice, folder: str, sizes: Mapping[str, int | None]) -> Ranges | Whole:
    """A choice in the repository's own paths."""
    files = tuple(_join(folder, name) for name in found.files)
    index = None if found.index is None else _join(folder, found.index)
    if found.adapter:
        small = sum(sizes[file] or SMALL_BYTES for file in files) < SMALL_BYTES
        return Whole(folder, _with_config(files, sizes, folder), folder, "an adapter", small=small)
    if found.suffix in SAFETENSORS:
        return Ranges(folder, files, index)
    if index is not None:
        return Whole(folder, _with_config((index,), sizes, folder), index, f"{found.suffix} files", index)
    what = found.files[0] if len(files) == 1 else f"{len(files)} files, {found.files[0]} the first of them"
    return Whole(folder, _with_config(files, sizes, folder), _opened(found, files, folder), what)


def _opened(found: Choice, files: tuple[str, ...], folder: str) -> str:
    """Shards without an index are a folder; of other files the first leads to the rest."""
    return files[0] if choose_file(found.files[0], found.files) == found else folder


def _with_config(files: tuple[str, ...], sizes: Mapping[str, int | None], folder: str) -> tuple[str, ...]:
    """Files with the config beside them; exporters to ONNX put theirs one folder above."""
    places = [folder, folder.rpartition("/")[0]] if PurePosixPath(folder).name == "onnx" else [folder]
    config = next((c for place in places if (c := _join(place, "config.json")) in sizes), None)
    return files if config is None or config in files else (*files, config)


def _weights(sizes: Mapping[str, int | None]) -> list[str]:
    return sorted(file for file in sizes if is_weights(file))


def _folders(files: Sequence[str]) -> list[str]:
    return list(dict.fromkeys(_parent(file) for file in files))


def _some(files: Sequence[str], name: HubName) -> str:
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
