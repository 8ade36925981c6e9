"""Formats: the same weights out of every kind of file, and quantised ones as their format's description has them."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter, OrderedDict
from pathlib import Path
from typing import Any

import gguf
import ml_dtypes
import numpy as np
import pytest
import torch
from safetensors.numpy import save_file
from safetensors.torch import save_file as save_torch

import qkform as qk
from qkform import samples
from qkform.checkpoints import open_checkpoint, pickled
from qkform.checkpoints.adapter import is_adapter, open_adapter
from qkform.errors import CheckpointError, ConfigError, MissingExtra, SourceError
from tests.conftest import BERT_CONFIG, bert_tensors

NAME = "encoder.layer.0.attention.self.query.weight"
PATH = "model.layers.0.self_attn.q_proj"


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def torches(tensors: dict[str, np.ndarray]) -> dict[str, torch.Tensor]:
    return {name: torch.from_numpy(array.copy()) for name, array in tensors.items()}


def folder(path: Path, config: Any = BERT_CONFIG) -> Path:
    path.mkdir(parents=True)
    if config is not None:
        (path / "config.json").write_text(json.dumps(config))
    return path


def rows_of(source: Path) -> list[dict[str, Any]]:
    return [{key: value for key, value in row.items() if key != "source"} for row in qk.scan(source).rows]


def assert_equal(path: Path, tensors: dict[str, np.ndarray], names: Any = None) -> None:
    """The file holds these tensors, bit for bit, whole and by their first rows."""
    checkpoint = open_checkpoint(path)
    assert set(checkpoint.tensors) == set(tensors)
    for name in names or tensors:
        array = tensors[name]
        assert checkpoint.tensors[name].shape == array.shape
        got = checkpoint.read(name)
        assert got.dtype == array.dtype
        np.testing.assert_array_equal(got.view(np.uint8), np.ascontiguousarray(array).view(np.uint8))
        for rows in (1, 2, len(array), len(array) + 5):
            head = np.ascontiguousarray(checkpoint.read(name, rows))
            np.testing.assert_array_equal(
                head.view(np.uint8), np.ascontiguousarray(array[:rows]).view(np.uint8)
            )


# ---- PyTorch files


@pytest.mark.parametrize("suffix", ["bin", "pt", "pth", "ckpt"])
@pytest.mark.parametrize("zipped", [True, False])
def test_a_pytorch_file_gives_the_rows_of_the_same_safetensors(suffix, zipped, bert, tmp_path):
    tensors = bert_tensors(rng())
    path = folder(tmp_path / "other")
    torch.save(torches(tensors), path / f"x.{suffix}", _use_new_zipfile_serialization=zipped)
    assert_equal(path / f"x.{suffix}", tensors)
    assert rows_of(path) == rows_of(bert)


@pytest.mark.parametrize("zipped", [True, False])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_a_pytorch_file_keeps_types_strides_and_shared_storages(dtype, zipped, tmp_path):
    whole = torch.randn(9, 5, dtype=torch.float64).to(dtype)
    state = {
        "plain": whole,
        "turned": whole.t(),
        "inside": whole[2:6, 1:4],
        "every_other": whole[::2],
        "again": whole,
        "parameter": torch.nn.Parameter(whole.clone()),
        "one_row": whole[3:4],
        "repeated": whole[:1].expand(4, 5),
        "empty": whole[:0],
    }
    path = tmp_path / "x.pt"
    torch.save(state, path, _use_new_zipfile_serialization=zipped)
    checkpoint = open_checkpoint(path)
    for name, tensor in state.items():
        for rows in (None, 1, 3):
            got = checkpoint.read(name, rows).astype(np.float64)
            np.testing.assert_array_equal(got, tensor.detach().double().numpy()[:rows], err_msg=name)


def test_bytes_read_of_a_zip_are_pickle_directory_and_tensors_handed_out(tmp_path):
    path = tmp_path / "x.bin"
    torch.save({"big": torch.zeros(1000, 1000), "small": torch.ones(4, 6)}, path)
    checkpoint = open_checkpoint(path)
    opened = checkpoint.bytes_read
    assert opened < 5_000
    checkpoint.read("small")
    checkpoint.read("big", 3)
    assert checkpoint.bytes_read - opened == 4 * 6 * 4 + 3 * 1000 * 4


def test_the_map_of_a_large_file_is_dropped_as_it_goes(monkeypatch, tmp_path):
    path = tmp_path / "x.bin"
    tensors = {f"t{i}": rng(i).normal(size=(8, 8)) for i in range(6)}
    torch.save(torches(tensors), path)
    loads = []
    real = pickled._load
    monkeypatch.setattr(pickled, "REMAP_BYTES", 1000)
    monkeypatch.setattr(pickled, "_load", lambda *a: loads.append(1) or real(*a))
    assert_equal(path, tensors)
    assert len(loads) > 6


@pytest.mark.parametrize("zipped", [True, False])
@pytest.mark.parametrize("files", [2, 3])
def test_files_that_are_read_in_turns_are_loaded_once(zipped, files, monkeypatch, tmp_path):
    tensors = bert_tensors(rng(), 4)
    parts = [
        dict(list(tensors.items())[i::files]) for i in range(files)
    ]  # a layer's Q and K in different files
    path = folder(tmp_path / "m", BERT_CONFIG | {"num_hidden_layers": 4})
    for i, part in enumerate(parts):
        file = path / f"model-{i + 1:05d}-of-{files:05d}.bin"
        torch.save(torches(part), file, _use_new_zipfile_serialization=zipped)
    loads, most = [], []
    real = pickled._load
    monkeypatch.setattr(pickled, "_load", lambda *a: loads.append(a[0]) or real(*a))
    checkpoint: Any = open_checkpoint(path)
    for name, tensor in tensors.items():
        np.testing.assert_array_equal(checkpoint.read(name), tensor)
        most.append(len(checkpoint._states))
    assert max(most) == (files if zipped else 2)
    if zipped or files == 2:
        assert len(loads) == files
    assert rows_of(path)


def test_what_a_plan_reads_again_is_held_within_bounds_and_let_go(tmp_path):
    from qkform.checkpoints.kept import Kept

    fetched = []

    def read(kept, name, rows=None):
        def fetch(n):
            fetched.append((name, n))
            return np.arange(10.0)[:n]

        return kept.read((name, rows), fetch)

    kept = Kept(200)
    needs = [("a", 3), ("b", None), ("a", None), ("b", None), ("c", None), ("a", 5)]
    left = kept.plan(needs, lambda need: 80 if need[0] != "c" else None)
    assert left == [("a", None), ("b", None), None, None, ("c", None), None]
    for name, rows in needs:
        np.testing.assert_array_equal(read(kept, name, rows), np.arange(10.0)[:rows])
    assert fetched == [("a", None), ("b", None), ("c", None)]
    assert not kept._held
    kept.plan([(name, None) for name in "abcd" for _ in range(3)], lambda need: 80)
    for name in "abcdabcd":  # otherwise than planned, and never to the end
        read(kept, name)
        assert len(kept._held) <= 2
    assert kept.plan([("a", None)] * 2, lambda need: 201) == [("a", None)] * 2  # too large to be held


WRAPPED = {
    "state_dict": lambda s: {"state_dict": s, "epoch": 3, "hyper_parameters": {"lr": 0.1}},
    "model": lambda s: {
        "model": s,
        "optimizer": {"state": {0: {"step": torch.ones(1)}}, "param_groups": [{}]},
    },
    "model_state_dict": lambda s: {"model_state_dict": s, "loss": 0.5},
    "module": lambda s: {"module": OrderedDict(s), "client_state": None},
    "lightning": lambda s: {
        "state_dict": OrderedDict(s),
        "hyper_parameters": {
            "lr": 0.1,
            "betas": (0.9, 0.99),
            "sizes": [1, 2],
            "seed": 10**30,
            "name": "\u4e00",
        },
        "callbacks": {("a", 1): {3, 4}, 0.5: b"\xff\0", 7: bytearray(b"abc"), "n": Counter([1, 1])},
        "types": [
            torch.float16,
            torch.device("cpu"),
            torch.Size([2]),
            1 + 2j,
            None,
            True,
            torch.eye(2).to_sparse(),
        ],
        "rng": [torch.get_rng_state(), torch.nn.Parameter(torch.ones(2)), torch.empty(2, device="meta")],
    },
    "twice": lambda s: {"checkpoint": 1, "model": {"state_dict": s}},
}


@pytest.mark.parametrize("case", WRAPPED)
def test_the_models_tensors_are_found_in_a_trainers_checkpoint(case, tmp_path):
    tensors = bert_tensors(rng())
    for zipped in (True, False):
        state = WRAPPED[case](torches(tensors))
        torch.save(state, tmp_path / "x.ckpt", _use_new_zipfile_serialization=zipped)
        assert_equal(tmp_path / "x.ckpt", tensors)


def test_entries_that_are_no_tensors_are_left_out(tmp_path):
    torch.save({"w": torch.ones(2, 2), "step": 3, "names": ["a"], 7: torch.ones(1), "sub": {"v": torch.ones(3)}},
               tmp_path / "x.pt")  # fmt: skip
    assert set(open_checkpoint(tmp_path / "x.pt").tensors) == {"w", "sub.v"}


class Odd(torch.Tensor):
    pass


@pytest.mark.filterwarnings("ignore")  # torch gives up its quantised types
def test_tensors_without_plain_numbers_are_listed_and_refused_by_name(tmp_path):
    state = {
        "meta": torch.empty(2, 2, device="meta"),
        "sparse": torch.eye(3).to_sparse(),
        "quantised": torch.quantize_per_tensor(torch.ones(2, 2), 0.1, 0, torch.qint8),
        "complex": torch.ones(2, 2, dtype=torch.complex64),
        "bool": torch.ones(2, 2, dtype=torch.bool),
        "int": torch.ones(2, 2, dtype=torch.int64),
        "fine": torch.ones(2, 2),
    }
    torch.save(state, tmp_path / "x.pt")
    checkpoint = open_checkpoint(tmp_path / "x.pt")
    assert set(checkpoint.tensors) == set(state)
    for name in set(state) - {"fine"}:
        with pytest.raises(CheckpointError, match=name):
            checkpoint.read(name)
    assert checkpoint.read("fine").sum() == 4


def test_shards_are_read_by_their_index_and_a_missing_one_is_named(bert, tmp_path):
    tensors = bert_tensors(rng())
    path = folder(tmp_path / "sharded")
    halves = list(tensors)[:5], list(tensors)[5:]
    places = {}
    for i, names in enumerate(halves):
        shard = f"pytorch_model-0000{i + 1}-of-00002.bin"
        torch.save(torches({n: tensors[n] for n in names}), path / shard)
        places |= dict.fromkeys(names, shard)
    assert_equal(path, tensors)  # a whole set needs no index
    (path / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": places}))
    assert_equal(path, tensors)
    assert rows_of(path) == rows_of(bert)
    (path / "pytorch_model-00002-of-00002.bin").unlink()
    with pytest.raises(CheckpointError, match=r"pytorch_model-00002-of-00002\.bin.*incomplete"):
        open_checkpoint(path)


def test_without_torch_the_extra_is_named(monkeypatch, tmp_path):
    torch.save({"w": torch.ones(2, 2)}, tmp_path / "x.bin")
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(MissingExtra, match=r'pip install "qkform\[torch\]"'):
        open_checkpoint(tmp_path / "x.bin")


def test_other_formats_do_not_import_torch(bert, tmp_path):
    np.savez(tmp_path / "x.npz", w=np.ones((2, 2)))
    code = (
        "import sys, qkform; from pathlib import Path; from qkform.checkpoints import open_checkpoint\n"
        f"qkform.scan({str(bert)!r}); open_checkpoint(Path({str(tmp_path / 'x.npz')!r}))\n"
        "print([m for m in ('torch', 'onnx', 'transformers', 'huggingface_hub') if m in sys.modules])"
    )
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert said.strip() == "[]"


def test_rxnmapper_is_one_row_for_twelve_layers(monkeypatch):
    try:
        samples.fetch("rxnmapper")
    except SourceError as error:
        pytest.skip(f"rxnmapper is not to be had here: {error}")
    command = [sys.executable, "-m", "qkform", "scan", "sample:rxnmapper", "--format", "json", "-q"]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    model = json.loads(said)["models"][0]
    layers = [row for row in model["rows"] if row["head"] is None]
    assert (model["model_type"], model["format"], len(layers)) == ("albert", "pytorch", 1)
    assert layers[0]["shared_by"] == list(range(12))
    assert layers[0]["symmetry"] == pytest.approx(0.583, abs=5e-4)


# ---- npz


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_an_npz_gives_the_rows_of_the_same_safetensors(save, bert, tmp_path):
    tensors = bert_tensors(rng())
    path = folder(tmp_path / "other")
    save(path / "model.npz", **tensors)
    assert_equal(path / "model.npz", tensors)
    assert rows_of(path) == rows_of(bert)


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_an_npz_keeps_types_orders_and_names(save, tmp_path):
    array = rng().normal(size=(7, 5))
    tensors = {
        "a/b.c": array.astype(np.float16),
        "columns": np.asfortranarray(array),
        "big": array.astype(">f4"),
        "big columns": np.asfortranarray(array.astype(">f8")),
        "flat": array[0].astype(np.float32),
    }
    save(tmp_path / "x.npz", **tensors)
    checkpoint = open_checkpoint(tmp_path / "x.npz")
    assert set(checkpoint.tensors) == set(tensors)
    for name, array in tensors.items():
        for rows in (None, 1, 4):
            np.testing.assert_array_equal(checkpoint.read(name, rows), array[:rows], err_msg=name)


def test_of_a_stored_npz_only_headers_and_asked_rows_are_read(tmp_path):
    np.savez(tmp_path / "x.npz", big=np.zeros((1000, 1000)), small=np.ones((4, 6)))
    checkpoint = open_checkpoint(tmp_path / "x.npz")
    opened = checkpoint.bytes_read
    assert opened < 2_000
    checkpoint.read("big", 2)
    assert checkpoint.bytes_read - opened < 2 * 8000 + 100


def test_arrays_that_are_no_floats_are_listed_and_refused_by_name(tmp_path):
    np.savez(
        tmp_path / "x.npz",
        objects=np.array([{}, []], dtype=object),
        records=np.zeros(2, dtype=[("a", "f4")]),
        words=np.array(["a", "b"]),
        whole=np.arange(3),
        fine=np.ones((2, 2)),
    )
    checkpoint = open_checkpoint(tmp_path / "x.npz")
    for name in ("objects", "records", "words", "whole"):
        with pytest.raises(CheckpointError, match=name):
            checkpoint.read(name)
    assert checkpoint.read("fine").sum() == 4


def test_a_single_array_says_how_to_save_several(tmp_path):
    np.save(tmp_path / "x.npy", np.ones((2, 2)))
    with pytest.raises(SourceError, match=r"numpy\.savez"):
        open_checkpoint(tmp_path / "x.npy")
    (tmp_path / "x.npy").rename(tmp_path / "x.npz")
    with pytest.raises(SourceError, match=r"numpy\.savez"):
        open_checkpoint(tmp_path / "x.npz")


# ---- names


PREFIXED = [
    "_orig_mod.{}",
    "module.{}",
    "module._orig_mod.{}",
    "_forward_module._fsdp_wrapped_module.{}",
    "_fsdp_wrapped_module._checkpoint_wrapped_module._orig_mod.{}",
]


@pytest.mark.parametrize("write", ["safetensors", "bin", "npz", "gguf"])
@pytest.mark.parametrize("prefix", PREFIXED)
def test_wrapper_prefixes_are_stripped_in_every_format(prefix, write, tmp_path):
    tensors = bert_tensors(rng())
    inside = {
        prefix.format(n.replace(".attention.", "._checkpoint_wrapped_module.attention._orig_mod.")): t
        for n, t in tensors.items()
    }
    path = tmp_path / f"x.{write}"
    if write == "gguf":
        writer = gguf.GGUFWriter(path, "bert")
        for name, tensor in inside.items():
            writer.add_tensor(name, tensor)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
    else:
        save: Any = {"safetensors": save_file, "bin": lambda t, p: torch.save(torches(t), p),
                     "npz": lambda t, p: np.savez(p, **t)}  # fmt: skip
        save[write](inside, path)
    assert_equal(path, tensors)


def test_a_module_called_module_stays_where_stripping_would_make_two_names_one(tmp_path):
    tensors = {
        f"_orig_mod.{n}": np.full((2, 2), i, np.float32)
        for i, n in enumerate(("a.w", "a.module.w", "a.module.v"))
    }
    save_file(tensors, tmp_path / "x.safetensors")
    checkpoint = open_checkpoint(tmp_path / "x.safetensors")
    assert set(checkpoint.tensors) == {"a.w", "a.module.w", "a.module.v"}
    assert [checkpoint.read(n)[0, 0] for n in ("a.w", "a.module.w")] == [0, 1]
    save_file({"a.w": np.ones(2), "_orig_mod.a.w": np.zeros(2)}, tmp_path / "y.safetensors")
    assert set(open_checkpoint(tmp_path / "y.safetensors").tensors) == {"a.w", "_orig_mod.a.w"}


def test_a_plan_reaches_the_file_under_the_files_names(tmp_path):
    save_file({"module.a.w": np.ones((2, 2))}, tmp_path / "x.safetensors")
    checkpoint: Any = open_checkpoint(tmp_path / "x.safetensors")
    planned: list[Any] = []
    checkpoint.base.plan = planned.extend
    checkpoint.plan([("a.w", 1)])
    assert planned == [("module.a.w", 1)]


@pytest.mark.parametrize("new", [True, False])
def test_weight_norm_is_computed_as_torch_does(new, tmp_path):
    torch.manual_seed(0)
    layer = torch.nn.Linear(5, 7)
    with pytest.warns() if not new else _nothing():
        norm = torch.nn.utils.parametrizations.weight_norm if new else torch.nn.utils.weight_norm
        layer = norm(layer)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.mul_(1.7)
    layer(torch.ones(1, 5))  # the older one computes its weight here
    save_torch({f"q.{n}": t.clone() for n, t in layer.state_dict().items()}, tmp_path / "x.safetensors")
    checkpoint = open_checkpoint(tmp_path / "x.safetensors")
    assert set(checkpoint.tensors) == {"q.weight", "q.bias"}
    want = layer.weight.detach().numpy()
    for rows in (None, 3):
        np.testing.assert_allclose(checkpoint.read("q.weight", rows), want[:rows], rtol=2e-7 * 5)


def _nothing():
    from contextlib import nullcontext

    return nullcontext()


class Symmetric(torch.nn.Module):
    """A parametrisation without tensors of its own: its file names what a kept weight would."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.triu() + x.triu(1).T


def _symmetric(layer: torch.nn.Linear) -> None:
    torch.nn.utils.parametrize.register_parametrization(layer, "weight", Symmetric())


PARAMETRISED = {
    "symmetric": _symmetric,
    "orthogonal": lambda layer: torch.nn.utils.parametrizations.orthogonal(layer, use_trivialization=False),
    "orthogonal with a base": torch.nn.utils.parametrizations.orthogonal,
    "spectral": torch.nn.utils.parametrizations.spectral_norm,
}


@pytest.mark.parametrize("case", PARAMETRISED)
def test_a_parametrised_weight_is_never_taken_for_its_original(case, tmp_path):
    layer = torch.nn.Linear(4, 4)
    PARAMETRISED[case](layer)
    state = {f"q.{name}": tensor.contiguous() for name, tensor in layer.state_dict().items()}
    assert "q.parametrizations.weight.original" in state
    save_torch(state, tmp_path / "x.safetensors")
    checkpoint = open_checkpoint(tmp_path / "x.safetensors")
    assert set(checkpoint.tensors) == {"q.weight", "q.bias"}
    assert checkpoint.read("q.bias").shape == (4,)
    with pytest.raises(CheckpointError, match=r"q\.weight.*parametrized.*remove_parametrizations"):
        checkpoint.read("q.weight")


@pytest.mark.parametrize("parts", [("weight_g", "weight_v"), ("parametrizations.weight.original",)])
def test_a_weight_beside_what_it_is_computed_from_is_refused(parts, tmp_path):
    save_file({f"q.{name}": np.ones((3, 3)) for name in ("weight", *parts)}, tmp_path / "x.safetensors")
    checkpoint = open_checkpoint(tmp_path / "x.safetensors")
    assert set(checkpoint.tensors) == {"q.weight"}
    with pytest.raises(CheckpointError, match="which of the two"):
        checkpoint.read("q.weight")


# ---- quantised weights: each packed here by hand, from its format's description


def grid(shape: tuple[int, ...], levels: int, seed: int = 0) -> np.ndarray:
    return rng(seed).integers(0, levels, size=shape)


def save_quantised(path: Path, tensors: dict[str, np.ndarray], settings: dict[str, Any] | None = None) -> Any:
    """A model folder, and its checkpoint."""
    folder(path, {"model_type": "llama", **({"quantization_config": settings} if settings else {})})
    save_torch({n: _torch(a) for n, a in tensors.items()}, path / "model.safetensors")
    return open_checkpoint(path)


def _torch(array: np.ndarray) -> torch.Tensor:
    if array.dtype == ml_dtypes.float8_e4m3fn:
        return torch.from_numpy(array.view(np.uint8).copy()).view(torch.float8_e4m3fn)
    if array.dtype == ml_dtypes.float8_e5m2:
        return torch.from_numpy(array.view(np.uint8).copy()).view(torch.float8_e5m2)
    if array.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(array.view(np.int16).copy()).view(torch.bfloat16)
    return torch.from_numpy(np.array(array))


def assert_weight(checkpoint: Any, want: np.ndarray, *, others: set[str] = set()) -> None:  # noqa: B006
    """One weight under its own name, its shape, and its values: all of it and its first rows."""
    name = f"{PATH}.weight"
    assert set(checkpoint.tensors) == {name, *others}
    assert checkpoint.tensors[name].shape == want.shape
    for rows in (None, 1, 3, 8, 130, len(want) + 1):
        got = checkpoint.read(name, rows)
        assert got.dtype == np.float32
        np.testing.assert_allclose(got, want[:rows], rtol=1e-6, atol=0, err_msg=str(rows))


@pytest.mark.parametrize("kind", [ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2])
@pytest.mark.parametrize(
    "form", ["blocks", "blocks of the config", "scalar", "one", "rows", "rows, flat", "groups"]
)
def test_fp8_is_code_times_scale(kind, form, tmp_path):
    out, inner = 200, 260  # no multiples of a block
    code = rng().normal(size=(out, inner)).astype(kind)
    wide = code.astype(np.float64)
    settings: dict[str, Any] = {"quant_method": "fp8"}
    name = "weight_scale"
    if form.startswith("blocks"):
        name, high, broad = "weight_scale_inv", 128, 128
        if form != "blocks":
            high, broad = 64, 32
            settings["weight_block_size"] = [high, broad]
        scale = rng(1).uniform(0.5, 2, size=(-(-out // high), -(-inner // broad)))
        want = np.array(
            [
                [wide[i, j] * np.float32(scale[i // high, j // broad]) for j in range(inner)]
                for i in range(out)
            ]
        )
    else:
        shape = {"scalar": (), "one": (1,), "rows": (out, 1), "rows, flat": (out,), "groups": (out, 13)}[form]
        scale = np.asarray(rng(1).uniform(0.5, 2, size=shape))
        full = np.repeat(scale, 20, axis=1) if form == "groups" else scale.reshape(-1, 1)
        want = wide * full.astype(np.float32)
    tensors = {
        f"{PATH}.weight": code,
        f"{PATH}.{name}": scale.astype(np.float32),
        f"{PATH}.bias": np.ones(out),
    }
    assert_weight(save_quantised(tmp_path / "m", tensors, settings), want, others={f"{PATH}.bias"})


def test_fp8_without_a_scale_or_with_one_of_the_wrong_shape_is_refused_by_name(tmp_path):
    code = np.ones((200, 260), ml_dtypes.float8_e4m3fn)
    checkpoint = save_quantised(tmp_path / "a", {f"{PATH}.weight": code})
    with pytest.raises(CheckpointError, match=r"q_proj\.weight.*F8_E4M3"):
        checkpoint.read(f"{PATH}.weight")
    for i, shape in enumerate([(3, 2), (2, 2), (260,), (1, 260), (2, 3, 1)]):
        tensors = {f"{PATH}.weight": code, f"{PATH}.weight_scale_inv": np.ones(shape, np.float32)}
        checkpoint = save_quantised(tmp_path / f"b{i}", tensors)
        with pytest.raises(CheckpointError, match=r"q_proj\.weight.*weight_scale_inv has shape"):
            checkpoint.read(f"{PATH}.weight")


FP8_KIND = ml_dtypes.float8_e4m3fn
QUANTISED: dict[str, dict[str, Any]] = {
    "fp8": {"weight": np.ones((8, 16), FP8_KIND), "weight_scale": np.ones((8, 1), np.float32)},
    "fp8, blocks": {"weight": np.ones((8, 16), FP8_KIND), "weight_scale_inv": np.ones((1, 1), np.float32)},
    "int8": {
        "weight": np.ones((8, 16), np.int8),
        "SCB": np.ones(8, np.float32),
        "weight_format": np.zeros(1, np.uint8),
    },
    "gptq": {
        "qweight": np.ones((2, 8), np.int32),
        "qzeros": np.ones((1, 1), np.int32),
        "scales": np.ones((1, 8), np.float16),
        "g_idx": np.zeros(16, np.int32),
    },
    "awq": {
        "qweight": np.ones((16, 1), np.int32),
        "qzeros": np.ones((1, 1), np.int32),
        "scales": np.ones((1, 8), np.float16),
    },
    "compressed-tensors": {
        "weight_packed": np.ones((8, 2), np.int32),
        "weight_scale": np.ones((8, 1), np.float16),
        "weight_shape": np.array([8, 16]),
    },
    "bitsandbytes": {
        "weight": np.ones((64, 1), np.uint8),
        "weight.absmax": np.ones(2, np.float32),
        "weight.quant_map": np.ones(16, np.float32),
        "weight.quant_state.bitsandbytes__nf4": np.frombuffer(
            b'{"shape": [8, 16], "blocksize": 64}', np.uint8
        ),
    },
}


@pytest.mark.parametrize("case", QUANTISED)
def test_no_shape_of_a_part_loses_the_model_or_leaves_our_errors(case, tmp_path):
    parts = QUANTISED[case]
    settings = {"bits": 4, "config_groups": {"0": {"weights": {"num_bits": 4}}}}
    checkpoint = save_quantised(tmp_path / "m", {f"{PATH}.{n}": t for n, t in parts.items()}, settings)
    assert checkpoint.read(f"{PATH}.weight").shape == (8, 16)
    refusals = 0
    for part, array in parts.items():
        for shape in ((), (0,), (0, 0), (8, 0), (0, 16), (16, 0), (1, 1, 1), (2, 1, 8), (7,), (3, 5)):
            tensors = {f"{PATH}.{n}": t for n, t in parts.items()} | {"fine.weight": np.ones((2, 2))}
            tensors[f"{PATH}.{part}"] = np.ones(shape, array.dtype)
            where = tmp_path / f"{part}{shape}"
            checkpoint = save_quantised(where, tensors, settings)
            assert checkpoint.read("fine.weight").sum() == 4
            said = ""
            try:
                checkpoint.read(f"{PATH}.weight")
            except CheckpointError as error:
                said = str(error)
            refusals += PATH in said
            assert not said or PATH in said
    assert refusals >= 10


def test_bitsandbytes_codes_of_no_axis_are_refused_by_name(tmp_path):
    state = np.frombuffer(b'{"shape": [1, 1], "blocksize": 64}', np.uint8)
    parts = QUANTISED["bitsandbytes"] | {"weight.quant_state.bitsandbytes__nf4": state}
    parts |= {"weight": np.ones((), np.uint8), "weight.absmax": np.ones(1, np.float32)}
    checkpoint = save_quantised(tmp_path / "m", {f"{PATH}.{n}": t for n, t in parts.items()})
    with pytest.raises(CheckpointError, match=rf"{PATH}.*one column"):
        checkpoint.read(f"{PATH}.weight")


def test_a_row_of_fp8_reads_a_row_and_its_scales(tmp_path):
    tensors = {
        f"{PATH}.weight": np.ones((512, 1024), ml_dtypes.float8_e4m3fn),
        f"{PATH}.weight_scale_inv": np.ones((4, 8), np.float32),
    }
    checkpoint = save_quantised(tmp_path / "m", tensors)
    opened = checkpoint.bytes_read
    checkpoint.read(f"{PATH}.weight", 129)
    assert checkpoint.bytes_read - opened == 129 * 1024 + 2 * 8 * 4
    planned: list[Any] = []
    checkpoint.base.plan = planned.extend
    checkpoint.plan([(f"{PATH}.weight", 129)])
    assert planned == [(f"{PATH}.weight", 129), (f"{PATH}.weight_scale_inv", 2)]


def test_fp8_in_a_pytorch_file_is_read_alike(tmp_path):
    code, scale = rng().normal(size=(4, 6)).astype(ml_dtypes.float8_e4m3fn), np.full((1, 1), 0.5, np.float32)
    torch.save(
        {f"module.{PATH}.weight": _torch(code), f"module.{PATH}.weight_scale_inv": _torch(scale)},
        tmp_path / "x.pt",
    )
    assert_weight(open_checkpoint(tmp_path / "x.pt"), code.astype(np.float64) * 0.5)


@pytest.mark.parametrize("layout", [None, 0, 1])
def test_bitsandbytes_int8_is_code_times_scale_over_127(layout, tmp_path):
    code, scale = (
        rng().integers(-127, 128, size=(9, 6)).astype(np.int8),
        rng(1).uniform(1, 3, 9).astype(np.float32),
    )
    tensors = {f"{PATH}.weight": code, f"{PATH}.SCB": scale}
    if layout is not None:
        tensors[f"{PATH}.weight_format"] = np.array(layout, np.uint8)
    checkpoint = save_quantised(tmp_path / "m", tensors)
    if layout == 1:
        with pytest.raises(CheckpointError, match="tiles"):
            checkpoint.read(f"{PATH}.weight")
    else:
        assert_weight(checkpoint, code.astype(np.float64) * scale[:, None].astype(np.float64) / 127)


def test_int8_with_a_weight_scale_is_read_and_with_a_zero_point_refused(tmp_path):
    code, scale = (
        rng().integers(-127, 128, size=(9, 6)).astype(np.int8),
        rng(1).uniform(1, 3, (9, 1)).astype(np.float32),
    )
    tensors = {f"{PATH}.weight": code, f"{PATH}.weight_scale": scale}
    assert_weight(save_quantised(tmp_path / "m", tensors), code * scale.astype(np.float64))
    tensors[f"{PATH}.weight_zero_point"] = np.zeros((9, 1), np.int8)
    with pytest.raises(CheckpointError, match=r"q_proj\.weight.*zero point.*compressed-tensors"):
        save_quantised(tmp_path / "z", tensors).read(f"{PATH}.weight")


def pack(values: np.ndarray, bits: int, order: list[int] | None = None) -> np.ndarray:
    """Rows of codes -> rows of int32: code number order[j] of each word at bit j * bits."""
    n = 32 // bits
    rows, columns = values.shape
    words = np.zeros((rows, columns // n), np.uint64)
    for row in range(rows):
        for word in range(columns // n):
            for j in range(n):
                which = j if order is None else order[j]
                words[row, word] |= np.uint64(int(values[row, word * n + which]) << (j * bits))
    return words.astype(np.uint32).view(np.int32)


GPTQ_CASES = [
    (bits, version, act_order, told)
    for bits, version, act_order in [
        (4, "v1", True),
        (4, "v1", False),
        (4, "v2", True),
        (8, "v1", True),
        (2, "v1", True),
    ]
    for told in ([True, False] if version == "v1" else [True])  # only the config says that it is version 2
]


@pytest.mark.parametrize(("bits", "version", "act_order", "told"), GPTQ_CASES)
def test_gptq_is_scale_times_code_minus_zero(bits, version, act_order, told, tmp_path):
    inner, out, groups = 64, 48, 4
    code, zero = grid((inner, out), 2**bits), grid((groups, out), 2**bits - 1, 1) + 1
    scale = rng(2).uniform(0.01, 0.1, size=(groups, out)).astype(np.float16)
    index = rng(3).permutation(np.arange(inner) // 16) if act_order else np.arange(inner) // 16
    want = np.array(
        [
            [float(scale[index[i], o]) * (code[i, o] - zero[index[i], o]) for i in range(inner)]
            for o in range(out)
        ]
    )
    tensors = {
        f"{PATH}.qweight": np.ascontiguousarray(pack(code.T, bits).T),
        f"{PATH}.qzeros": pack(zero - 1 if version == "v1" else zero.clip(0, 2**bits - 1), bits),
        f"{PATH}.scales": scale,
        f"{PATH}.bias": np.ones(out, np.float16),
    }
    if act_order or not told:
        tensors[f"{PATH}.g_idx"] = index.astype(np.int32)
    settings = {"quant_method": "gptq", "bits": bits, "group_size": 16}
    if version == "v2":
        settings["checkpoint_format"] = "gptq_v2"
        want_zero = zero.clip(0, 2**bits - 1)
        want = (scale[index].astype(np.float64) * (code - want_zero[index])).T
    checkpoint = save_quantised(tmp_path / "m", tensors, settings if told else None)
    assert_weight(checkpoint, want, others={f"{PATH}.bias"})


def test_gptq_whose_zero_point_means_two_things_is_refused(tmp_path):
    tensors = {
        f"{PATH}.qweight": pack(grid((8, 8), 16), 4).reshape(1, 8),
        f"{PATH}.qzeros": pack(np.full((1, 8), 15), 4),
        f"{PATH}.scales": np.ones((1, 8), np.float16),
    }
    checkpoint = save_quantised(tmp_path / "m", tensors, {"quant_method": "gptq", "bits": 4})
    with pytest.raises(CheckpointError, match=r"qzeros.*16 or 0"):
        checkpoint.read(f"{PATH}.weight")


@pytest.mark.parametrize(
    "others", [("weight", "qweight"), ("qweight", "weight_packed"), ("weight", "weight_packed")]
)
def test_two_tensors_that_stand_for_one_weight_are_refused_by_name(others, tmp_path):
    for turn in (others, others[::-1]):
        tensors = {
            f"{PATH}.{name}": np.ones((8, 8), np.float32 if name == "weight" else np.int32) for name in turn
        }
        checkpoint = save_quantised(tmp_path / turn[0], tensors | {"fine.weight": np.ones((2, 2))})
        assert checkpoint.read("fine.weight").sum() == 4
        with pytest.raises(
            CheckpointError, match=rf"{turn[0]}.*both stand for one|{turn[1]}.*both stand for one"
        ):
            checkpoint.read(f"{PATH}.weight")


@pytest.mark.parametrize("told", [True, False])
def test_awq_is_scale_times_code_minus_zero_in_its_own_order(told, tmp_path):
    inner, out, groups = 24, 32, 3
    code, zero = grid((inner, out), 16), grid((groups, out), 16, 1)
    scale = rng(2).uniform(0.01, 0.1, size=(groups, out)).astype(np.float16)
    order = [0, 2, 4, 6, 1, 3, 5, 7]
    tensors = {
        f"{PATH}.qweight": pack(code, 4, order),
        f"{PATH}.qzeros": pack(zero, 4, order),
        f"{PATH}.scales": scale,
    }
    want = np.array(
        [[float(scale[i // 8, o]) * (code[i, o] - zero[i // 8, o]) for i in range(inner)] for o in range(out)]
    )
    settings = {"quant_method": "awq", "bits": 4, "group_size": 8, "version": "gemm"}
    assert_weight(save_quantised(tmp_path / "m", tensors, settings if told else None), want)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("groups", [1, 4])
def test_compressed_tensors_pack_quantized(bits, groups, tmp_path):
    out, inner = 10, 64
    code = grid((out, inner), 2**bits) - 2 ** (bits - 1)  # signed
    scale = rng(2).uniform(0.01, 0.1, size=(out, groups)).astype(ml_dtypes.bfloat16)
    tensors = {
        f"{PATH}.weight_packed": pack(code + 2 ** (bits - 1), bits),
        f"{PATH}.weight_scale": scale,
        f"{PATH}.weight_shape": np.array([out, inner]),
    }
    settings = {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {"group_0": {"weights": {"num_bits": bits, "symmetric": True}}},
    }
    want = code * np.repeat(scale.astype(np.float64), inner // groups, axis=1)
    assert_weight(save_quantised(tmp_path / "m", tensors, settings), want)
    tensors[f"{PATH}.weight_zero_point"] = np.zeros((2, groups), np.int32)
    with pytest.raises(CheckpointError, match=r"weight_packed.*weight_zero_point.*compressed-tensors"):
        save_quantised(tmp_path / "z", tensors, settings).read(f"{PATH}.weight")


@pytest.mark.parametrize("kind", ["nf4", "fp4"])
@pytest.mark.parametrize("nested", [True, False])
def test_bitsandbytes_4bit_is_table_times_scale(kind, nested, tmp_path):
    out, inner, block, outer = 13, 72, 64, 4  # 936 weights: a short last block, and short outer ones
    code = grid((out * inner,), 16)
    table = np.sort(rng(1).uniform(-1, 1, 16)).astype(np.float32)
    n = -(-code.size // block)
    state: dict[str, Any] = {
        "quant_type": kind,
        "blocksize": block,
        "dtype": "bfloat16",
        "shape": [out, inner],
    }
    tensors = {
        f"{PATH}.weight": (code[0::2] << 4 | code[1::2]).astype(np.uint8).reshape(-1, 1),
        f"{PATH}.weight.quant_map": table,
    }
    if nested:
        small, inner_table = grid((n,), 256, 2), rng(3).uniform(0, 1, 256).astype(np.float32)
        absmax = rng(4).uniform(0.1, 0.2, -(-n // outer)).astype(np.float32)
        scales = np.array([float(inner_table[small[b]]) * float(absmax[b // outer]) + 0.25 for b in range(n)])
        state |= {"nested_blocksize": outer, "nested_dtype": "float32", "nested_offset": 0.25}
        tensors |= {
            f"{PATH}.weight.absmax": small.astype(np.uint8),
            f"{PATH}.weight.nested_absmax": absmax,
            f"{PATH}.weight.nested_quant_map": inner_table,
        }
    else:
        scales = rng(4).uniform(0.1, 2, n).astype(np.float32)
        tensors[f"{PATH}.weight.absmax"] = scales
    tensors[f"{PATH}.weight.quant_state.bitsandbytes__{kind}"] = np.frombuffer(
        json.dumps(state).encode(), np.uint8
    )
    want = np.array([float(table[c]) * float(scales[i // block]) for i, c in enumerate(code)]).reshape(
        out, inner
    )
    assert_weight(save_quantised(tmp_path / "m", tensors, {"load_in_4bit": True}), want)


REFUSED = {
    "3 bits": ({"quant_method": "gptq", "bits": 3}, "gptqmodel"),
    "marlin": ({"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"}, "gptqmodel"),
    "another method": ({"quant_method": "hqq", "bits": 4}, "hqq"),
    "awq gemv": ({"quant_method": "awq", "bits": 4, "version": "gemv"}, "autoawq"),
    "contradiction": ({"quant_method": "awq", "bits": 4}, "no AWQ"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_packed_weights_of_another_kind_are_refused_with_what_reads_them(case, tmp_path):
    settings, word = REFUSED[case]
    tensors = {
        f"{PATH}.qweight": np.zeros((2, 16), np.int32),
        f"{PATH}.qzeros": np.zeros((1, 2), np.int32),
        f"{PATH}.scales": np.ones((1, 16), np.float16),
    }
    checkpoint = save_quantised(tmp_path / "m", tensors, settings)
    with pytest.raises(CheckpointError, match=rf"q_proj\.qweight.*{word}"):
        checkpoint.read(f"{PATH}.weight")


def test_a_quantised_llama_scans_as_its_floats_do(tmp_path):
    d, heads, path = 16, 4, "model.layers.0.self_attn"
    config = {"model_type": "llama", "hidden_size": d, "num_attention_heads": heads, "num_hidden_layers": 1}
    floats, quantised = {}, {}
    for i, name in enumerate(("q_proj", "k_proj")):
        code, scale = rng(i).normal(size=(d, d)).astype(ml_dtypes.float8_e4m3fn), np.float32(0.5 + i)
        floats[f"{path}.{name}.weight"] = code.astype(np.float32) * scale
        quantised |= {f"{path}.{name}.weight": code, f"{path}.{name}.weight_scale": np.array(scale)}
    plain = folder(tmp_path / "plain", config)
    save_file(floats, plain / "model.safetensors")
    other = folder(tmp_path / "fp8", config)
    save_torch({n: _torch(a) for n, a in quantised.items()}, other / "model.safetensors")
    assert rows_of(plain) == rows_of(other)


# ---- adapters, in PEFT's files


LORA = {"peft_type": "LORA", "r": 3, "lora_alpha": 6, "use_rslora": False, "fan_in_fan_out": False}
QUERY = "encoder.layer.0.attention.self.query"


def adapter_folder(
    path: Path,
    model: Path | str,
    tensors: dict[str, np.ndarray],
    *,
    suffix: str = "safetensors",
    **config: Any,
) -> Path:
    folder(path, None)
    settings = {**LORA, "base_model_name_or_path": str(model), **config}
    (path / "adapter_config.json").write_text(json.dumps(settings))
    if suffix == "bin":
        torch.save(torches(tensors), path / "adapter_model.bin")
    else:
        save_file(tensors, path / "adapter_model.safetensors")
    return path


def lora(
    module: str = QUERY, out: int = 12, inner: int = 12, r: int = 3, name: str = ""
) -> dict[str, np.ndarray]:
    return {
        f"base_model.model.{module}.lora_A{name}.weight": rng(5).normal(size=(r, inner)).astype(np.float32),
        f"base_model.model.{module}.lora_B{name}.weight": rng(6).normal(size=(out, r)).astype(np.float32),
    }


def product(tensors: dict[str, np.ndarray]) -> np.ndarray:
    a, b = list(tensors.values())[:2]
    return b.astype(np.float64) @ a.astype(np.float64)


@pytest.mark.parametrize("suffix", ["safetensors", "bin"])
@pytest.mark.parametrize("name", ["", ".default"])
@pytest.mark.parametrize(
    ("config", "scaling"),
    [
        ({}, 2.0),
        ({"use_rslora": True}, 6 / 3**0.5),
        ({"alpha_pattern": {"query": 9}}, 3.0),
        ({"alpha_pattern": {"^encoder.layer.0.attention.self.query": 9, "key": 1}}, 3.0),
        ({"alpha_pattern": {"self.key": 9, "^query": 1}}, 2.0),
        ({"r": 8, "rank_pattern": {"query": 3}}, 2.0),
    ],
)
def test_an_adapter_adds_scaled_b_a(suffix, name, config, scaling, bert, tmp_path):
    tensors = lora(name=name)
    path = adapter_folder(tmp_path / "adapter", bert, tensors, suffix=suffix, **config)
    assert is_adapter(path)
    assert not is_adapter(bert)
    before, merged = open_adapter(path)
    assert before.source == str(bert)
    assert merged.source == str(path)
    assert merged.config == before.config
    want = before.read(NAME).astype(np.float64) + scaling * product(tensors)
    for rows in (None, 1, 5):
        np.testing.assert_allclose(merged.read(NAME, rows), want[:rows], rtol=1e-5, atol=1e-6)
    for other in set(before.tensors) - {NAME}:
        np.testing.assert_array_equal(merged.read(other), before.read(other))


@pytest.mark.parametrize("wide", [True, False])
@pytest.mark.parametrize("dora", [True, False])
def test_an_adapter_of_a_conv1d_is_added_turned(wide, dora, tmp_path):
    out = 36 if wide else 12
    base_path = folder(tmp_path / "gpt2", {"model_type": "gpt2"})
    weight = rng(1).normal(size=(12, out)).astype(np.float32)  # (in, out)
    save_file({"h.0.attn.c_attn.weight": weight}, base_path / "model.safetensors")
    tensors = lora("transformer.h.0.attn.c_attn", out=out)
    want = weight.T.astype(np.float64) + 2 * product(tensors)
    if dora:
        magnitude = rng(7).uniform(1, 2, out).astype(np.float32)
        tensors["base_model.model.transformer.h.0.attn.c_attn.lora_magnitude_vector"] = magnitude
        want = magnitude[:, None] * want / np.linalg.norm(want, axis=1, keepdims=True)
    path = adapter_folder(tmp_path / "adapter", base_path, tensors, fan_in_fan_out=True, use_dora=dora)
    _, merged = open_adapter(path)
    for rows in (None, 5):
        got = merged.read("h.0.attn.c_attn.weight", rows)
        np.testing.assert_allclose(got, want.T[:rows], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("last", ["", ".weight", ".default.weight"])
def test_dora_scales_each_row_to_its_magnitude(last, bert, tmp_path):
    tensors = lora()
    magnitude = rng(7).uniform(1, 2, 12).astype(np.float32)
    tensors[f"base_model.model.{QUERY}.lora_magnitude_vector{last}"] = magnitude
    before, merged = open_adapter(adapter_folder(tmp_path / "adapter", bert, tensors, use_dora=True))
    want = before.read(NAME).astype(np.float64) + 2 * product(tensors)
    want *= magnitude[:, None] / np.linalg.norm(want, axis=1, keepdims=True)
    for rows in (None, 5):
        np.testing.assert_allclose(merged.read(NAME, rows), want[:rows], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("middle", ["", ".modules_to_save", ".modules_to_save.default"])
def test_modules_to_save_replace_the_bases(middle, bert, tmp_path):
    new = rng(8).normal(size=(12, 12)).astype(np.float32)
    key = NAME.replace("query", "key")
    tensors = lora() | {f"base_model.model.{key.removesuffix('.weight')}{middle}.weight": new}
    before, merged = open_adapter(adapter_folder(tmp_path / "adapter", bert, tensors))
    np.testing.assert_array_equal(merged.read(key, 7), new[:7])
    assert np.any(before.read(key) != new)


def test_an_adapter_without_q_and_k_leaves_them_as_they_are(bert, tmp_path):
    tensors = lora(QUERY.replace("query", "value"))
    before, merged = open_adapter(adapter_folder(tmp_path / "adapter", bert, tensors))
    np.testing.assert_array_equal(merged.read(NAME), before.read(NAME))
    value = NAME.replace("query", "value")
    assert np.any(merged.read(value) != before.read(value))


def test_a_base_is_found_beside_the_adapter_in_the_working_folder_or_on_the_hub(bert, monkeypatch, tmp_path):
    inside = adapter_folder(tmp_path / "adapter", f"../{bert.name}", lora())
    assert len(open_adapter(inside)[0].tensors) == 12
    here = adapter_folder(tmp_path / "here", bert.name, lora())
    monkeypatch.chdir(bert.parent)
    assert len(open_adapter(here)[0].tensors) == 12
    far = adapter_folder(tmp_path / "far", "org/model", lora(), revision="abc")
    with pytest.raises(SourceError, match="org/model"):
        open_adapter(far)
    asked: list[Any] = []
    base_of, _ = open_adapter(
        far, open_hub=lambda name, revision: asked.append((name, revision)) or open_checkpoint(bert)
    )
    assert asked == [("org/model", "abc")]
    assert base_of.source == str(bert)
    assert open_adapter(far, base=bert)[0].source == str(bert)


def test_the_base_may_be_quantised_and_the_names_may_lack_what_stands_in_front(tmp_path):
    code = np.ones((8, 8), ml_dtypes.float8_e4m3fn)
    save_quantised(
        tmp_path / "base",
        {"layers.0.q_proj.weight": code, "layers.0.q_proj.weight_scale": np.full(1, 0.5, np.float32)},
    )
    tensors = lora("model.layers.0.q_proj", 8, 8)
    _, merged = open_adapter(adapter_folder(tmp_path / "adapter", tmp_path / "base", tensors))
    want = 0.5 + 2 * product(tensors)
    np.testing.assert_allclose(merged.read("layers.0.q_proj.weight"), want, rtol=1e-5, atol=1e-6)


def without(tensors: dict[str, np.ndarray], word: str) -> dict[str, np.ndarray]:
    return {name: array for name, array in tensors.items() if word not in name}


BAD_ADAPTERS = {
    "another type": ({"peft_type": "LOHA"}, lora(), "LOHA"),
    "pissa": ({"init_lora_weights": "pissa_niter_16"}, lora(), "pissa"),
    "tokens": ({"alora_invocation_tokens": [1]}, lora(), "alora"),
    "replication": ({"layer_replication": [[0, 2]]}, lora(), "layer_replication"),
    "alpha a word": ({"lora_alpha": "6"}, lora(), "lora_alpha"),
    "alpha none": ({"lora_alpha": None}, lora(), "lora_alpha"),
    "alpha nan": ({"lora_alpha": float("nan")}, lora(), "lora_alpha"),
    "an expression": ({"alpha_pattern": {"(a+)+$": 3}}, lora(), "expression"),
    "pattern a list": ({"alpha_pattern": [1]}, lora(), "alpha_pattern"),
    "flag a word": ({"use_rslora": "yes"}, lora(), "use_rslora"),
    "no b": ({}, without(lora(), "lora_B"), "lora_A and lora_B"),
    "another rank": (
        {},
        lora() | {f"base_model.model.{QUERY}.lora_B.weight": np.ones((12, 4), np.float32)},
        "rank",
    ),
    "another width": ({}, lora(inner=10), "shape"),
    "not in the base": ({}, lora("decoder.layers.0.q_proj"), "another model"),
    "two adapters": ({}, lora(name=".a") | lora(name=".b"), "two adapters"),
    "two names of one module": ({}, lora() | lora(f"bert.{QUERY}"), "two adapters"),
    "a module that is saved too": (
        {},
        lora() | {f"base_model.model.{QUERY}.modules_to_save.weight": np.ones((12, 12), np.float32)},
        "two adapters",
    ),
    "two saved modules": (
        {},
        {
            f"base_model.model.{front}{QUERY}.modules_to_save.weight": np.ones((12, 12), np.float32)
            for front in ("", "bert.")
        },
        "two adapters",
    ),
    "a bias": ({}, lora() | {f"base_model.model.{QUERY}.lora_B.bias": np.ones(12, np.float32)}, "lora_bias"),
    "dora without magnitudes": ({"use_dora": True}, lora(), "lora_magnitude_vector"),
    "magnitudes of another": (
        {},
        lora() | {f"base_model.model.{QUERY}.lora_magnitude_vector": np.ones(5, np.float32)},
        "magnitudes",
    ),
    "no base": ({"base_model_name_or_path": None}, lora(), "base_model_name_or_path"),
    "base gone": ({"base_model_name_or_path": "nowhere"}, lora(), "nowhere"),
    "base with a null": ({"base_model_name_or_path": "no\0where"}, lora(), "not here"),
}


@pytest.mark.parametrize("case", BAD_ADAPTERS)
def test_what_is_not_a_sum_of_two_matrices_is_refused(case, bert, tmp_path):
    config, tensors, word = BAD_ADAPTERS[case]
    path = adapter_folder(tmp_path / "adapter", bert, tensors, **config)
    with pytest.raises((SourceError, ConfigError), match=word):
        open_adapter(path)


# ---- which file of a folder


def test_of_several_formats_safetensors_come_first_and_npz_last(tmp_path):
    tensors = bert_tensors(rng())
    path = folder(tmp_path / "m")
    np.savez(path / "model.npz", **tensors)
    assert open_checkpoint(path).format == "npz"
    writer = gguf.GGUFWriter(path / "model.gguf", "bert")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    assert open_checkpoint(path).format == "gguf"
    for name in ("training_args.bin", "optimizer.pt", "scheduler.pt", "rng_state.pth"):
        (path / name).write_bytes(b"not weights")
    assert open_checkpoint(path).format == "gguf"
    torch.save(torches(tensors), path / "pytorch_model.bin")
    torch.save({}, path / "head.pt")
    assert open_checkpoint(path).format == "pytorch"
    save_file(tensors, path / "model.safetensors")
    assert open_checkpoint(path).format == "safetensors"


@pytest.mark.parametrize("name", ["weights.h5", "flax_model.msgpack", "model.pkl", "saved_model.pb"])
def test_formats_that_are_not_read_say_so(name, tmp_path):
    path = folder(tmp_path / "m")
    (path / name).write_bytes(b"\0" * 100)
    for source in (path, path / name):
        with pytest.raises(SourceError, match=rf"{name}.*not read"):
            open_checkpoint(source)


def test_the_folder_of_a_run_says_where_its_model_is(tmp_path):
    for name in ("record.jsonl", "experiment.yaml", "probe.safetensors"):
        (tmp_path / name).write_text("")
    with pytest.raises(
        SourceError, match=r"is the folder of a run; scan the model it made, .*/model, or its checkpoints"
    ):
        qk.scan(tmp_path)
