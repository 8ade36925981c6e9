"""From what a person names, a file or a folder, to an opened checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from qkform.checkpoints.base import ByteReader, Checkpoint, opening, read_config, regular_file
from qkform.checkpoints.choice import (
    ADAPTER_CONFIG,
    GGUF,
    INDEX,
    NPZ,
    ONNX,
    PICKLED,
    Several,
    choose,
    suffix_of,
)
from qkform.checkpoints.choice import READ as READ
from qkform.checkpoints.prefixes import plain_names
from qkform.checkpoints.quantised import dequantised
from qkform.checkpoints.safetensors import SafetensorsCheckpoint, read_index
from qkform.errors import CheckpointError, SourceError

_UNREAD = {
    ".h5": "Keras or TensorFlow",
    ".keras": "Keras",
    ".msgpack": "Flax",
    ".pb": "TensorFlow",
    ".tflite": "TensorFlow Lite",
    ".mlmodel": "Core ML",
    ".npy": "a single numpy array, and a model has several, by name: numpy.savez",
    ".pkl": "a pickle of any kind",
    ".pickle": "a pickle of any kind",
    ".joblib": "a pickle of any kind",
    ".ggml": "GGML, before GGUF",
}
_CONVERT = "save the model as safetensors (`model.save_pretrained(folder)`) and scan that folder"


def open_checkpoint(path: Path, source: str | None = None) -> Checkpoint:
    """Open a file of weights, an index, or a folder that holds a model.

    Reads safetensors, PyTorch's .bin, .pt, .pth and .ckpt, GGUF, ONNX and .npz; wrappers are taken out of the names and
    quantised weights come out as floats. `source` is the name to report (the path itself by default).
    Raises SourceError, CheckpointError, ConfigError or MissingExtra.
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
    return logical(_open_folder(path, source) if is_folder else _open_file(path, source))


def logical(checkpoint: Checkpoint) -> Checkpoint:
    """The checkpoint under its model's own names, quantised weights as floats. Every format passes through here."""
    return dequantised(plain_names(checkpoint))


def _hint(source: str) -> str:
    parts = source.split("/")
    if len(parts) == 2 and all(parts) and not source.startswith((".", "~")):
        return (
            f"; if it is a hub id, give it as text ({source!r}), or as hf://{source}: a path is never looked up on "
            "the hub"
        )
    return (
        "; give a file (safetensors, .bin, GGUF, ONNX, .npz), a folder that holds a model or an adapter, a hub id, "
        "or sample:minilm"
    )


def _open_file(path: Path, source: str) -> Checkpoint:
    if path.name.endswith(INDEX):
        return _open_index(path, source)
    with opening(path) as file:
        magic = file.read(4)
    suffix = path.suffix.lower()
    if magic == b"GGUF":
        return _open_files([path], source, ".gguf")
    if suffix == ".json":
        raise SourceError(f"{source} is a JSON file, not weights; scan the folder it lies in: {path.parent}")
    if suffix in _UNREAD:
        raise SourceError(f"{source} is a {suffix} file ({_UNREAD[suffix]}), which is not read; {_CONVERT}")
    return _open_files([path], source, suffix)


def _open_folder(folder: Path, source: str) -> Checkpoint:
    try:
        names = sorted(p.name for p in folder.iterdir())
    except OSError as error:
        raise SourceError(f"cannot list {source}: {error.strerror or error}") from None
    if "record.jsonl" in names and "experiment.yaml" in names:  # of `qkform train`
        raise SourceError(
            f"{source} is the folder of a run; scan the model it made, {source}/model, or its checkpoints, "
            f"{source}/checkpoints/*"
        )
    try:
        found = choose(names)
    except Several as error:
        raise SourceError(f"{source} holds {error}; name one of them") from None
    if found is not None and not found.adapter:
        if found.index is not None:
            return _open_index(folder / found.index, source)
        return _open_files([folder / name for name in found.files], source, found.suffix)
    if ADAPTER_CONFIG in names:
        raise SourceError(
            f"{source} holds an adapter and no model; the base that it names is scanned with it"
        )
    other = [n for n in names if Path(n).suffix.lower() in _UNREAD]
    if other:
        raise SourceError(
            f"{source} holds weights only as {', '.join(other[:3])}, which is not read; {_CONVERT}"
        )
    raise SourceError(
        f"{source} holds no weights (looked for {', '.join('*' + s for s in READ)} among {len(names)} files); "
        "name the folder that holds the model's weights"
    )


def _open_index(path: Path, source: str) -> Checkpoint:
    reader = ByteReader()
    places = read_index(path, reader)
    suffix = suffix_of(path.name.removesuffix(INDEX))
    try:
        return _open_files(sorted(set(places.values())), source, suffix, reader, places)
    except CheckpointError as error:
        raise CheckpointError(f"{error} (shards as in {path.name})") from None


def _open_files(
    files: list[Path],
    source: str,
    suffix: str,
    reader: ByteReader | None = None,
    places: Mapping[str, Path] | None = None,
) -> Checkpoint:
    reader = ByteReader() if reader is None else reader
    if suffix in GGUF:
        from qkform.checkpoints.gguf import GGUFCheckpoint

        return GGUFCheckpoint(source, files[0], reader)
    config, config_path = _config_beside(files[0].parent, reader)
    if (
        config is None and suffix in ONNX and files[0].parent.absolute().name == "onnx"
    ):  # as exporters lay it out
        config, config_path = _config_beside(files[0].parent.absolute().parent, reader)
    if suffix in PICKLED:
        from qkform.checkpoints.pickled import PickledCheckpoint

        return PickledCheckpoint(source, files, reader, config, config_path, places)
    if suffix in NPZ:
        from qkform.checkpoints.npz import NpzCheckpoint

        return NpzCheckpoint(source, files[0], reader, config, config_path)
    if suffix in ONNX:
        from qkform.checkpoints.onnx import OnnxCheckpoint

        return OnnxCheckpoint(source, files[0], reader, config, config_path)
    return SafetensorsCheckpoint(source, files, reader, config, config_path, places)


def _config_beside(folder: Path, reader: ByteReader) -> tuple[Mapping[str, Any] | None, Path | None]:
    path = folder / "config.json"
    if not path.exists() and not path.is_symlink():
        return None, None
    return read_config(regular_file(path), reader), path
