"""Damaged and hostile input: exit code 2, one clear message, bounded time and memory, nothing half-written."""

from __future__ import annotations

import io
import json
import os
import pickle
import re
import resource
import struct
import subprocess
import sys
import tarfile
import zipfile
from collections import OrderedDict
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from qkform.checkpoints import open_checkpoint
from qkform.errors import CheckpointError
from tests.conftest import BERT_CONFIG, bert_tensors

MEMORY = 2 * 2**30  # address space for a scan of a small file; torch's libraries take 0.6 GB of it
SECONDS = 30


def scan(source, *extra, cwd, seconds=SECONDS):
    """Run the real command in its own process, with bounded memory and time."""

    def limit():
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))

    return subprocess.run(
        [sys.executable, "-m", "qkform", "scan", str(source), *extra],
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=seconds,
        preexec_fn=limit,
        env={**os.environ, "OPENBLAS_NUM_THREADS": "1"},
        check=False,
    )


def refused(source, *words, cwd, extra=()):
    """The scan fails with code 2 and one line that holds every one of `words`; nothing is left behind."""
    before = sorted(cwd.rglob("*"))
    run = scan(source, "--html", "page.html", "--out", "rows.csv", *extra, cwd=cwd)
    assert run.returncode == 2, (run.returncode, run.stdout[-500:], run.stderr[-2000:])
    lines = run.stderr.strip().splitlines()
    assert len(lines) == 1, run.stderr[-2000:]
    assert len(lines[0]) < 3000
    for word in words:
        assert word in lines[0], lines[0]
    assert "Traceback" not in run.stderr
    assert run.stdout == ""
    assert sorted(cwd.rglob("*")) == before
    return lines[0]


def raw(header: object, data: bytes = b"", *, length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model folder with a good config and whatever the test writes as model.safetensors."""
    path = tmp_path / "m"
    path.mkdir()
    (path / "config.json").write_text(json.dumps(BERT_CONFIG))
    return path


NAME = "encoder.layer.0.attention.self.query.weight"


def entry(shape, begin, end, dtype="F32"):
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


FILES = {
    "empty": (b"", "too short"),
    "a few bytes": (b"abc", "too short"),
    "header longer than the file": (raw({}, length=10**9), "truncated"),
    "header longer than any file": (raw({}, length=2**63), "truncated"),
    "not json": (raw(b"{this is no json"), "safetensors"),
    "json list": (raw([1, 2]), "safetensors"),
    "json number": (raw(b"1e999"), "safetensors"),
    "nested 200,000 deep": (raw(b'{"a":' * 200_000 + b"1" + b"}" * 200_000), "safetensors"),
    "nested lists": (raw(b"[" * 200_000), "safetensors"),
    "truncated data": (raw({NAME: entry([12, 12], 0, 576)}, b"\0" * 100), "safetensors"),
    "trailing data": (raw({NAME: entry([12, 12], 0, 576)}, b"\0" * 600), "safetensors"),
    "overlap": (raw({NAME: entry([2, 2], 0, 16), "b": entry([2, 2], 8, 24)}, b"\0" * 24), "safetensors"),
    "hole": (raw({NAME: entry([2, 2], 0, 16), "b": entry([2, 2], 24, 40)}, b"\0" * 40), "safetensors"),
    "negative offsets": (raw({NAME: entry([2, 2], -16, 0)}, b"\0" * 16), "safetensors"),
    "offsets reversed": (raw({NAME: entry([2, 2], 16, 0)}, b"\0" * 16), "safetensors"),
    "offsets outside": (raw({NAME: entry([2, 2], 2**62, 2**62 + 16)}, b"\0" * 16), "safetensors"),
    "offsets as words": (
        raw({NAME: {"dtype": "F32", "shape": [1], "data_offsets": ["a", "b"]}}),
        "safetensors",
    ),
    "absurd shape": (raw({NAME: entry([2**40, 2**40], 0, 16)}, b"\0" * 16), "safetensors"),
    "negative shape": (raw({NAME: entry([-2, -2], 0, 16)}, b"\0" * 16), "safetensors"),
    "shape against bytes": (raw({NAME: entry([3, 3], 0, 16)}, b"\0" * 16), "safetensors"),
    "unknown dtype": (raw({NAME: entry([2, 2], 0, 16, "Q7")}, b"\0" * 16), "safetensors"),
    "no tensors": (raw({}), "no tensor fits"),
    "lfs pointer": (b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 9\n", "git lfs pull"),
    "html error page": (b"<!DOCTYPE html><html><body>Not found</body></html>", "safetensors"),
    "zero sized": (
        raw({NAME: entry([0, 12], 0, 0), NAME.replace("query", "key"): entry([0, 12], 0, 0)}),
        "shape",
    ),
}


@pytest.mark.parametrize("case", FILES)
def test_a_bad_safetensors_file_is_refused(case, folder, tmp_path):
    content, word = FILES[case]
    (folder / "model.safetensors").write_bytes(content)
    refused(folder, word, "m", cwd=tmp_path)


@pytest.mark.parametrize("keep", [7, 8, 100, 1000, 2000])
def test_a_truncated_file_is_refused(keep, folder, tmp_path):
    save_file(bert_tensors(np.random.default_rng(0)), folder / "model.safetensors")
    whole = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(whole[:keep])
    refused(folder, "model.safetensors", cwd=tmp_path)


CONFIGS = {
    "not json": ("{model_type: bert", "not JSON"),
    "nested": ('{"a":' * 200_000, "JSON" if sys.version_info >= (3, 13) else "nested"),
    "a list": ("[1]", "object"),
    "not utf-8": (b"\xff\xfe\xfa", "JSON"),
    "lfs pointer": ("version https://git-lfs.github.com/spec/v1\n", "git lfs pull"),
    "no model_type": ('{"hidden_size": 12}', "no model_type"),
    "model_type a number": ({**BERT_CONFIG, "model_type": 3}, "expected a name"),
    "unknown model_type": ({"model_type": "zzz", "hidden_size": 12}, "no layout for model_type 'zzz'"),
    "another family": ({**BERT_CONFIG, "model_type": "gpt2"}, "no tensor fits"),
    "heads 0": ({**BERT_CONFIG, "num_attention_heads": 0}, "num_attention_heads is 0"),
    "heads negative": ({**BERT_CONFIG, "num_attention_heads": -3}, "num_attention_heads is -3"),
    "heads a string": ({**BERT_CONFIG, "num_attention_heads": "3"}, "num_attention_heads is '3'"),
    "heads a fraction": ({**BERT_CONFIG, "num_attention_heads": 3.0}, "num_attention_heads is 3.0"),
    "heads true": ({**BERT_CONFIG, "num_attention_heads": True}, "num_attention_heads is True"),
    "heads no divisor": ({**BERT_CONFIG, "num_attention_heads": 5}, "5"),
    "heads huge": ({**BERT_CONFIG, "num_attention_heads": 10**30}, "num_attention_heads"),
    "heads missing": ({"model_type": "bert"}, "--heads"),
    "heads a list": ({**BERT_CONFIG, "num_attention_heads": []}, "num_attention_heads"),
    "width contradicts": ({**BERT_CONFIG, "hidden_size": 16}, "hidden_size is 16"),
    "flag a word": ({**BERT_CONFIG, "is_decoder": "yes"}, "is_decoder"),
}


@pytest.mark.parametrize("case", CONFIGS)
def test_a_bad_config_is_refused(case, folder, tmp_path):
    content, word = CONFIGS[case]
    save_file(bert_tensors(np.random.default_rng(0)), folder / "model.safetensors")
    if isinstance(content, bytes):
        (folder / "config.json").write_bytes(content)
    else:
        (folder / "config.json").write_text(content if isinstance(content, str) else json.dumps(content))
    refused(
        folder, word, "config.json" if "family" not in case and "unknown" not in case else "", cwd=tmp_path
    )


def llama(d=12, heads=4, kv=2, head_dim=3):
    rng = np.random.default_rng(0)
    path = "model.layers.0.self_attn"
    return {
        f"{path}.q_proj.weight": rng.normal(size=(heads * head_dim, d)).astype(np.float32),
        f"{path}.k_proj.weight": rng.normal(size=(kv * head_dim, d)).astype(np.float32),
    }


LLAMA = {
    "model_type": "llama",
    "hidden_size": 12,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 3,
    "num_hidden_layers": 1,
}
CONTRADICTIONS = {
    "kv heads no divisor": ({"num_key_value_heads": 3}, "num_key_value_heads is 3"),
    "kv heads 0": ({"num_key_value_heads": 0}, "num_key_value_heads is 0"),
    "kv heads of another model": ({"num_key_value_heads": 4}, "k_proj.weight"),
    "head_dim of another model": ({"head_dim": 6}, "head_dim 6"),
    "heads of another model": ({"num_attention_heads": 8}, "num_attention_heads is 8"),
}


@pytest.mark.parametrize("case", CONTRADICTIONS)
def test_head_counts_that_contradict_the_shapes_are_refused(case, folder, tmp_path):
    change, word = CONTRADICTIONS[case]
    save_file(llama(), folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({**LLAMA, **change}))
    refused(folder, word, "config.json", cwd=tmp_path)


def test_a_key_matrix_of_another_width_is_refused(folder, tmp_path):
    tensors = llama()
    name = "model.layers.0.self_attn.k_proj.weight"
    tensors[name] = np.ones((6, 10), dtype=np.float32)
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(LLAMA))
    refused(folder, "k_proj.weight", "10", cwd=tmp_path)


def test_a_projection_that_is_no_matrix_is_refused(folder, tmp_path):
    tensors = bert_tensors(np.random.default_rng(0))
    tensors[NAME] = np.ones(144, dtype=np.float32)
    save_file(tensors, folder / "model.safetensors")
    refused(folder, NAME, "(144,)", cwd=tmp_path)


def test_a_bias_of_the_wrong_length_is_refused(folder, tmp_path):
    tensors = bert_tensors(np.random.default_rng(0))
    tensors[NAME.replace("weight", "bias")] = np.ones(7, dtype=np.float32)
    save_file(tensors, folder / "model.safetensors")
    refused(folder, "query.bias", "(7,)", cwd=tmp_path)


def test_integer_weights_are_refused_by_name(folder, tmp_path):
    tensors = bert_tensors(np.random.default_rng(0))
    tensors[NAME] = np.ones((12, 12), dtype=np.int8)
    save_file(tensors, folder / "model.safetensors")
    refused(folder, NAME, "I8", cwd=tmp_path)


INDEXES = {
    "missing shard": (
        {"weight_map": {NAME: "model-00002-of-00002.safetensors"}},
        "model-00002-of-00002.safetensors",
    ),
    "outside by dots": ({"weight_map": {NAME: "../secret.safetensors"}}, "plain file name"),
    "outside by root": ({"weight_map": {NAME: "/etc/hostname"}}, "plain file name"),
    "outside by backslash": ({"weight_map": {NAME: "..\\secret.safetensors"}}, "plain file name"),
    "null byte": ({"weight_map": {NAME: "a\0b"}}, "plain file name"),
    "dot": ({"weight_map": {NAME: "."}}, "plain file name"),
    "no string": ({"weight_map": {NAME: 5}}, "plain file name"),
    "no map": ({"metadata": {}}, "weight_map"),
    "a list": ([1], "weight_map"),
    "not json": ("{", "not JSON"),
    "nested": ("[" * 200_000, "index"),
    "tensor not in its shard": ({"weight_map": {"x.weight": "part.safetensors"}}, "x.weight"),
    "lfs pointer": ("version https://git-lfs.github.com/spec/v1\n", "git lfs pull"),
}


@pytest.mark.parametrize("case", INDEXES)
def test_a_bad_index_is_refused(case, folder, tmp_path):
    content, word = INDEXES[case]
    save_file(bert_tensors(np.random.default_rng(0)), folder / "part.safetensors")
    (tmp_path / "secret.safetensors").write_bytes((folder / "part.safetensors").read_bytes())
    text = content if isinstance(content, str) else json.dumps(content)
    (folder / "model.safetensors.index.json").write_text(text)
    refused(folder, word, "index.json", cwd=tmp_path)


def test_a_missing_file_is_refused(tmp_path):
    refused("nothing-here", "nothing-here", cwd=tmp_path)


def test_a_hub_id_says_how_to_fetch_it(tmp_path):
    refused("org/model", "no file or folder named 'org/model'", cwd=tmp_path)


def test_a_folder_without_weights_is_refused(tmp_path):
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "config.json").write_text("{}")
    refused("m", "no weights", cwd=tmp_path)


def test_things_that_are_no_files_are_refused_without_being_read(tmp_path):
    os.mkfifo(tmp_path / "pipe.safetensors")
    refused("pipe.safetensors", "not a regular file", cwd=tmp_path)
    refused("/dev/zero", "not a regular file", cwd=tmp_path)
    (tmp_path / "gone.safetensors").symlink_to(tmp_path / "nowhere")
    refused("gone.safetensors", "link", cwd=tmp_path)
    refused("x" * 5000, "x", cwd=tmp_path)


def test_a_config_that_is_a_pipe_is_refused(folder, tmp_path):
    (folder / "config.json").unlink()
    os.mkfifo(folder / "config.json")
    save_file(bert_tensors(np.random.default_rng(0)), folder / "model.safetensors")
    refused(folder, "config.json", cwd=tmp_path)


def test_several_models_in_one_folder_ask_for_a_name(folder, tmp_path):
    for name in ("a.safetensors", "b.safetensors"):
        save_file(bert_tensors(np.random.default_rng(0)), folder / name)
    refused(folder, "a.safetensors", "b.safetensors", cwd=tmp_path)


@pytest.mark.parametrize("junk", [b"GGUF", b"GGUF" + b"\xff" * 500, b"GGUF\x03\0\0\0" + b"\xff" * 16])
def test_garbage_gguf_is_refused(junk, tmp_path):
    (tmp_path / "bad.gguf").write_bytes(junk)
    refused("bad.gguf", "bad.gguf", cwd=tmp_path)


def test_an_unknown_layout_lists_candidates_and_flags(folder, tmp_path):
    tensors = {f"blocks.{i}.mixer.wq.weight": np.ones((8, 8), dtype=np.float32) for i in range(3)}
    tensors |= {f"blocks.{i}.mixer.wk.weight": np.ones((4, 8), dtype=np.float32) for i in range(3)}
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").unlink()
    refused(folder, "blocks.{layer}.mixer.wq.weight (8, 8) x 3", "--heads", "--q", "--k", cwd=tmp_path)


def test_hostile_names_cannot_move_the_cursor_or_fill_the_screen(folder, tmp_path):
    tensors = {
        f"\x1b[2J{'x' * 100_000}.{i}.attn.weight": np.ones((2, 2), dtype=np.float32) for i in range(200)
    }
    save_file(tensors, folder / "model.safetensors")
    line = refused(folder, "no tensor fits", cwd=tmp_path)
    assert "\x1b" not in line


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_nan_weights_are_rows_of_nulls_with_a_reason_and_a_warning(bad, folder, tmp_path):
    tensors = bert_tensors(np.random.default_rng(0))
    tensors[NAME][0, 0] = bad  # row 0 is head 0
    tensors["encoder.layer.1.attention.self.key.weight"][4:8] = 0.0  # head 1
    save_file(tensors, folder / "model.safetensors")
    run = scan(folder, "--format", "json", cwd=tmp_path)
    assert run.returncode == 0
    rows = json.loads(run.stdout)["models"][0]["rows"]
    by_place = {(r["layer"], r["head"]): r for r in rows}
    scores = ("symmetry", "symmetry_z", "directionality", "row_excess", "effective_rank", "positive_energy")
    for place in [(0, None), (0, 0), (1, 1)]:
        assert all(by_place[place][s] is None for s in scores)
    assert by_place[0, 0]["reason"] == by_place[0, None]["reason"] == "W_Q holds NaN or infinity"
    assert by_place[1, 1]["reason"] == "W_K is all zero"
    assert by_place[1, 1]["norm"] == 0.0
    for place in [(0, 1), (0, 2), (1, None), (1, 0), (1, 2)]:
        assert all(by_place[place][s] is not None for s in scores)
        assert by_place[place]["reason"] is None
    assert run.stderr.count("warning:") == 2
    assert "Traceback" not in run.stderr


def test_of_several_sources_the_good_are_reported_and_the_bad_listed(folder, tmp_path):
    save_file(bert_tensors(np.random.default_rng(0)), folder / "model.safetensors")
    run = subprocess.run(
        [
            sys.executable,
            "-m",
            "qkform",
            "scan",
            "nope",
            "m",
            "gone/",
            "--format",
            "json",
            "--out",
            "rows.json",
        ],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    document = json.loads(run.stdout)
    assert run.returncode == 2
    assert [m["source"] for m in document["models"]] == ["m"]
    assert [e["source"] for e in document["errors"]] == ["nope", "gone/"]
    assert run.stderr.count("error:") == 2
    assert json.loads((tmp_path / "rows.json").read_text()) == document


@pytest.mark.parametrize("kind", [np.float32, np.float64])
def test_a_gain_beyond_float32_is_folded_in_float64_without_a_warning(kind, tmp_path):
    from qkform.form.folding import gained_inputs, gained_outputs

    rng = np.random.default_rng(0)
    w, b = (1e3 * rng.normal(size=s).astype(np.float32) for s in ((2, 5, 3), (2, 3)))
    gain, shift = np.full(5, 1e38, kind), np.full(5, 1e37, kind)
    folded, bias = gained_inputs(w, b, gain, shift)
    assert bias is not None
    np.testing.assert_allclose(folded, w.astype(float) * 1e38, rtol=1e-6)
    np.testing.assert_allclose(bias, b + (w.astype(float) * 1e37).sum(axis=1), rtol=1e-5)
    out, bias = gained_outputs(w, b, np.full(3, 1e38, kind), centred=False)
    np.testing.assert_allclose(out, w.astype(float) * 1e38, rtol=1e-6)
    assert gained_inputs(w, b, np.ones(5, np.float32), None)[0].dtype == np.float32
    broken = gained_inputs(w, b, np.full(5, np.inf, np.float32), None)[0]
    assert not np.isfinite(broken).any()


# ---- PyTorch files: a pickle is a program, and none of these runs


class Call:
    """Pickles as a call of `function`."""

    def __init__(self, function, *arguments):
        self.parts = function, arguments

    def __reduce__(self):
        return self.parts


MARK = "touch ran"  # what a hostile pickle would do: leave a file that `refused` would see


def _zip(payload: bytes, *, more: dict[str, bytes] | None = None, packed: bool = False) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED if packed else zipfile.ZIP_STORED) as archive:
        for name, data in {"m/data.pkl": payload, "m/version": b"3\n", **(more or {})}.items():
            archive.writestr(name, data)
    return out.getvalue()


def _torch_bytes(state: object, *, zipped: bool = True) -> bytes:
    import torch

    out = io.BytesIO()
    torch.save(state, out, _use_new_zipfile_serialization=zipped)
    return out.getvalue()


def _tar(payload: bytes) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.USTAR_FORMAT) as archive:
        for name in ("storages", "tensors", "pickle"):
            info = tarfile.TarInfo(name)
            info.size = len(payload)
            archive.addfile(info, io.BytesIO(payload))
    return out.getvalue()


def _view(size: tuple[int, ...], stride: tuple[int, ...], offset: int = 0) -> object:
    """A tensor over four stored numbers that claims this shape."""
    import torch

    storage = torch.storage.TypedStorage(
        wrap_storage=torch.arange(4.0).untyped_storage(), dtype=torch.float32, _internal=True
    )
    return Call(torch._utils._rebuild_tensor_v2, storage, offset, size, stride, False, OrderedDict())


def _lying_storage() -> bytes:
    """A storage of 2^40 numbers by the pickle's word, and of 16 bytes in the file."""
    return _torch_bytes({NAME: __import__("torch").zeros(4)}).replace(
        b"K\x04tq", b"\x8a\x06\0\0\0\0\0\x01tq", 1
    )


def _nested(depth: int) -> dict:
    state: dict = {}
    for _ in range(depth):
        state = {"model": state}
    return state


def _fanned_out() -> dict:
    """2^60 paths through sixty dictionaries."""
    state: dict = {"w": 1}
    for _ in range(60):
        state = {"a": state, "b": state}
    return state


def _legacy(payload: bytes) -> bytes:
    """The payload where torch.save's older format has the tensors: behind the magic number, version and system."""
    head = [
        pickle.dumps(part, protocol=2) for part in (0x1950A86A20F9469CFC6C, 1001, {"little_endian": True})
    ]
    return b"".join(head) + payload + pickle.dumps([], protocol=2)


def _doubled(times: int) -> bytes:
    """A key of 2^times empty tuples, in a few hundred bytes."""
    steps = (b"h%ch%c\x86q%c" % (i, i, i + 1) for i in range(times))
    return b"\x80\x02})q\x00" + b"".join(steps) + b"K\x01s."


_TEXT = b"X" + struct.pack("<I", 200_000) + b"a" * 200_000
BOMBS = {  # each would take the process down, or hours, or gigabytes, by torch's weights_only alone
    "a deep key": (b"\x80\x02}" + b")" + b"\x85" * 200_000 + b"K\x01s.", "nested more than"),
    "a doubled key": (_doubled(60), "parts as a key"),
    "a doubled member of a set": (
        b"\x80\x02cbuiltins\nset\n](" + _doubled(60)[3:-4] + b"e\x85R.", "nested|parts as a key|damaged"),
    "a slow codec": (
        b"\x80\x02c_codecs\nencode\n" + _TEXT + b"X\x08\0\0\0punycode\x86R.", "punycode.*latin1"),
    "a bytearray of a number": (b"\x80\x02c__builtin__\nbytearray\nJ\0\0\0\x7f\x85R.", "bytearray.2130706432"),
    "a bytearray by another's hand": (
        b"\x80\x02ctorch._tensor\n_rebuild_from_type_v2\n(c__builtin__\nbytearray\nNJ\0\0\0\x7f\x85NtR.",
        "bytearray.2130706432",
    ),
    "a storage of a number": (b"\x80\x02ctorch.storage\nUntypedStorage\nJ\0\0\0\x7f\x85R.", "UntypedStorage"),
    "a tensor of a number": (b"\x80\x02ctorch\nFloatTensor\nJ\0\0\0\x7f\x85R.", "FloatTensor"),
    "one text many times": (
        b"\x80\x02](" + _TEXT + b"q\0" + b"c_codecs\nencode\nh\0X\6\0\0\0latin1\x86R0" [:-1] * 2000 + b"e.",
        "encode more than",
    ),
    "numbers that collide": (
        b"\x80\x02}(" + b"".join(b"\x8a\x0c" + (i * (2**61 - 1)).to_bytes(12, "little") + b"N" for i in range(1, 9000))
        + b"u.", "as keys",
    ),
    "lists in lists": (b"\x80\x02" + b"]" * 5000 + b"a" * 4999 + b".", "nested more than"),
    "another protocol": (b"\x80\x04\x95\0\0\0\0\0\0\0\0}.", "FRAME"),
    "ends early": (b"\x80\x02}(X\xff\xff\xff\x7fa", "truncated"),
}  # fmt: skip


@pytest.mark.parametrize("wrap", [_zip, _legacy])
def test_a_pickle_that_would_never_end_is_refused_by_its_opcodes(wrap, tmp_path):
    """In one process with bounded memory and time; a crash of it would end the lines."""
    for i, (payload, _) in enumerate(BOMBS.values()):
        (tmp_path / f"case{i:02}.bin").write_bytes(wrap(payload))
    run = scan(*sorted(path.name for path in tmp_path.iterdir()), cwd=tmp_path)
    assert run.returncode == 2, run.stderr[-2000:]
    lines = run.stderr.strip().splitlines()
    assert len(lines) == len(BOMBS)
    assert not [
        (case, line) for line, case in zip(lines, BOMBS, strict=True) if not re.search(BOMBS[case][1], line)
    ]


def test_a_text_with_a_wrong_escape_is_damage_where_warnings_are_errors(tmp_path):
    (tmp_path / "model.bin").write_bytes(_zip(b"cos\nsys\\dtem\n."))
    with pytest.raises(CheckpointError, match="damaged"):
        open_checkpoint(tmp_path / "model.bin")


SYSTEM = pickle.dumps(Call(os.system, MARK), protocol=2)
PICKLES = {
    "os.system": (lambda: _zip(SYSTEM), "would run code"),
    "os.system by text": (lambda: _zip(b"cos\nsystem\n(V" + MARK.encode() + b"\ntR."), "would run code"),
    "builtins.eval": (
        lambda: _zip(pickle.dumps(Call(eval, "open('ran', 'w')"), protocol=2)),
        "would run code",
    ),
    "builtins.exec": (
        lambda: _zip(pickle.dumps(Call(exec, "open('ran', 'w')"), protocol=2)),
        "would run code",
    ),
    "subprocess": (
        lambda: _zip(pickle.dumps(Call(subprocess.Popen, ["touch", "ran"]), protocol=2)),
        "would run code",
    ),
    "inside a state dict": (lambda: _torch_bytes({NAME: Call(os.system, MARK)}), "would run code"),
    "beside a tensor": (
        lambda: _torch_bytes({"x": __import__("torch").ones(2), "y": Call(os.system, MARK)}),
        "would run code",
    ),
    "torch.load inside": (
        lambda: _zip(pickle.dumps(Call(__import__("torch").load, "m"), protocol=2)),
        "would run code",
    ),
    "storage from a file": (
        lambda: _zip(
            pickle.dumps(
                Call(__import__("torch").UntypedStorage.from_file, "/etc/hostname", False, 4), protocol=2
            )
        ),
        "code",
    ),
    "numpy fromfile": (
        lambda: _zip(pickle.dumps(Call(np.fromfile, "/etc/hostname"), protocol=2)),
        "would run code",
    ),
    "getattr": (
        lambda: _zip(
            pickle.dumps(Call(getattr, os, "system"), protocol=2)
            if False
            else b"cbuiltins\ngetattr\n(cos\nenviron\nVcopy\ntR."
        ),
        "would run code",
    ),
    "a model, not its weights": (lambda: _torch_bytes(__import__("torch").nn.Linear(2, 2)), "would run code"),
    "legacy, os.system": (lambda: SYSTEM, "would run code"),
    "legacy, in a state dict": (
        lambda: _torch_bytes({NAME: Call(os.system, MARK)}, zipped=False),
        "would run code",
    ),
    "tar": (lambda: _tar(SYSTEM), "tar archive"),
    "zip in a zip": (lambda: _zip(_zip(SYSTEM)), "loaded safely"),
    "torchscript": (
        lambda: _zip(SYSTEM, more={"m/constants.pkl": SYSTEM, "m/code/x.py": b"1"}),
        "TorchScript",
    ),
    "packed": (lambda: _zip(b"\0" * 10**7, packed=True), "packed member"),
    "two pickles": (lambda: _zip(SYSTEM, more={"n/data.pkl": SYSTEM}), "2 members named data.pkl"),
    "no pickle": (lambda: _zip(b"").replace(b"data.pkl", b"data.pkx"), "0 members named data.pkl"),
    "empty": (lambda: b"", "too short"),
    "text": (lambda: b"<!DOCTYPE html><html></html>", "neither a zip archive nor a pickle"),
    "lfs": (lambda: b"version https://git-lfs.github.com/spec/v1\noid sha256:00\n", "git lfs pull"),
    "zip cut short": (lambda: _torch_bytes({NAME: __import__("torch").zeros(400)})[:-200], "zip archive"),
    "legacy cut short": (
        lambda: _torch_bytes({NAME: __import__("torch").zeros(400)}, zipped=False)[:-200],
        "loaded",
    ),
    "directory alone": (lambda: b"PK\5\6" + b"\0" * 18, "0 members"),
    "huge directory": (lambda: b"PK\3\4" + b"\0" * 50 + b"PK\5\6" + b"\0" * 8 + b"\xff" * 8 + b"\0\0", "zip"),
    "bytes without end": (
        lambda: _zip(b"\x80\x02cbuiltins\nbytearray\n\x8a\x06\0\0\0\0\0\x01\x85R."),
        "memory|safely",
    ),
    "memo without end": (lambda: _zip(b"\x80\x02]r\xff\xff\xff\x7f."), "holds a list"),
    "stack without end": (lambda: _zip(b"\x80\x02" + b"(" * 10**6), "loaded safely"),
    "no opcode": (lambda: _zip(b"\x80\x02\xff\xff."), "loaded safely"),
    "a list": (lambda: _torch_bytes([1, 2]), "holds a list"),
    "a tensor alone": (lambda: _torch_bytes(__import__("torch").ones(2)), "holds a Tensor"),
    "no tensors": (lambda: _torch_bytes({"epoch": 3}), "no tensors"),
    "nested dictionaries": (lambda: _torch_bytes(_nested(200)), "nested more than"),
    "dictionaries that fan out": (lambda: _torch_bytes(_fanned_out()), "entries|no tensors"),
    "more than is stored": (lambda: _torch_bytes({NAME: _view((100, 100), (100, 1))}), "loaded safely"),
    "more than is stored, legacy": (
        lambda: _torch_bytes({NAME: _view((100, 100), (100, 1))}, zipped=False),
        "loaded safely",
    ),
    "before the storage": (lambda: _torch_bytes({NAME: _view((2, 2), (1, 1), -3)}), "loaded safely"),
    "backwards": (lambda: _torch_bytes({NAME: _view((2, 2), (-1, 1))}), "loaded safely"),
    "beyond any memory": (lambda: _torch_bytes({NAME: _view((2**40, 2**40), (2**40, 1))}), "loaded safely"),
    "strides that overflow": (lambda: _torch_bytes({NAME: _view((2, 2), (2**62, 2**62))}), "loaded safely"),
    "a lying storage": (_lying_storage, "bin"),
}


@pytest.mark.filterwarnings("ignore")  # torch's own, of old storages
def test_every_hostile_pytorch_file_is_refused_and_nothing_runs(tmp_path):
    """All in one process, which imports torch once: one line for each, and what one leaves behind would show."""
    named = {f"case{i}.bin": case for i, case in enumerate(PICKLES)}
    for name, case in named.items():
        (tmp_path / name).write_bytes(PICKLES[case][0]())
    run = scan(*named, cwd=tmp_path, seconds=4 * SECONDS)  # of all of them: some 8 s of a free processor
    assert run.returncode == 2, run.stderr[-2000:]
    assert "Traceback" not in run.stderr
    lines = run.stderr.strip().splitlines()
    assert len(lines) == len(named)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(named)
    wrong = []
    for line, (name, case) in zip(lines, named.items(), strict=True):
        if name not in line or len(line) > 3000 or not re.search(PICKLES[case][1], line):
            wrong.append((case, line))
    assert not wrong


def test_a_view_that_repeats_four_numbers_to_terabytes_is_refused_when_it_is_read(folder, tmp_path):
    both = {n: _view((2**20, 2**20), (0, 0)) for n in (NAME, NAME.replace("query", "key"))}
    (folder / "config.json").write_text(
        json.dumps({**BERT_CONFIG, "hidden_size": 2**20, "num_attention_heads": 2})
    )
    (folder / "pytorch_model.bin").write_bytes(_torch_bytes(both))
    refused(folder, NAME, "repeats 16 stored bytes", cwd=tmp_path)


def test_an_index_of_pytorch_files_cannot_lead_out_of_the_folder(folder, tmp_path):
    (tmp_path / "secret.bin").write_bytes(_torch_bytes({NAME: __import__("torch").ones(12, 12)}))
    for shard in ("../secret.bin", str(tmp_path / "secret.bin"), "..\\secret.bin"):
        index = {"weight_map": {NAME: shard}}
        (folder / "pytorch_model.bin.index.json").write_text(json.dumps(index))
        refused(folder, "plain file name", "pytorch_model.bin.index.json", cwd=tmp_path)


def test_a_hostile_shard_is_refused_and_nothing_runs(folder, tmp_path):
    (folder / "pytorch_model-1.bin").write_bytes(_torch_bytes({NAME: Call(os.system, MARK)}))
    index = {"weight_map": {NAME: "pytorch_model-1.bin"}}
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    refused(folder, "would run code", "pytorch_model-1.bin", cwd=tmp_path)


# ---- npz


def _npz(
    header: bytes, data: bytes = b"", *, packed: bool = False, version: bytes = b"\1\0", name: str = NAME
) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED if packed else zipfile.ZIP_STORED) as archive:
        size = struct.pack("<H" if version == b"\1\0" else "<I", len(header))
        archive.writestr(f"{name}.npy", b"\x93NUMPY" + version + size + header + data)
    return out.getvalue()


def _header(shape: str, kind: str = "'<f4'", order: str = "False") -> bytes:
    return f"{{'descr': {kind}, 'fortran_order': {order}, 'shape': {shape}, }}\n".encode()


def _two_of_a_name() -> bytes:
    first = _npz(_header("(1,)"), b"\0" * 4, name="a")
    return first.replace(b"a.npy", b"b.npy", 1)


NPZ = {
    "empty": (b"", "zip archive"),
    "not a zip": (b"PK\3\4 and nothing else", "zip archive"),
    "no arrays": (_zip(b""), "no arrays"),
    "a code in the header": (_npz(b"{'descr': __import__('os').system('touch ran')}"), "no header"),
    "nested header": (_npz(b"(" * 60_000), "no header"),
    "header of a gigabyte": (
        _npz(b"{}", version=b"\2\0").replace(b"\2\0\0\0{}", b"\xff\xff\xff\x7f{}"),
        "header",
    ),
    "version 9": (_npz(b"{}", version=b"\x09\0"), "version 9"),
    "negative shape": (_npz(_header("(-1, 4)")), "shape|no header"),
    "absurd shape": (_npz(_header("(9999999999, 9999999999)")), "truncated"),
    "shape of words": (_npz(_header("('a',)")), "no header"),
    "huge numbers": (_npz(_header(f"({'9' * 5000},)")), "shape"),
    "many sides": (_npz(_header(f"({'1, ' * 500})"), b"\0" * 4), "shape"),
    "unknown type": (_npz(_header("(1,)", "'<q9'"), b"\0" * 9), "type"),
    "shape against bytes": (_npz(_header("(12, 12)"), b"\0" * 100), "truncated"),
    "cut short": (_npz(_header("(12, 12)"), b"\0" * 576)[:-100], "zip archive"),
    "member beyond the end": (
        _npz(_header("(2, 2)"), b"\0" * 16).replace(b"PK\1\2", b"PK\1\2", 1)[:60],
        "zip archive",
    ),
    "two headers": (_two_of_a_name(), "no tensor fits|header|sound"),
    "damaged packing": (
        bytearray(_npz(_header("(12, 12)"), bytes(range(144)) * 4, packed=True)),
        "unpacked|sound|numpy",
    ),
}


def test_every_hostile_npz_is_refused(tmp_path):
    named = {f"case{i}.npz": case for i, case in enumerate(NPZ)}
    for name, case in named.items():
        content = NPZ[case][0]
        if isinstance(content, bytearray):
            at = content.index(b".npy") + 4
            content[at : at + 40] = b"\xff" * 40
        (tmp_path / name).write_bytes(bytes(content))
    (tmp_path / "config.json").write_text(json.dumps(BERT_CONFIG))
    run = scan(*named, cwd=tmp_path)
    assert run.returncode == 2, run.stderr[-2000:]
    assert "Traceback" not in run.stderr
    lines = run.stderr.strip().splitlines()
    assert len(lines) == len(named)
    wrong = []
    for line, (name, case) in zip(lines, named.items(), strict=True):
        if name not in line or len(line) > 3000 or not re.search(NPZ[case][1], line):
            wrong.append((case, line))
    assert not wrong


def _bomb(shape: str, zeros: int) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as archive:
        for name in (NAME, NAME.replace("query", "key")):
            header = _header(shape)
            with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
                member.write(b"\x93NUMPY\1\0" + struct.pack("<H", len(header)) + header)
                for _ in range(zeros // 2**20):
                    member.write(bytes(2**20))
    return out.getvalue()


def test_a_bomb_of_zeros_is_refused_before_it_unpacks(folder, tmp_path):
    (folder / "config.json").write_text(
        json.dumps({**BERT_CONFIG, "hidden_size": 8192, "num_attention_heads": 2})
    )
    (folder / "model.npz").write_bytes(_bomb("(8192, 8192)", 2**28))
    refused(folder, NAME, "no weights pack so well", cwd=tmp_path)


def test_many_small_arrays_of_zeros_are_one_bomb(folder, tmp_path):
    np.savez_compressed(
        folder / "model.npz", **{f"layer.{i}.weight": np.zeros((1000, 1000)) for i in range(9)}
    )
    refused(folder, "no weights pack so well", "numpy.savez", cwd=tmp_path)


def test_members_that_share_bytes_are_refused(folder, tmp_path):
    data = bytearray(_npz(_header("(12, 12)"), b"\0" * 576, packed=True, name="a"))
    start = data.index(b"PK\1\2")
    entry, end = bytes(data[start : data.index(b"PK\5\6")]), data[data.index(b"PK\5\6") :]
    entries = b"".join(entry.replace(b"a.npy", b"%c.npy" % letter) for letter in b"abcdefgh")
    struct.pack_into("<HHI", end, 8, 8, 8, len(entries))
    (folder / "model.npz").write_bytes(bytes(data[:start]) + entries + bytes(end))
    refused(folder, "overlap", "model.npz", cwd=tmp_path)


def test_views_that_repeat_a_few_numbers_in_every_layer_are_refused_together(tmp_path):
    from qkform.checkpoints.opening import open_checkpoint
    from qkform.errors import CheckpointError

    path = tmp_path / "x.pt"
    path.write_bytes(_torch_bytes({f"layer.{i}.weight": _view((2000, 2000), (0, 0)) for i in range(8)}))
    checkpoint = open_checkpoint(path)
    for i in (0, 1, 2, 3, 0):  # again is no more
        assert checkpoint.read(f"layer.{i}.weight").shape == (2000, 2000)
    with pytest.raises(CheckpointError, match="repeats 16 stored bytes"):
        checkpoint.read("layer.4.weight")


def test_an_array_of_objects_stays_a_pickle_that_nobody_loads(folder, tmp_path):
    arrays = {
        n: np.array([Call(os.system, MARK)] * 2, dtype=object) for n in (NAME, NAME.replace("query", "key"))
    }
    np.savez(folder / "model.npz", **arrays)
    refused(folder, NAME, cwd=tmp_path)


# ---- split GGUF


def test_parts_of_a_gguf_cannot_lead_out_of_their_folder_or_fill_memory(tmp_path):
    from tests.test_gguf import file_bytes, pair

    def part(count: int, name: str) -> None:
        keys = [pair("split.no", 2, b"\0\0"), pair("split.count", 4, struct.pack("<I", count))]
        (tmp_path / name).write_bytes(file_bytes(keys))

    part(2, "..-00001-of-00002.gguf")
    refused("..-00001-of-00002.gguf", "..-00002-of-00002.gguf", "incomplete", cwd=tmp_path)
    part(2**32 - 1, "m-00001-of-99999.gguf")
    refused("m-00001-of-99999.gguf", "split.count", cwd=tmp_path)
    part(3, "m-00001-of-00002.gguf")
    refused("m-00001-of-00002.gguf", "name back", cwd=tmp_path)
    os.mkfifo(tmp_path / "n-00002-of-00002.gguf")
    part(2, "n-00001-of-00002.gguf")
    refused("n-00001-of-00002.gguf", "n-00002-of-00002.gguf is not a regular file", cwd=tmp_path)
