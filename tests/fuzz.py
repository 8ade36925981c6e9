"""Hostile bytes for every reader: what any of them may answer is a sound tensor or a QKFormError, nothing else.

Each target turns bytes into files of one kind in a folder of its own, opens the folder's file as a person would, finds
its layers and reads what was found. Watched by an audit hook: once warmed up, no reader may open a file outside the
folder, start a process, open a connection, or run code. `tests/test_fuzz.py` runs every target on mutated good files;

    python -m tests.fuzz TARGET --runs 100000

runs one under atheris, guided by the coverage of qkform's own code. Memory is limited to 4 GB beyond what is loaded, a
single input to 10 seconds.
"""

from __future__ import annotations

import argparse
import io
import json
import shutil
import struct
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

CONFIG = {
    "model_type": "bert",
    "hidden_size": 4,
    "num_attention_heads": 2,
    "num_hidden_layers": 1,
    "pad_token_id": 0,
}
MOST = 8  # tensors read of one file


@dataclass(frozen=True)
class Target:
    """`write` makes files out of bytes and names the one to open; `seeds` are good inputs to start from."""

    write: Callable[[Path, bytes], Path]
    seeds: Callable[[], list[bytes]]


def tensors() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    path = "encoder.layer.0.attention.self"
    return {
        f"{path}.{name}.{what}": rng.normal(size=shape).astype(np.float32)
        for name in ("query", "key")
        for what, shape in (("weight", (4, 4)), ("bias", (4,)))
    }


# ---- what a target writes ----------------------------------------------------------------------------------


def _file(name: str) -> Callable[[Path, bytes], Path]:
    def write(folder: Path, data: bytes) -> Path:
        (folder / "config.json").write_text(json.dumps(CONFIG))
        (folder / name).write_bytes(data)
        return folder / name

    return write


def _header_alone(folder: Path, data: bytes) -> Path:
    """A safetensors file whose header is `data`, with its length right and room for the tensors behind it."""
    return _file("model.safetensors")(folder, struct.pack("<Q", len(data)) + data + bytes(160))


def _config(folder: Path, data: bytes) -> Path:
    from safetensors.numpy import save_file

    save_file(tensors(), folder / "model.safetensors")
    (folder / "config.json").write_bytes(data)
    return folder


def _index(folder: Path, data: bytes) -> Path:
    from safetensors.numpy import save_file

    save_file(tensors(), folder / "a.safetensors")
    (folder / "config.json").write_text(json.dumps(CONFIG))
    (folder / "model.safetensors.index.json").write_bytes(data)
    return folder


def _safetensors() -> bytes:
    from safetensors.numpy import save

    return bytes(save(tensors()))


def _gguf() -> bytes:
    import gguf

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.gguf"
        writer = gguf.GGUFWriter(path, "llama")
        writer.add_block_count(1)
        writer.add_embedding_length(4)
        writer.add_head_count(2)
        for side in "qk":
            writer.add_tensor(f"blk.0.attn_{side}.weight", np.eye(4, dtype=np.float32))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path.read_bytes()


def _split_safetensors_header() -> bytes:
    data = _safetensors()
    (length,) = struct.unpack("<Q", data[:8])
    return data[8 : 8 + length]


def _index_text() -> bytes:
    return json.dumps({"metadata": {}, "weight_map": dict.fromkeys(tensors(), "a.safetensors")}).encode()


def _npz() -> bytes:
    out = io.BytesIO()
    np.savez(out, **tensors())
    return out.getvalue()


def _npz_member(folder: Path, data: bytes) -> Path:
    """An archive that is in order, around a member that is `data`."""
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        for name in (n for n in tensors() if n.endswith("weight")):
            archive.writestr(f"{name}.npy", data)
    return _file("model.npz")(folder, out.getvalue())


def _npy() -> bytes:
    out = io.BytesIO()
    np.save(out, np.eye(4, dtype=np.float32))
    return out.getvalue()


@cache
def _pickled(zipped: bool) -> bytes:
    import torch

    out = io.BytesIO()
    weights = {name: torch.from_numpy(t) for name, t in tensors().items()}
    torch.save(weights, out, _use_new_zipfile_serialization=zipped)
    return out.getvalue()


def _pickle_alone(folder: Path, data: bytes) -> Path:
    """A PyTorch archive that is in order, around a data.pkl that is `data`."""
    out = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(_pickled(True))) as good, zipfile.ZipFile(out, "w") as archive:
        for member in good.infolist():
            whole = good.read(member)
            archive.writestr(member.filename, data if member.filename.endswith("data.pkl") else whole)
    return _file("pytorch_model.bin")(folder, out.getvalue())


def _data_pkl() -> bytes:
    with zipfile.ZipFile(io.BytesIO(_pickled(True))) as good:
        name = next(n for n in good.namelist() if n.endswith("data.pkl"))
        return good.read(name)


def _onnx() -> bytes:
    """Four products with their biases, as exporters write them: anonymous weights, named biases."""
    import onnx
    from onnx import helper, numpy_helper

    initializers, nodes, outputs = [], [], []
    for name, tensor in tensors().items():
        if not name.endswith("weight"):
            continue
        bias = name.removesuffix("weight") + "bias"
        scope = "/encoder/layer.0/attention/self/" + name.split(".")[-2]
        weight = f"onnx::MatMul_{len(nodes)}"
        initializers += [
            numpy_helper.from_array(np.ascontiguousarray(tensor.T), weight),
            numpy_helper.from_array(tensors()[bias], bias),
        ]
        nodes += [
            helper.make_node("MatMul", ["x", weight], [f"{name}/product"], name=f"{scope}/MatMul"),
            helper.make_node("Add", [bias, f"{name}/product"], [f"{name}/out"], name=f"{scope}/Add"),
        ]
        outputs.append(helper.make_tensor_value_info(f"{name}/out", onnx.TensorProto.FLOAT, [1, 4]))
    given = helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, [1, 4])
    graph = helper.make_graph(nodes, "model", [given], outputs, initializers)
    return bytes(helper.make_model(graph).SerializeToString())


def _adapter(folder: Path, data: bytes) -> Path:
    from safetensors.numpy import save_file

    (folder / "adapter_config.json").write_bytes(data)
    (folder / "base").mkdir(exist_ok=True)
    _config(folder / "base", json.dumps(CONFIG).encode())
    path = "base_model.model.encoder.layer.0.attention.self.query"
    lora = {f"{path}.lora_A.weight": np.ones((2, 4)), f"{path}.lora_B.weight": np.ones((4, 2))}
    save_file(lora, folder / "adapter_model.safetensors")
    return folder


def _adapter_config() -> bytes:
    return json.dumps(
        {"peft_type": "LORA", "base_model_name_or_path": "base", "r": 2, "lora_alpha": 4}
    ).encode()


TARGETS: dict[str, Target] = {
    "safetensors": Target(_file("model.safetensors"), lambda: [_safetensors()]),
    "safetensors-header": Target(_header_alone, lambda: [_split_safetensors_header()]),
    "index": Target(_index, lambda: [_index_text()]),
    "config": Target(_config, lambda: [json.dumps(CONFIG).encode()]),
    "gguf": Target(_file("model.gguf"), lambda: [_gguf()]),
    "npz": Target(_file("model.npz"), lambda: [_npz()]),
    "npz-member": Target(_npz_member, lambda: [_npy()]),
    "pickled": Target(_file("pytorch_model.bin"), lambda: [_pickled(True), _pickled(False)]),
    "pickle": Target(_pickle_alone, lambda: [_data_pkl()]),
    "onnx": Target(_file("model.onnx"), lambda: [_onnx()]),
}


# ---- the check ---------------------------------------------------------------------------------------------


class Escaped(Exception):
    """A reader did what no input may make it do."""


class Watch:
    """An audit hook that objects while it is armed."""

    def __init__(self) -> None:
        self.folder: str | None = None
        self.found: str | None = None
        sys.addaudithook(self._hook)

    def _hook(self, event: str, args: tuple[Any, ...]) -> None:
        if self.folder is None:
            return
        if event == "open" and isinstance(args[0], (str, bytes)):
            path = args[0] if isinstance(args[0], str) else args[0].decode(errors="replace")
            if not path.startswith((self.folder, *_OURS)):
                self._object(f"opened {path!r}")
        elif event in ("exec", "compile"):
            code = args[0] if event == "exec" else None
            name = getattr(code, "co_filename", args[-1])
            if not (isinstance(name, str) and self._is_import(name)):
                self._object(f"{event} {args!r:.200}")
        elif event in _FORBIDDEN:
            self._object(f"{event} {args!r:.200}")

    def _is_import(self, name: str) -> bool:
        """A module of this Python that an input was the first to need, and not one in the folder."""
        return not name.startswith(str(self.folder)) and (name.startswith("<frozen") or Path(name).is_file())

    def _object(self, what: str) -> None:
        self.found = what
        raise Escaped(what)

    @contextmanager
    def over(self, folder: Path) -> Iterator[None]:
        self.folder, self.found = str(folder), None
        try:
            yield
        finally:
            self.folder = None
        if self.found is not None:  # even where a reader swallowed the exception
            raise Escaped(self.found)


_OURS = tuple(
    {sys.prefix, sys.base_prefix, str(Path(__file__).parents[1] / "src")}
)  # code, and data that comes with it
_FORBIDDEN = {
    "os.system",
    "os.exec",
    "os.posix_spawn",
    "os.spawn",
    "os.fork",
    "os.remove",
    "os.rename",
    "os.rmdir",
    "subprocess.Popen",
    "socket.connect",
    "socket.getaddrinfo",
    "ctypes.dlopen",
    "shutil.rmtree",
}
watch = Watch()


def run(target: Target, data: bytes, folder: Path, *, watched: bool = True) -> str:
    """One input; what came of it: "read" or the name of the error."""
    import qkform as qk
    from qkform.checkpoints import open_checkpoint
    from qkform.errors import QKFormError

    for old in folder.iterdir():
        shutil.rmtree(old) if old.is_dir() else old.unlink()
    path = target.write(folder, data)
    try:
        with watch.over(folder) if watched else nullcontext():
            checkpoint = open_checkpoint(path)
            for name in list(checkpoint.tensors)[:MOST]:
                if int(np.prod(checkpoint.tensors[name].shape, dtype=object)) < 2**20:
                    try:
                        array = checkpoint.read(name)
                    except QKFormError:
                        continue
                    assert array.shape == checkpoint.tensors[name].shape
            for layer in qk.layers(path if path.suffix else folder):
                layer.form.symmetry()
    except QKFormError as error:
        return type(error).__name__ if str(error) else "an error without a message"
    return "read"


@contextmanager
def scratch() -> Iterator[Path]:
    """A folder in memory where there is one."""
    shared = Path("/dev/shm")
    folder = Path(tempfile.mkdtemp(prefix="qkform-fuzz-", dir=shared if shared.is_dir() else None))
    try:
        yield folder
    finally:
        shutil.rmtree(folder)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Run one target under atheris.")
    parser.add_argument("target", choices=sorted(TARGETS))
    parser.add_argument("--runs", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=1)
    asked = parser.parse_args(arguments)
    import atheris

    with atheris.instrument_imports(include=["qkform"]):
        import qkform.checkpoints
        import qkform.layouts
        import qkform.scanner  # noqa: F401
    target = TARGETS[asked.target]
    outcomes: dict[str, int] = {}
    begin = time.perf_counter()
    folder = Path(tempfile.mkdtemp(prefix="qkform-fuzz-", dir="/dev/shm"))
    corpus = Path(tempfile.mkdtemp(prefix="qkform-corpus-"))
    for i, seed in enumerate(target.seeds()):
        (corpus / f"seed{i}").write_bytes(seed)
        run(target, seed, folder, watched=False)  # modules that import others by exec do it now
        outcome = run_quietly(target, seed, folder)
        assert outcome == "read", f"a seed must be sound, and this one ended in {outcome}"

    def one(data: bytes) -> None:
        outcome = run_quietly(target, data, folder)
        outcomes[outcome] = outcomes.get(outcome, 0) + 1
        done = sum(outcomes.values())
        if done >= asked.runs:
            taken = time.perf_counter() - begin
            print(f"{asked.target}: {done} inputs in {taken:.0f} s: {outcomes}", flush=True)
            shutil.rmtree(folder)
            shutil.rmtree(corpus)
            import os

            os._exit(0)

    options = [f"-seed={asked.seed}", "-timeout=10", "-rss_limit_mb=6000", "-max_len=65536", "-verbosity=0"]
    atheris.Setup([sys.argv[0], *options, str(corpus)], one)
    atheris.Fuzz()


def run_quietly(target: Target, data: bytes, folder: Path) -> str:
    """`run`, with warnings as errors: a warning is a message that nobody meant."""
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return run(target, data, folder)


if __name__ == "__main__":
    main()
