"""PyTorch files (.bin, .pt, .pth, .ckpt): one, or shards with an index, loaded by torch with `weights_only=True`.

torch decides what a pickle may name, and there is no other way in: what would run code is refused. Files of the zip
format are memory-mapped, so that only the tensors that are asked for are read; older files are read whole.
"""

from __future__ import annotations

import io
import mmap
import struct
import tarfile
import warnings
import zipfile
import zlib
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qkform.checkpoints.archive import members
from qkform.checkpoints.base import (
    CODES,
    FLOATS,
    ByteReader,
    Local,
    TensorInfo,
    check_floats,
    opening,
    refuse_pointer,
)
from qkform.checkpoints.opcodes import Asks, Pickle, Unsafe
from qkform.checkpoints.safetensors import united
from qkform.errors import CheckpointError, MissingExtra, SourceError

MAX_PICKLE_BYTES = 100_000_000  # names, shapes and a trainer's state; the tensors lie beside it
MAX_TENSORS = 100_000
_MAGIC = 0x1950A86A20F9469CFC6C  # what torch.save writes first in its older format
MAX_DEPTH = 8  # dictionaries inside each other
REMAP_BYTES = 2**28  # maps keep what was touched resident: they are dropped after so much
WHOLE_FILES = 2  # files of the older format that are in memory at once
REPEATED_BYTES = 2**26  # all views of a model may be larger than what they view by so much

# Where trainers put the model's weights, in the order in which they are looked for.
_STATES = ("state_dict", "model_state_dict", "model_state", "model", "module", "net", "network", "generator")
_WORDS = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "float8_e8m0fnu": "F8_E8M0",
    "int8": "I8",
    "uint8": "U8",
    "int16": "I16",
    "int32": "I32",
    "int64": "I64",
}
_INSTEAD = "save the model as safetensors (`model.save_pretrained(folder)`) where you trust the file"


class PickledCheckpoint(Local):
    """Tensors of one or several PyTorch files, by name."""

    format = "pytorch"

    def __init__(
        self,
        source: str,
        files: list[Path],
        reader: ByteReader,
        config: Mapping[str, Any] | None,
        config_path: Path | None,
        expected: Mapping[str, Path] | None = None,
    ) -> None:
        self.source, self.config, self.config_path = source, config, config_path
        self._reader = reader
        self._mapped: dict[Path, bool] = {}
        self._states: dict[
            Path, dict[str, Any]
        ] = {}  # tensors of the files, the one asked for last at the end
        self._repeats: dict[str, int] = {}  # bytes that views hand out beyond what is stored, by name
        self._touched: Counter[Path] = Counter()  # bytes of each map that are resident, at most
        headers = {
            file: {name: _info(tensor, file) for name, tensor in self._state(file).items()} for file in files
        }
        tensors = united(headers, expected)
        if not tensors:
            raise CheckpointError(f"{files[0]} holds no tensors by name, so it is not a model's weights")
        self.tensors: Mapping[str, TensorInfo] = tensors

    @property
    def bytes_read(self) -> int:
        """Pickles, and the bytes of every tensor handed out; the whole of a file in the older format."""
        return self._reader.bytes_read

    def read(self, name: str, rows: int | None = None) -> NDArray[Any]:
        check_floats(name, self.tensors[name])
        return self.stored(name, rows)

    def stored(self, name: str, rows: int | None = None) -> NDArray[Any]:
        """The tensor, or its first rows, as it is stored: codes and scales too."""
        info = self.tensors[name].head(rows)
        if info.dtype not in FLOATS and info.dtype not in CODES:
            raise CheckpointError(
                f"tensor {name!r} in {info.file} is {info.dtype}, which holds no plain numbers; {_INSTEAD}"
            )
        tensor = self._state(info.file).get(name)
        if tensor is None or _info(tensor, info.file) != self.tensors[name]:
            raise CheckpointError(f"{info.file} changed while it was being read")
        held = tensor.untyped_storage().nbytes()
        whole = self.tensors[name].nbytes
        if info.nbytes > held:
            self._repeats[name] = max(self._repeats.get(name, 0), info.nbytes - held)
        if (
            sum(self._repeats.values()) > REPEATED_BYTES and whole > held
        ):  # strides of 0: terabytes out of four bytes
            raise CheckpointError(
                f"tensor {name!r} in {info.file} repeats {held:,} stored bytes to {whole:,} (or several do): "
                "not a weight that a model has"
            )
        out = _as_numpy(tensor.detach() if rows is None else tensor.detach()[:rows])
        if self._mapped[info.file]:
            self._reader.bytes_read += info.nbytes
            self._touched[info.file] += info.nbytes
        return out

    def _state(self, file: Path) -> dict[str, Any]:
        """The tensors of one file by name. Maps are kept until they have been read from, older files for a while."""
        if self._touched.total() > REMAP_BYTES:
            for other in self._touched:
                self._states.pop(other, None)
            self._touched.clear()
        state = self._states.pop(file, None)
        if state is None:
            if file not in self._mapped:
                with opening(file) as stream:
                    self._mapped[file] = stream.read(2) == b"PK"
            if not self._mapped[file]:
                whole = [other for other in self._states if not self._mapped[other]]
                for other in whole[: len(whole) + 1 - WHOLE_FILES]:
                    del self._states[other]
            state = _load(file, self._reader)
        self._states[file] = state
        return state


def _as_numpy(tensor: Any) -> NDArray[Any]:
    """A copy in the tensor's own type; what numpy does not have goes over as bytes."""
    word = _WORDS[str(tensor.dtype).removeprefix("torch.")]
    kind = FLOATS.get(word) or CODES[word]
    if kind[0] == "<":
        out: NDArray[Any] = np.array(tensor.numpy(), order="C", copy=True)
        return out
    import ml_dtypes
    import torch

    whole = tensor.contiguous()
    bits = whole.view(torch.int16 if whole.element_size() == 2 else torch.uint8).numpy()
    return np.array(bits, order="C", copy=True).view(np.dtype(getattr(ml_dtypes, kind)))


def _info(tensor: Any, file: Path) -> TensorInfo:
    import torch

    word = str(tensor.dtype).removeprefix("torch.")
    strided = tensor.layout == torch.strided and tensor.device.type == "cpu" and not tensor.is_quantized
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
        word = f"a {type(tensor).__name__} of {word}"
    elif tensor.is_conj() or tensor.is_neg():
        word = f"a conjugated view of {word}"
    elif not strided:
        kind = "meta" if tensor.device.type == "meta" else str(tensor.layout).removeprefix("torch.")
        word = f"a {'quantised' if tensor.is_quantized else kind} tensor of {word}"
    else:
        word = _WORDS.get(word, word)
    shape = tuple(int(n) for n in tensor.shape)
    try:
        offset = tensor.storage_offset() * tensor.element_size() if strided else 0
    except RuntimeError:
        offset = 0
    return TensorInfo(shape, word, file, offset, tensor.numel() * tensor.element_size())


# ---- one file


def _load(path: Path, reader: ByteReader) -> dict[str, Any]:
    """Name -> tensor, of whatever torch agrees to load; SourceError otherwise."""
    with opening(path) as file:
        head = file.read(512)
        size = path.stat().st_size
    refuse_pointer(path, head)
    if len(head) < 8:
        raise CheckpointError(f"{path} has {size} bytes: too short for a PyTorch file (empty download?)")
    mapped = head.startswith(b"PK")
    if mapped:
        _check_archive(path, reader)
    elif head[257:262] == b"ustar":
        raise SourceError(
            f"{path} is a tar archive of PyTorch before 0.4, which cannot be loaded safely; {_INSTEAD}"
        )
    elif head[:1] != b"\x80":
        raise CheckpointError(
            f"{path} starts with {head[:8]!r}: neither a zip archive nor a pickle, as PyTorch writes them"
        )
    else:
        reader.bytes_read += size
    try:
        import torch
    except ImportError:
        raise MissingExtra(
            f'{path} is a PyTorch file, and torch is not installed; it comes with: pip install "qkform[torch]"'
        ) from None
    _follow(path, mapped, head)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # deprecations of what the file's own torch wrote
            state = torch.load(path, map_location="cpu", weights_only=True, mmap=mapped)
    except MemoryError:
        raise CheckpointError(f"{path} asks for more memory than there is") from None
    except Exception as error:  # torch raises whatever its reader stumbles over
        raise _refusal(path, error) from None
    return _tensors(state, path)


def _follow(path: Path, mapped: bool, head: bytes) -> None:
    """Refuse what torch would spend memory, time or stack on without bound: see `opcodes`."""
    import torch

    trusted = {entry[1] if isinstance(entry, tuple) else f"{entry.__module__}.{entry.__qualname__}"
               for entry in torch.serialization.get_safe_globals()}  # fmt: skip
    pickles = Pickle(path.stat().st_size, frozenset(trusted))
    try:
        if mapped:
            with opening(path) as file, zipfile.ZipFile(file) as archive:
                name = next(name for name in archive.namelist() if name.rpartition("/")[2] == "data.pkl")
                pickles.follow(io.BytesIO(archive.read(name)))
            return
        if _is_tar(head):  # torch would look for its pickles inside
            raise Unsafe("is a tar archive")
        with opening(path) as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as stream:
            if pickles.follow(stream) != _MAGIC:
                raise Unsafe("starts with a pickle that is not torch.save's")
            for _ in range(4):  # version, system, tensors, names of the storages
                pickles.follow(stream)
    except Asks as error:
        raise _runs_code(path, str(error)) from None
    except Unsafe as error:
        raise CheckpointError(
            f"{path} is not a PyTorch file that can be loaded safely: it {error}; {_INSTEAD}"
        ) from None
    except (
        zipfile.BadZipFile,
        zlib.error,
        EOFError,
        OSError,
        RuntimeError,
        NotImplementedError,
        StopIteration,
        ValueError,  # a name that is not UTF-8, a place before the start
        struct.error,
    ):
        raise CheckpointError(
            f"{path} is not a PyTorch file that can be loaded safely: its pickle cannot be taken from it "
            "(truncated or damaged)"
        ) from None


def _is_tar(head: bytes) -> bool:
    try:
        tarfile.TarInfo.frombuf(head[:512], "latin1", "surrogateescape")
    except tarfile.HeaderError:
        return False
    return True


def _runs_code(path: Path, name: str) -> CheckpointError:
    return CheckpointError(
        f"{path} would run code on loading: its pickle asks for {name[:120]!r}, which is not a tensor, "
        f"and is refused; {_INSTEAD}"
    )


def _refusal(path: Path, error: Exception) -> SourceError:
    """What torch stumbled over, in our words: its own speak of its internals, and advise to load unsafely."""
    text = " ".join(str(error).split())
    for mark in ("Unsupported global: GLOBAL ", "Unsupported class ", "Trying to load unsupported GLOBAL "):
        if mark in text:
            return _runs_code(path, text.split(mark, 1)[1].split(" ", 1)[0])
    if "torch.distributed" in text or "torch.nested" in text:
        return CheckpointError(
            f"{path} cannot be loaded safely: it holds distributed or nested tensors; gather them first; {_INSTEAD}"
        )
    return CheckpointError(
        f"{path} is not a PyTorch file that can be loaded safely: its tensors do not fit what is stored, or are of a "
        f"kind that this torch does not know (truncated or damaged? {type(error).__name__})"
    )


def _check_archive(path: Path, reader: ByteReader) -> None:
    """Refuse a zip archive that torch would not have written; its directory and its pickle are counted as read."""
    pickles = []
    for name, member in members(path, reader).items():
        if member.compress_type != zipfile.ZIP_STORED or member.file_size != member.compress_size:
            raise CheckpointError(
                f"{path} is a zip archive with the packed member {name[:120]!r}; PyTorch packs nothing"
            )
        if name.rpartition("/")[2] == "constants.pkl":
            raise SourceError(f"{path} is a TorchScript archive, which holds code; {_INSTEAD}")
        if name.rpartition("/")[2] == "data.pkl":
            pickles.append(member)
    if len(pickles) != 1:
        raise CheckpointError(
            f"{path} is a zip archive with {len(pickles)} members named data.pkl; a PyTorch file has one"
        )
    if pickles[0].file_size > MAX_PICKLE_BYTES:
        raise CheckpointError(
            f"{path} has a pickle of {pickles[0].file_size:,} bytes; "
            f"at most {MAX_PICKLE_BYTES:,} are read: tensors lie outside it"
        )
    reader.bytes_read += pickles[0].file_size


def _tensors(state: Any, path: Path) -> dict[str, Any]:
    """The model's tensors in what was loaded: at the top, or under the name that a trainer gives them."""
    if not isinstance(state, Mapping):
        raise CheckpointError(f"{path} holds a {type(state).__name__}; a model's weights are tensors by name")
    for _ in range(MAX_DEPTH):
        inner = next((state[k] for k in _STATES if isinstance(state.get(k), Mapping) and state[k]), None)
        if inner is None or _has_tensors(state):
            break
        state = inner
    found: dict[str, Any] = {}
    for name, tensor in _walk(state, "", MAX_DEPTH, [MAX_TENSORS]):
        if name in found:
            raise CheckpointError(f"{path} holds tensor {name[:200]!r} twice")
        found[name] = tensor
    return found


def _has_tensors(state: Mapping[Any, Any]) -> bool:
    import torch

    return any(isinstance(value, torch.Tensor) for value in state.values())


def _walk(state: Mapping[Any, Any], prefix: str, depth: int, left: list[int]) -> Iterator[tuple[str, Any]]:
    """(dotted name, tensor) of every tensor under a text key; `left` bounds the entries looked at."""
    import torch

    for key, value in state.items():
        left[0] -= 1
        if left[0] < 0:
            raise CheckpointError(f"more than {MAX_TENSORS:,} entries: not a model's weights")
        if not isinstance(key, str):
            continue
        if isinstance(value, torch.Tensor):
            yield prefix + key, value
        elif isinstance(value, Mapping) and depth:
            yield from _walk(value, f"{prefix}{key}.", depth - 1, left)
