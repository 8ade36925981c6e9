"""From what a person names, a file or a folder, to an opened checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from qkform.checkpoints.base import ByteReader, Checkpoint, opening, read_config, regular_file
from qkform.checkpoints.safetensors import SafetensorsCheckpoint, read_index
from qkform.errors import CheckpointError, SourceError

INDEX_SUFFIX = ".safetensors.index.json"
_UNREAD = (".bin", ".pt", ".pth", ".npz", ".h5", ".msgpack", ".ckpt")


def open_checkpoint(path: Path, source: str | None = None) -> Checkpoint:
    """Open a .safetensors or .gguf file, an index, or a folder that holds a model.

    `source` is the name to report (the path itself by default). Raises SourceError, CheckpointError or ConfigError.
    """
    source = str(path) if source is None else source
    try:
        is_folder = path.is_dir()
        exists = path.exists() or path.is_symlink()
    except (OSError, ValueError) as error:
        raise SourceError(
            f"cannot read {source[:200]!r}: {getattr(error, 'strerror', None) or error}"
        ) from None
    if not exists:
        raise SourceError(f"no file or folder named {source!r}{_hint(source)}")
    return _open_folder(path, source) if is_folder else _open_file(path, source)


def _hint(source: str) -> str:
    parts = source.split("/")
    if len(parts) == 2 and all(parts) and not source.startswith((".", "~")):
        return (
            f"; if it is a hub id: hub ids are not read yet, fetch it first with `hf download {source}` "
            "and scan the folder that command prints"
        )
    return "; give a .safetensors or .gguf file, a folder that holds one, or sample:minilm"


def _open_file(path: Path, source: str) -> Checkpoint:
    reader = ByteReader()
    if path.name.endswith(INDEX_SUFFIX):
        return _open_index(path, source, reader)
    with opening(path) as file:
        magic = file.read(4)
    if magic == b"GGUF":
        return _open_gguf(path, source, reader)
    if path.suffix.lower() == ".json":
        raise SourceError(f"{source} is a JSON file, not weights; scan the folder it lies in: {path.parent}")
    if path.suffix.lower() == ".onnx":
        return _open_onnx(path, source, reader)
    if path.suffix.lower() in _UNREAD:
        raise SourceError(
            f"{source} is a {path.suffix} file, which is not read yet; save the model as safetensors "
            "(`model.save_pretrained(folder)`) and scan that folder"
        )
    config, config_path = _config_beside(path.parent, reader)
    return SafetensorsCheckpoint(source, [path], reader, config, config_path)


def _open_folder(folder: Path, source: str) -> Checkpoint:
    reader = ByteReader()
    try:
        names = sorted(p.name for p in folder.iterdir())
    except OSError as error:
        raise SourceError(f"cannot list {source}: {error.strerror or error}") from None
    indexes = [n for n in names if n.endswith(INDEX_SUFFIX)]
    single = [n for n in names if n.endswith(".safetensors")]
    gguf = [n for n in names if n.lower().endswith(".gguf")]
    if "model.safetensors" in single and "model" + INDEX_SUFFIX not in indexes:
        single, indexes = ["model.safetensors"], []
    if "model" + INDEX_SUFFIX in indexes:
        indexes = ["model" + INDEX_SUFFIX]
    if len(indexes) == 1:
        return _open_index(folder / indexes[0], source, reader)
    if len(indexes) > 1:
        raise SourceError(
            f"{source} holds several models ({', '.join(indexes[:5])}); name one of these files"
        )
    if len(single) == 1 or _one_set_of_shards(single):
        config, config_path = _config_beside(folder, reader)
        return SafetensorsCheckpoint(source, [folder / n for n in single], reader, config, config_path)
    if len(single) > 1:
        raise SourceError(
            f"{source} holds {len(single)} safetensors files and no index ({', '.join(single[:5])}"
            f"{', ...' if len(single) > 5 else ''}); name one of them"
        )
    if len(gguf) == 1:
        return _open_gguf(folder / gguf[0], source, reader)
    if gguf:
        raise SourceError(f"{source} holds several GGUF files ({', '.join(gguf[:5])}); name one of them")
    other = [n for n in names if n.endswith(_UNREAD)]
    if other:
        raise SourceError(
            f"{source} holds weights only as {', '.join(other[:3])}, which is not read yet; "
            "save the model as safetensors (`model.save_pretrained(folder)`) and scan that folder"
        )
    raise SourceError(
        f"{source} holds no weights (looked for *.safetensors and *.gguf among {len(names)} files); "
        "name the folder that holds the model's weights"
    )


def _one_set_of_shards(names: list[str]) -> bool:
    """True for a complete set model-00001-of-0000N.safetensors .. without its index."""
    stems = [n.removesuffix(".safetensors").rsplit("-", 3) for n in names]
    if not names or any(
        len(s) != 4 or s[2] != "of" or not (s[3].isascii() and s[3].isdigit()) for s in stems
    ):
        return False
    return len({(s[0], s[3]) for s in stems}) == 1 and len(names) == int(stems[0][3])


def _open_index(path: Path, source: str, reader: ByteReader) -> Checkpoint:
    places = read_index(path, reader)
    config, config_path = _config_beside(path.parent, reader)
    files = sorted(set(places.values()))
    try:
        return SafetensorsCheckpoint(source, files, reader, config, config_path, places)
    except CheckpointError as error:
        raise CheckpointError(f"{error} (shards as in {path.name})") from None


def _open_gguf(path: Path, source: str, reader: ByteReader) -> Checkpoint:
    from qkform.checkpoints.gguf import GGUFCheckpoint

    return GGUFCheckpoint(source, path, reader)


def _open_onnx(path: Path, source: str, reader: ByteReader) -> Checkpoint:
    from qkform.checkpoints.onnx import OnnxCheckpoint

    config, config_path = _config_beside(path.parent, reader)
    if config is None and path.parent.absolute().name == "onnx":
        config, config_path = _config_beside(path.parent.absolute().parent, reader)
    return OnnxCheckpoint(source, path, reader, config, config_path)


def _config_beside(folder: Path, reader: ByteReader) -> tuple[Mapping[str, Any] | None, Path | None]:
    path = folder / "config.json"
    if not path.exists() and not path.is_symlink():
        return None, None
    return read_config(regular_file(path), reader), path
