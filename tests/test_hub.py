"""Hub ids, with the real client against a server on this machine: bytes served, faults survived, refusals in words."""

from __future__ import annotations

import gc
import gzip
import importlib
import inspect
import json
import os
import pkgutil
import struct
import subprocess
import sys
import threading
import time
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

import qkform as qk
from qkform.checkpoints import ahead, remote
from qkform.checkpoints.ahead import AheadReader, pieces
from qkform.checkpoints.hub import open_hub
from qkform.checkpoints.hub_names import HubName, hub_name
from qkform.checkpoints.listing import listed
from qkform.checkpoints.opening import open_checkpoint
from qkform.checkpoints.remote import Target, Web
from qkform.checkpoints.safetensors import BITS, header_length, parse_header
from qkform.errors import CheckpointError, ConfigError, QKFormError, SourceError
from qkform.layouts import find_layers
from qkform.options import Options
from tests.conftest import BERT_CONFIG, bert_tensors
from tests.hub_server import COMMIT, OTHER, Hub
from tests.test_layouts import gguf_file

TOKEN = "hf_aVerySecretToken"
LLAMA_CONFIG = {
    "model_type": "llama",
    "hidden_size": 96,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "num_hidden_layers": 4,
}
GPT2_CONFIG = {"model_type": "gpt2", "n_embd": 48, "n_head": 3, "n_layer": 3}
NEOX_CONFIG = {
    "model_type": "gpt_neox",
    "hidden_size": 48,
    "num_attention_heads": 3,
    "num_hidden_layers": 3,
}


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """The server, and the real client pointed at it, with a cache of its own and no saved token."""
    from huggingface_hub import close_session, constants

    server = Hub()
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(constants, "ENDPOINT", server.address)
    monkeypatch.setattr(
        constants, "HUGGINGFACE_CO_URL_TEMPLATE", server.address + "/{repo_id}/resolve/{revision}/{filename}"
    )
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "token"))
    monkeypatch.setattr(constants, "HF_STORED_TOKENS_PATH", str(tmp_path / "tokens"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(remote, "BACKOFF_SECONDS", 0.002)
    monkeypatch.chdir(tmp_path)
    yield server
    gc.collect()  # readers that are gone dismiss their threads; one in the middle of a request would leave a socket
    for thread in threading.enumerate():
        if thread.name == "qkform-fetch":
            thread.join(2.0)
    close_session()
    server.close()


def llama_tensors(rng, dtype=np.float32):
    tensors = {"model.embed_tokens.weight": rng.normal(size=(300, 96)).astype(dtype)}
    for i in range(4):
        base = f"model.layers.{i}"
        for name, out, inner in (("q", 96, 96), ("k", 32, 96), ("v", 32, 96), ("o", 96, 96)):
            weight = rng.normal(size=(out, inner)).astype(dtype)
            tensors[f"{base}.self_attn.{name}_proj.weight"] = weight
        tensors[f"{base}.mlp.up_proj.weight"] = rng.normal(size=(200, 96)).astype(dtype)
        tensors[f"{base}.input_layernorm.weight"] = np.ones(96, dtype)
    tensors["lm_head.weight"] = rng.normal(size=(300, 96)).astype(dtype)
    return tensors


def gpt2_tensors(rng):
    tensors = {}
    for i in range(3):
        tensors[f"h.{i}.attn.c_attn.weight"] = rng.normal(size=(48, 144)).astype(np.float32)
        tensors[f"h.{i}.attn.c_attn.bias"] = rng.normal(size=144).astype(np.float32)
        tensors[f"h.{i}.mlp.c_fc.weight"] = rng.normal(size=(48, 192)).astype(np.float32)
    tensors["wte.weight"] = rng.normal(size=(200, 48)).astype(np.float32)
    return tensors


def neox_tensors(rng):
    tensors = {}
    for i in range(3):
        base = f"gpt_neox.layers.{i}.attention.query_key_value"
        tensors[f"{base}.weight"] = rng.normal(size=(144, 48)).astype(np.float32)
        tensors[f"{base}.bias"] = rng.normal(size=144).astype(np.float32)
    tensors["gpt_neox.embed_in.weight"] = rng.normal(size=(200, 48)).astype(np.float32)
    return tensors


def write(folder: Path, tensors, config, shards: int = 1) -> Path:
    """A model folder as save_pretrained leaves it; with shards, tensors in order, the last shard last."""
    folder.mkdir(parents=True)
    if config is not None:
        (folder / "config.json").write_text(json.dumps(config))
    if shards == 1:
        save_file(tensors, folder / "model.safetensors")
        return folder
    names = list(tensors)
    places = {}
    for i, part in enumerate(np.array_split(names, shards)):
        file = f"model-{i + 1:05d}-of-{shards:05d}.safetensors"
        save_file({str(n): tensors[str(n)] for n in part}, folder / file)
        places |= {str(n): file for n in part}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    return folder


MODELS = {
    "llama, 5 shards": (llama_tensors, LLAMA_CONFIG, 5),
    "llama, 1 file": (llama_tensors, LLAMA_CONFIG, 1),
    "bert": (
        lambda rng: bert_tensors(rng, 3, 48),
        BERT_CONFIG | {"hidden_size": 48, "num_hidden_layers": 3},
        1,
    ),
    "gpt2, fused, 3 shards": (gpt2_tensors, GPT2_CONFIG, 3),
    "neox, fused by head": (neox_tensors, NEOX_CONFIG, 1),
}


def make(case: str, folder: Path) -> Path:
    tensors, config, shards = MODELS[case]
    return write(folder, tensors(np.random.default_rng(0)), config, shards)


def needed(folder: Path) -> tuple[int, int]:
    """(bytes of Q and K, bytes of headers, index and config) by an account of its own, from the local files."""
    checkpoint = open_checkpoint(folder)
    layout = find_layers(checkpoint.tensors, checkpoint.config, checkpoint.read, source="x")
    wanted = {need for layer in layout.layers for need in layer.needs()}
    infos = [checkpoint.tensors[name].head(rows) for name, rows in wanted]
    around = sum(p.stat().st_size for p in folder.glob("*.json"))
    for file in {info.file for info in infos}:
        around += 8 + struct.unpack("<Q", file.read_bytes()[:8])[0]
    return sum(info.nbytes for info in infos), around


def rows_of(table):
    return table.models[0].rows


def refusal(source="org/name", **options) -> str:
    """The message of a source that cannot be scanned."""
    with pytest.raises(QKFormError) as caught:
        qk.scan(source, **options)
    message = str(caught.value)
    seen, error = "", caught.value
    while error is not None:
        seen += repr(error) + str(vars(error))
        error = None if error.__suppress_context__ else error.__context__
    assert TOKEN not in seen
    return message


# ---- bytes, scores, faults


@pytest.mark.parametrize("cdn", [False, True], ids=["hub", "cdn"])
@pytest.mark.parametrize("case", MODELS)
def test_only_q_and_k_are_served_and_scores_are_those_of_the_files(case, cdn, hub, tmp_path, record_property):
    folder = make(case, tmp_path / "m")
    hub.add("org/name", folder)
    hub.cdn = cdn
    table, local = qk.scan("org/name"), qk.scan(folder)
    assert rows_of(table) == rows_of(local)  # bit for bit
    weights, around = needed(folder)
    served = hub.bytes_of()
    record_property("served / needed", (served - around) / weights)
    assert weights + around <= served <= 1.02 * weights + around, (served, weights, around)
    assert table.models[0].bytes_read == served
    assert table.models[0].revision == COMMIT
    assert local.models[0].revision is None
    assert hub.most_running <= ahead.PARALLEL
    if case.startswith("llama, 5"):
        assert "model-00005-of-00005.safetensors" not in hub.served  # no Q or K in it: not even its header


@pytest.mark.parametrize("fault", ["500", "429", "cut", "hang"])
@pytest.mark.parametrize("case", ["llama, 5 shards", "gpt2, fused, 3 shards"])
def test_scores_are_the_same_with_every_second_request_failing(case, fault, hub, tmp_path, monkeypatch):
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_DOWNLOAD_TIMEOUT", 0.2)  # seconds, of a server that hangs for one
    folder = make(case, tmp_path / "m")
    hub.add("org/name", folder)
    hub.fault = fault
    if fault == "hang":
        hub.failing = lambda nth: nth == 1
    table = qk.scan("org/name")
    assert rows_of(table) == rows_of(qk.scan(folder))
    weights, around = needed(folder)
    assert hub.failed >= 5
    tensors = hub.bytes_of("safetensors")
    documents = sum(p.stat().st_size for p in folder.glob("*.json"))
    assert tensors <= 1.02 * weights + around - documents  # a cut read is resumed: no byte twice


def test_a_server_that_keeps_failing_is_given_up_with_the_file_and_the_status(hub, tmp_path):
    hub.add("org/name", make("bert", tmp_path / "m"))
    qk.scan("org/name")
    hub.fault, hub.failing = "500", lambda nth: True
    hub._seen.clear()
    message = refusal()
    assert "500" in message
    assert f"{remote.TRIES} attempts" in message
    assert hub.failed == remote.TRIES


def test_retries_wait_longer_each_time_within_bounds(monkeypatch):
    monkeypatch.setattr(remote, "BACKOFF_SECONDS", 0.5)
    waits = [[remote.backoff(n) for _ in range(50)] for n in range(1, 9)]
    for n, some in enumerate(waits):
        assert all(min(20, 0.5 * 2**n) * 0.5 <= wait <= min(20, 0.5 * 2**n) for wait in some)
        assert len(set(some)) > 1


@pytest.mark.parametrize(
    ("headers", "seconds"),
    [
        ({"Retry-After": "7"}, 7.0),
        ({"RateLimit": '"resolvers";r=0;t=55'}, 56.0),
        ({"RateLimit": '"resolvers";r=3;t=55'}, None),
        ({"Retry-After": "Wed, 21 Oct 2015 07:28:00 GMT"}, None),
        ({}, None),
    ],
)
def test_what_the_server_asks_to_wait_is_waited(headers, seconds, monkeypatch, hub, tmp_path):
    assert remote._asked_wait(headers) == seconds
    slept = []
    monkeypatch.setattr(remote, "sleep", slept.append)
    hub.add("org/name", make("bert", tmp_path / "m"))

    def once(handler):
        del hub.custom["/api/models/org/name/revision/main"]
        handler.send_response(429)
        for key, value in headers.items():
            handler.send_header(key, value)
        handler.send_header("Content-Length", "0")
        handler.end_headers()

    hub.custom["/api/models/org/name/revision/main"] = once
    qk.scan("org/name")
    assert slept == [seconds] if seconds is not None else 0 < slept[0] < 1


def test_an_hour_of_waiting_is_refused(hub, tmp_path):
    hub.add("org/name", make("bert", tmp_path / "m"))

    def limited(handler):
        handler.send_response(429)
        handler.send_header("Retry-After", "3600")
        handler.send_header("Content-Length", "0")
        handler.end_headers()

    hub.custom["/api/models/org/name/revision/main"] = limited
    assert "wait 3,600 seconds" in refusal()


def test_a_server_that_ignores_ranges_is_read_up_to_a_limit(hub, tmp_path, monkeypatch):
    folder = make("bert", tmp_path / "m")
    hub.add("org/name", folder)
    hub.ignore_ranges = True
    assert rows_of(qk.scan("org/name")) == rows_of(qk.scan(folder))
    monkeypatch.setattr(remote, "MAX_SKIPPED", 20_000)
    assert "ignores byte ranges" in refusal()


@pytest.mark.parametrize("sent", ["bytes 0-7/9", "bytes 5-9/100000", "nonsense", "bytes 9-3/100"])
def test_other_bytes_than_asked_for_are_refused(sent, hub, tmp_path):
    hub.add("org/name", make("bert", tmp_path / "m"))
    hub.content_range = sent
    message = refusal()
    assert "org/name/model.safetensors" in message
    assert sent in message or "not the same file" in message


# ---- the order and the amount of reading ahead


def file_of(hub, tmp_path, nbytes):
    data = np.random.default_rng(1).integers(0, 256, nbytes, dtype=np.uint8)
    (tmp_path / "f").mkdir()
    (tmp_path / "f" / "x.bin").write_bytes(data.tobytes())
    hub.add("org/name", tmp_path / "f")
    return data, {Path("x"): Target(f"{hub.address}/org/name/resolve/{COMMIT}/x.bin", "x", nbytes)}


def test_reading_ahead_is_bounded_and_gives_every_byte(hub, tmp_path, monkeypatch):
    monkeypatch.setattr(ahead, "AHEAD_BYTES", 40_000)
    monkeypatch.setattr(ahead, "WINDOW_BYTES", 10_000)
    monkeypatch.setattr(ahead, "REQUEST_BYTES", 3_000)
    data, targets = file_of(hub, tmp_path, 400_000)
    reader = AheadReader(Web(None), targets)
    ranges = [(Path("x"), at, 7_001) for at in range(0, 380_000, 9_000)]
    ranges.insert(5, (Path("x"), 100, 90_000))  # larger than all that may be held
    reader.plan(ranges)
    reader._jobs.join()
    assert 0 < reader.bytes_read <= 40_000 + 3_000
    for _, at, nbytes in ranges:
        assert (reader.read(Path("x"), at, nbytes) == data[at : at + nbytes]).all()
    assert reader._held == 0
    assert reader.bytes_read == hub.bytes_of() == sum(n for _, _, n in ranges)
    assert (reader.read(Path("x"), 17, 5) == data[17:22]).all()  # not planned


def test_a_tensor_that_is_read_twice_is_fetched_once(hub, tmp_path):
    data, targets = file_of(hub, tmp_path, 50_000)
    reader = AheadReader(Web(None), targets)
    ranges = [(Path("x"), 0, 9_000), (Path("x"), 20_000, 9_000), (Path("x"), 0, 9_000)]
    reader.plan(ranges)
    for _, at, nbytes in ranges:
        assert (reader.read(Path("x"), at, nbytes) == data[at : at + nbytes]).all()
    assert hub.bytes_of() == 18_000
    assert not reader._kept


def test_requests_run_side_by_side(hub, tmp_path):
    data, targets = file_of(hub, tmp_path, 80_000)
    hub.delay = 0.15
    reader = AheadReader(Web(None), targets)
    ranges = [(Path("x"), at, 5_000) for at in range(0, 80_000, 10_000)]
    start = time.monotonic()
    reader.plan(ranges)
    for _, at, nbytes in ranges:
        assert (reader.read(Path("x"), at, nbytes) == data[at : at + nbytes]).all()
    assert 2 <= hub.most_running <= ahead.PARALLEL
    assert time.monotonic() - start < 8 * 0.15


def test_threads_end_with_their_reader(hub, tmp_path):
    _, targets = file_of(hub, tmp_path, 80_000)
    reader = AheadReader(Web(None), targets)
    reader.read(Path("x"), 0, 10)
    assert any(t.name == "qkform-fetch" for t in threading.enumerate())
    del reader
    gc.collect()
    for _ in range(100):
        if not any(t.name == "qkform-fetch" for t in threading.enumerate()):
            return
        time.sleep(0.02)
    pytest.fail("threads of a reader that is gone")


@given(
    st.lists(
        st.tuples(st.integers(0, 2), st.integers(0, 3_000), st.integers(1, 400)), min_size=1, max_size=40
    )
)
def test_joined_ranges_hold_every_range_and_waste_little(items):
    ranges = [(Path(f"f{file}"), begin, nbytes) for file, begin, nbytes in items]
    found = pieces(ranges)
    held = [item for piece in found for item in piece.ranges]
    assert sorted(held) == sorted(set(ranges))
    for piece in found:
        covered = set()
        for file, begin, nbytes in piece.ranges:
            assert file == piece.file
            assert piece.begin <= begin
            assert begin + nbytes <= piece.end
            covered |= set(range(begin, begin + nbytes))
        assert piece.nbytes <= 1.01 * len(covered)


def test_neighbours_share_a_request_and_strangers_do_not():
    f = Path("f")
    assert len(pieces([(f, 1000, 500), (f, 0, 1000)])) == 1
    assert len(pieces([(f, 0, 1000), (f, 1010, 1000)])) == 1  # a gap of 10 costs half a percent
    assert len(pieces([(f, 0, 1000), (f, 1100, 1000)])) == 2


def test_fewer_rows_come_out_of_more_and_a_third_reading_out_of_the_first(hub, tmp_path, monkeypatch):
    monkeypatch.setattr(ahead, "SMALL_BYTES", 0)
    monkeypatch.setattr(ahead, "WINDOW_BYTES", 10_000)
    data, targets = file_of(hub, tmp_path, 90_000)
    reader = AheadReader(Web(None), targets)
    ranges = [(at, nbytes) for nbytes in (9_000, 8_000, 9_000) for at in (0, 20_000, 40_000)]
    reader.plan([(Path("x"), at, nbytes) for at, nbytes in ranges])
    for at, nbytes in ranges:
        assert (reader.read(Path("x"), at, nbytes) == data[at : at + nbytes]).all()
    assert hub.bytes_of() == 27_000
    assert not reader._kept


def test_what_is_kept_is_bounded_and_what_is_not_fetched_again_goes_first(hub, tmp_path, monkeypatch):
    monkeypatch.setattr(ahead, "SMALL_BYTES", 0)
    monkeypatch.setattr(ahead, "KEPT_BYTES", 20_000)
    data, targets = file_of(hub, tmp_path, 90_000)
    reader = AheadReader(Web(None), targets)
    starts = range(0, 90_000, 10_000)
    reader.plan([(Path("x"), at, 9_000) for at in starts for _ in range(3)])
    for at in starts:  # twice, where three times were planned
        for _ in range(2):
            assert (reader.read(Path("x"), at, 9_000) == data[at : at + 9_000]).all()
        assert sum(a.nbytes for a in reader._kept.values()) <= 20_000
    assert hub.bytes_of() == 81_000


def test_a_second_plan_lets_the_first_one_go(hub, tmp_path, monkeypatch):
    running, old = [], []
    fetch = ahead._fetch

    def fetching(web, target, piece, at):
        running.append(piece)
        fetch(web, target, piece, at)
        running.remove(piece)

    monkeypatch.setattr(ahead, "_fetch", fetching)
    data, targets = file_of(hub, tmp_path, 400_000)
    hub.delay = 0.1
    reader = AheadReader(Web(None), targets)
    reader.plan([(Path("x"), at, 5_000) for at in range(0, 400_000, 10_000)])
    while not running:
        time.sleep(0.01)
    old.extend(reader._place.values())
    second = [(Path("x"), at, 5_000) for at in (50_000, 70_000)]
    reader.plan(second)
    assert not [piece for piece in running if piece in old]
    for _, at, nbytes in second:
        assert (reader.read(Path("x"), at, nbytes) == data[at : at + nbytes]).all()
    assert reader._held == 0
    assert hub.bytes_of() <= (ahead.PARALLEL + 2) * 5_000


LATENT_CONFIG = {
    "model_type": "deepseek_v3",
    "hidden_size": 96,
    "num_attention_heads": 4,
    "num_hidden_layers": 3,
    "q_lora_rank": 48,
    "kv_lora_rank": 40,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
}


def latent_tensors(rng, kind=np.float32):
    """Latent attention: three layers of scores read the same projections. 8-bit floats have a scale for each row."""
    tensors = {}
    for i in range(3):
        at = f"model.layers.{i}.self_attn"
        for name, shape in (
            ("q_a_proj", (48, 96)),
            ("q_b_proj", (96, 48)),
            ("kv_a_proj_with_mqa", (48, 96)),
            ("kv_b_proj", (128, 40)),
        ):
            tensors[f"{at}.{name}.weight"] = rng.normal(size=shape).astype(kind)
            if kind != np.float32:
                tensors[f"{at}.{name}.weight_scale"] = rng.uniform(1, 2, (shape[0], 1)).astype(np.float32)
        tensors[f"model.layers.{i}.mlp.up_proj.weight"] = rng.normal(size=(200, 96)).astype(np.float32)
    return tensors


@pytest.mark.parametrize("kind", ["float32", "float8_e4m3fn"])
def test_projections_that_three_layers_share_are_fetched_and_made_once(kind, hub, tmp_path, monkeypatch):
    import ml_dtypes
    import torch
    from safetensors.torch import save_file as save_torch

    from qkform.checkpoints import quantised

    dtype = np.float32 if kind == "float32" else ml_dtypes.float8_e4m3fn
    tensors = latent_tensors(np.random.default_rng(3), dtype)
    folder = tmp_path / "m"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(LATENT_CONFIG))
    as_torch = {
        name: torch.from_numpy(a.view(np.uint8) if a.dtype == ml_dtypes.float8_e4m3fn else a)
        for name, a in tensors.items()
    }
    save_torch(
        {n: t.view(torch.float8_e4m3fn) if t.dtype == torch.uint8 else t for n, t in as_torch.items()},
        folder / "model.safetensors",
    )
    hub.add("org/name", folder)
    monkeypatch.setattr(ahead, "SMALL_BYTES", 0)  # these would be held as if they were biases
    monkeypatch.setattr(ahead, "WINDOW_BYTES", 1)
    read = []
    real = quantised.codes
    monkeypatch.setattr(
        quantised, "codes", lambda c, name, rows=None: read.append(name) or real(c, name, rows)
    )
    table = qk.scan("org/name")
    assert len(table.layers) == 9
    around = 8 + struct.unpack("<Q", (folder / "model.safetensors").read_bytes()[:8])[0]
    weights = sum(a.nbytes for n, a in tensors.items() if "self_attn" in n)
    assert hub.bytes_of("safetensors") <= 1.02 * weights + around
    assert len(read) == len(set(read)) == (0 if kind == "float32" else 24)
    read.clear()
    assert rows_of(table) == rows_of(qk.scan(folder))
    assert len(read) == len(set(read))


def test_layers_are_planned_at_the_first_reading_from_there_on(hub, tmp_path, monkeypatch):
    from qkform.checkpoints.ranged import HubCheckpoint

    folder = make("llama, 5 shards", tmp_path / "m")
    hub.add("org/name", folder)
    plans = []
    real = HubCheckpoint.plan
    monkeypatch.setattr(HubCheckpoint, "plan", lambda self, needs: plans.append(needs) or real(self, needs))
    first, second, *rest = qk.layers("org/name")
    assert not plans
    local = list(qk.layers(folder))
    for mine, theirs in zip((second, *rest), local[1:], strict=True):
        assert (mine.form.matrix() == theirs.form.matrix()).all()
    ((*needs,),) = plans
    assert needs == [need for layer in local[1:] for need in layer.needs()]
    assert (first.form.matrix() == local[0].form.matrix()).all()  # one that the plan has not
    assert len(plans) == 1


# ---- names and choices


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("org/name", HubName("org/name")),
        ("gpt2", HubName("gpt2")),
        ("hf://org/name", HubName("org/name", None, "", True)),
        ("hf://models/org/name", HubName("org/name", None, "", True)),
        ("hf://gpt2", HubName("gpt2", None, "", True)),
        ("hf://gpt2@v1/onnx", HubName("gpt2", "v1", "onnx", True)),
        ("hf://org/name@v1.0", HubName("org/name", "v1.0", "", True)),
        ("hf://org/name@refs%2Fpr%2F1/a/b.gguf", HubName("org/name", "refs/pr/1", "a/b.gguf", True)),
        ("https://huggingface.co/org/name", HubName("org/name", None, "", True)),
        ("https://huggingface.co/org/name/tree/v1", HubName("org/name", "v1", "", True)),
        ("https://huggingface.co/gpt2/blob/main/model.safetensors?x=1",
         HubName("gpt2", "main", "model.safetensors", True)),
        ("runs/x/y", None),
        ("./org", None),
        ("../name", None),
        ("/org/name", None),
        ("~/name", None),
        ("model.gguf", None),
        ("model.bin", None),
        ("a--b/c", None),
        ("org/", None),
        ("", None),
        ("C:\\x", None),
        ("sample:minilm", None),
    ],
)  # fmt: skip
def test_what_is_a_hub_name(text, expected):
    assert hub_name(text) == expected


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("hf://datasets/org/name", "dataset"),
        ("https://huggingface.co/spaces/org/name", "space"),
        ("https://example.org/model.safetensors", "not an address of the hub"),
        ("hf://", "names no repository"),
        ("hf://org/name/../other", "names no repository"),
        ("hf://org/..", "names no repository"),
    ],
)
def test_addresses_of_something_else_are_refused(text, word):
    with pytest.raises(SourceError, match=word):
        hub_name(text)


def test_a_folder_of_that_name_goes_first(hub, tmp_path):
    make("bert", tmp_path / "org" / "name")
    assert qk.scan("org/name").models[0].revision is None
    assert not hub.requests


def test_a_folder_or_a_file_of_a_repository(hub, tmp_path):
    root = tmp_path / "m"
    folder = make("bert", root / "encoders" / "one")
    make("gpt2, fused, 3 shards", root / "encoders" / "two")
    save_file(bert_tensors(np.random.default_rng(5), 3, 48), folder / "other.safetensors")
    hub.add("org/name", root)
    local = rows_of(qk.scan(folder))
    assert rows_of(qk.scan("hf://org/name/encoders/one")) == local
    assert rows_of(qk.scan(f"{hub.address}/org/name/tree/main/encoders/one")) == local
    assert rows_of(qk.scan("hf://org/name/encoders/one/other.safetensors")) != local
    message = refusal("org/name")
    assert "hf://org/name/encoders/one, hf://org/name/encoders/two" in message
    message = refusal("hf://org/name/decoders")
    assert "no file or folder 'decoders'" in message
    assert "hf://org/name/encoders/one/model.safetensors" in message
    assert "holds no weights" in refusal("hf://org/name/encoders/one/config.json")


def test_several_variants_are_listed(hub, tmp_path):
    folder = tmp_path / "m"
    folder.mkdir()
    for name in ("a", "b"):
        save_file(bert_tensors(np.random.default_rng(0)), folder / f"{name}.safetensors")
    hub.add("org/name", folder)
    assert "name one: hf://org/name/a.safetensors, hf://org/name/b.safetensors" in refusal()


def test_a_repository_without_weights(hub, tmp_path):
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "README.md").write_text("nothing")
    hub.add("org/name", tmp_path / "m")
    assert "no weights among its 1 files" in refusal()


# ---- revisions, cache, offline


def test_revisions_are_commits_in_the_record_and_steps_where_they_tell(hub, tmp_path):
    first = make("bert", tmp_path / "m1")
    second = write(tmp_path / "m2", bert_tensors(np.random.default_rng(9), 3, 48), MODELS["bert"][1])
    hub.add("org/name", first)
    hub.add("org/name", second, OTHER)
    hub.branches["step1000"] = OTHER
    old, new = qk.scan("org/name"), qk.scan("org/name", revision="step1000")
    assert (old.models[0].revision, new.models[0].revision) == (COMMIT, OTHER)
    assert (old.models[0].step, new.models[0].step) == (None, 1000)
    assert rows_of(old) == rows_of(qk.scan(first))
    assert rows_of(new) == rows_of(qk.scan(second))
    assert rows_of(qk.scan("hf://org/name@step1000")) == rows_of(new)
    assert rows_of(qk.scan("org/name", revision=OTHER)) == rows_of(new)
    resolved = {path for _, path, _ in hub.requests if "/resolve/" in path}
    assert all(f"/resolve/{COMMIT}/" in p or f"/resolve/{OTHER}/" in p for p in resolved)
    assert "'v9'" in refusal(revision="v9")
    assert "'v1'" in refusal("hf://org/name@v1", revision="v2")


def fill_cache(hub, repo="org/name"):
    from huggingface_hub import hf_hub_download

    folder = next(iter(hub.repositories[repo].values()))
    for file in folder.iterdir():
        hf_hub_download(repo, file.name, endpoint=hub.address)
    hub.requests.clear()
    hub.served.clear()


def test_what_the_cache_holds_is_read_without_the_network(hub, tmp_path, monkeypatch):
    from huggingface_hub import constants

    folder = make("llama, 5 shards", tmp_path / "m")
    hub.add("org/name", folder)
    local = rows_of(qk.scan(folder))
    fill_cache(hub)
    table = qk.scan("org/name", revision=COMMIT)
    assert (rows_of(table), table.models[0].revision) == (local, COMMIT)
    assert not hub.requests
    assert rows_of(qk.scan("org/name")) == local
    assert [path for _, path, _ in hub.requests] == ["/api/models/org/name/revision/main"]
    hub.close()  # no network: what the branch last was
    table = qk.scan("org/name")
    assert (rows_of(table), table.models[0].revision) == (local, COMMIT)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert qk.scan("org/name").models[0].revision == COMMIT
    message = refusal("org/other")
    assert "HF_HUB_OFFLINE" in message
    assert "hf download org/other" in message
    assert "no file or folder named 'org/other'" in message
    assert "v7" in refusal(revision="v7")


def test_shards_in_the_cache_are_not_fetched_again(hub, tmp_path):
    from huggingface_hub import hf_hub_download

    folder = make("llama, 5 shards", tmp_path / "m")
    hub.add("org/name", folder)
    shard = "model-00002-of-00005.safetensors"
    hf_hub_download("org/name", shard, endpoint=hub.address)
    hub.served.clear()
    assert rows_of(qk.scan("org/name")) == rows_of(qk.scan(folder))
    assert shard not in hub.served
    assert len(hub.served) > 3


def test_no_network_says_so_and_what_would_work(hub):
    hub.close()
    message = refusal("org/name")
    assert "cannot be reached" in message
    assert "no file or folder named 'org/name'" in message
    assert TOKEN not in message


# ---- refusals


def test_a_missing_model_is_told_with_both_readings(hub):
    for source in ("org/none", "gpt9"):
        message = refusal(source)
        assert f"no model '{source}' that you may see" in message
        assert "no file or folder named" in message
        assert "hf auth login" in message
    assert "no file or folder" not in refusal("hf://org/none")


def test_gated_private_and_disabled_models(hub, tmp_path):
    folder = make("bert", tmp_path / "m")
    hub.add("org/name", folder)
    hub.token = TOKEN
    hub.gated = True
    message = refusal()
    assert "gated" in message
    assert f"accept its terms at {hub.address}/org/name" in message
    assert "no token was given" in message
    message = refusal(token="hf_another")
    assert "403" in message
    assert "hf_another" not in message
    assert rows_of(qk.scan("org/name", token=TOKEN)) == rows_of(qk.scan(folder))
    hub.gated, hub.private = False, True
    assert "that you may see (status 401; no token" in refusal()
    assert "404; the token that was used" in refusal(token="hf_another")
    assert qk.scan("org/name", token=TOKEN).models
    hub.private, hub.disabled = False, True
    assert "disabled" in refusal(token=TOKEN)


def test_a_file_that_the_list_has_and_the_server_has_not(hub, tmp_path):
    hub.add("org/name", make("bert", tmp_path / "m"))
    hub.custom[f"/org/name/resolve/{COMMIT}/model.safetensors"] = lambda h: h._refuse(404, "EntryNotFound")
    message = refusal()
    assert "org/name/model.safetensors is not in the repository (status 404)" in message


@pytest.mark.parametrize("status", [401, 403, 404, 410])
@pytest.mark.parametrize("source", ["org/name", "an adapter", "diff", "sharded"])
def test_weights_that_are_refused_after_their_header(status, source, hub, tmp_path):
    from qkform.differ import diff

    folder = make("llama, 5 shards" if source == "sharded" else "bert", tmp_path / "m")
    hub.add("org/name", folder)
    file = "model-00001-of-00005.safetensors" if source == "sharded" else "model.safetensors"
    length = 8 + struct.unpack("<Q", (folder / file).read_bytes()[:8])[0]

    def answer(handler):
        begin = int(handler.headers["Range"].partition("=")[2].partition("-")[0])
        if begin < length:
            handler._file("org/name", COMMIT, file)
        else:
            handler._refuse(status, "GatedRepo" if status == 403 else "")

    hub.custom[f"/org/name/resolve/{COMMIT}/{file}"] = answer
    calls = {
        "an adapter": lambda: qk.scan(adapter_of("org/name", tmp_path / "adapter")),
        "diff": lambda: diff("org/name", "org/name"),
    }
    with pytest.raises(SourceError) as caught:
        calls.get(source, lambda: qk.scan("org/name"))()
    assert type(caught.value) is SourceError
    assert str(status) in str(caught.value)
    assert {401: "that you may see", 403: "accept its terms", 404: "not in the rep", 410: "answered"}[
        status
    ] in str(caught.value)


def adapter_of(base, folder):
    """An adapter on the queries of the first layer of `make("bert")`."""
    folder.mkdir()
    save_file(
        {
            "base_model.model.encoder.layer.0.attention.self.query.lora_A.weight": np.ones(
                (2, 48), np.float32
            ),
            "base_model.model.encoder.layer.0.attention.self.query.lora_B.weight": np.ones(
                (48, 2), np.float32
            ),
        },
        folder / "adapter_model.safetensors",
    )
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "base_model_name_or_path": base}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


def test_the_base_of_an_adapter_is_fetched_once(hub, tmp_path, monkeypatch):
    monkeypatch.setattr(ahead, "SMALL_BYTES", 0)
    folder = make("bert", tmp_path / "m")
    hub.add("org/name", folder)
    found = qk.scan(adapter_of("org/name", tmp_path / "adapter")).models
    weights, around = needed(folder)
    assert hub.bytes_of() <= 1.02 * weights + around
    assert found[0].bytes_read == hub.bytes_of()
    assert found[1].bytes_read == 0
    assert found[2].bytes_read < sum(p.stat().st_size for p in (tmp_path / "adapter").iterdir())
    assert found[0].rows == rows_of(qk.scan(folder))


def kinds(kind=QKFormError):
    return [kind, *(below for child in kind.__subclasses__() for below in kinds(child))]


def test_every_error_can_be_told_with_its_place():
    from qkform import errors

    for module in pkgutil.walk_packages(qk.__path__, "qkform."):
        if not module.name.endswith("__main__"):
            importlib.import_module(module.name)
    for kind in kinds():
        own = inspect.isfunction(kind.__init__)
        given = list(inspect.signature(kind.__init__).parameters.values())[1:] if own else []
        values = [{"int": 7, "Sequence[str]": ["a"]}.get(p.annotation, "words") for p in given]
        error = kind(*values or ["words"])
        told = errors.prefixed(error, "layer 3")
        assert isinstance(error, type(told))
        assert type(told) in vars(errors).values()
        assert str(told) == f"layer 3: {error}"
    assert remote.Refused in kinds()
    assert errors.prefixed(remote.Refused(404, "", "x"), "a").__class__ is SourceError
    assert errors.prefixed(errors.FormError("x"), "a").__class__ is errors.FormError
    source = Path(qk.__file__).parent
    assert not [p for p in source.rglob("*.py") if "type(error)(" in p.read_text()]


@pytest.mark.parametrize("bad", ["hf_with\nbreak", "hf with space", "hf_é"])
def test_a_token_that_cannot_be_one_is_refused_without_being_shown(bad, hub, tmp_path):
    hub.add("org/name", make("bert", tmp_path / "m"))
    message = refusal(token=bad)
    assert "the token holds characters" in message
    assert bad not in message
    assert not hub.requests


def test_the_token_goes_to_the_hub_and_to_no_other_host(hub, tmp_path, caplog):
    caplog.set_level(0)
    hub.add("org/name", make("llama, 5 shards", tmp_path / "m"))
    hub.cdn, hub.token, hub.gated = True, TOKEN, True
    table = qk.scan("org/name", token=TOKEN)
    assert len(hub.cdn_requests) > 5
    assert not any("authorization" in headers for headers in hub.cdn_requests)
    asked = [h for _, path, h in hub.requests if path.startswith("/org/name")]
    assert any(h.get("authorization") == f"Bearer {TOKEN}" for h in asked)
    assert TOKEN not in table.to_json()
    assert TOKEN not in caplog.text
    assert TOKEN not in repr(Options(token=TOKEN))
    hub_requests = [p for _, p, h in hub.requests if "authorization" in h and p.endswith(".safetensors")]
    assert len(hub_requests) < len(hub.cdn_requests)  # an address that the hub gave out is asked directly


def test_an_expired_address_is_asked_for_again(hub, tmp_path):
    data, targets = file_of(hub, tmp_path, 1_000)
    hub.cdn = True
    reader = AheadReader(Web(None), targets)
    assert (reader.read(Path("x"), 0, 10) == data[:10]).all()
    hub.sign = "2"
    assert (reader.read(Path("x"), 10, 10) == data[10:20]).all()


# ---- files that ranges cannot serve


def test_other_formats_say_what_would_be_downloaded_and_do_it_with_download(hub, tmp_path, monkeypatch):
    from qkform.checkpoints import hub as hub_module

    folder = tmp_path / "m"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(BERT_CONFIG))
    (folder / "pytorch_model.bin").write_bytes(b"x" * 2_500_000)
    (folder / "training_args.bin").write_bytes(b"y")
    (folder / "tf_model.h5").write_bytes(b"z")
    hub.add("org/name", folder)
    message = refusal()
    assert "--download would fetch 2.5 MB (pytorch_model.bin, config.json)" in message
    assert str(tmp_path / "cache") in message
    assert not hub.served
    opened = []

    def open_there(path, source):
        opened.append((path, path.read_bytes()[:1], sorted(p.name for p in path.parent.iterdir()), source))
        return open_checkpoint(make("bert", tmp_path / "other"), source=source)

    monkeypatch.setattr(hub_module, "open_checkpoint", open_there)
    assert qk.scan("org/name", download=True).models[0].revision == COMMIT
    ((path, start, names, source),) = opened
    assert path.name == "pytorch_model.bin"
    assert (start, names, source) == (b"x", ["config.json", "pytorch_model.bin"], "org/name")


def test_a_gguf_file_is_downloaded_and_read(hub, tmp_path):
    folder = tmp_path / "m"
    folder.mkdir()
    gguf_file(folder, "llama", None).rename(folder / "a.gguf")
    (folder / "b.gguf").write_bytes((folder / "a.gguf").read_bytes())
    hub.add("org/name", folder)
    assert "name one: hf://org/name/a.gguf, hf://org/name/b.gguf" in refusal()
    assert "--download" in refusal("hf://org/name/a.gguf")
    table = qk.scan("hf://org/name/a.gguf", download=True)
    assert rows_of(table) == rows_of(qk.scan(folder / "a.gguf"))
    assert "b.gguf" not in hub.served


FOLDERS = {  # files of a folder -> the one that is read, None where several are
    "a tokenizer beside": (["weights.bin", "tokenizer.bin"], "weights.bin"),
    "a vocabulary beside": (["model.pt", "vocab.bin"], "model.pt"),
    "a trainer's checkpoint": (["model.ckpt"], "model.ckpt"),
    "two of a kind": (["a.pt", "b.bin"], None),
    "a trainer's state": (["pytorch_model.bin", "optimizer.pt", "training_args.bin"], "pytorch_model.bin"),
    "an npz": (["x.npz", "scaler.pt"], "x.npz"),
}


@pytest.mark.parametrize("case", FOLDERS)
def test_a_repository_is_read_as_its_folder_is(case, hub, tmp_path):
    import torch

    files, read = FOLDERS[case]
    folder = tmp_path / "m"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(BERT_CONFIG))
    tensors = bert_tensors(np.random.default_rng(4))
    for file in files:
        if file.endswith("npz"):
            np.savez(folder / file, **tensors)
        else:
            torch.save({name: torch.from_numpy(t) for name, t in tensors.items()}, folder / file)
    hub.add("org/name", folder)
    if read is None:
        with pytest.raises(SourceError, match="name one"):
            qk.scan(folder)
        assert "name one: " in refusal(download=True)
        return
    assert f"only {read}; --download" in refusal()
    local = rows_of(qk.scan(folder))
    assert local == rows_of(qk.scan(folder / read))
    assert rows_of(qk.scan("org/name", download=True)) == local
    assert {file for file in hub.served if not file.endswith("json")} == {read}
    assert rows_of(qk.scan("org/name")) == local  # out of the cache


LISTS = {  # files of a repository, what is named of it -> what is fetched and what is opened; None: several
    "onnx": (
        ["config.json", "onnx/model.onnx", "onnx/model.onnx_data", "onnx/model_fp16.onnx"],
        "onnx",
        (["onnx/model.onnx", "onnx/model.onnx_data", "config.json"], "onnx/model.onnx"),
    ),
    "a split gguf": (
        ["a-00002-of-00002.gguf", "a-00001-of-00002.gguf"],
        "",
        (["a-00001-of-00002.gguf", "a-00002-of-00002.gguf"], "a-00001-of-00002.gguf"),
    ),
    "one of two split gguf": (
        ["q/a-00002-of-00002.gguf", "q/a-00001-of-00002.gguf", "q/b-00001-of-00001.gguf"],
        "q/a-00001-of-00002.gguf",
        (["q/a-00001-of-00002.gguf", "q/a-00002-of-00002.gguf"], "q/a-00001-of-00002.gguf"),
    ),
    "two gguf": (["a-00001-of-00002.gguf", "a-00002-of-00002.gguf", "b.gguf"], "", None),
    "shards of no index": (
        ["m-1-of-2.bin", "m-2-of-2.bin", "optimizer.bin"],
        "",
        (["m-1-of-2.bin", "m-2-of-2.bin"], ""),
    ),
    "an adapter and several files": (
        ["adapter_config.json", "adapter_model.bin", "a.pt", "b.pt"],
        "",
        (["adapter_config.json", "adapter_model.bin"], ""),
    ),
}


@pytest.mark.parametrize("case", LISTS)
def test_what_of_a_list_is_fetched(case):
    files, path, expected = LISTS[case]
    sizes = dict.fromkeys(files, 5)
    if expected is None:
        with pytest.raises(SourceError, match=r"name one: hf://o/n/a-00001-of-00002.gguf, hf://o/n/b.gguf"):
            listed(sizes, HubName("o/n", path=path), COMMIT)
        return
    found = listed(sizes, HubName("o/n", path=path), COMMIT)
    assert (list(found.files), found.open) == expected


def test_shards_of_a_pickled_model_are_those_of_its_index(hub, tmp_path):
    import torch

    folder = tmp_path / "m"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(BERT_CONFIG))
    tensors = bert_tensors(np.random.default_rng(4))
    places = {}
    for i, names in enumerate(np.array_split(list(tensors), 2)):
        file = f"model-0000{i}-of-2.bin"
        torch.save({str(n): torch.from_numpy(tensors[str(n)]) for n in names}, folder / file)
        places |= {str(n): file for n in names}
    index = folder / "pytorch_model.bin.index.json"
    index.write_text(json.dumps({"weight_map": places}))
    hub.add("org/name", folder)
    assert "only 2 .bin files; --download" in refusal()
    assert rows_of(qk.scan("org/name", download=True)) == rows_of(qk.scan(folder))
    index.write_text(json.dumps({"weight_map": places | {"x": "model-00002-of-2.bin"}}))
    hub.repositories = {"org/name": {OTHER: folder}}
    hub.branches["main"] = OTHER
    assert "which the repository does not have" in refusal(download=True)
    index.write_text(json.dumps({"weight_map": {"x": "../x.bin"}}))
    assert "plain file name in the same folder" in refusal(download=True)


@pytest.mark.parametrize("beside", [True, False], ids=["a model beside it", "alone"])
def test_an_adapter_and_a_model_are_told_apart_alike_everywhere(beside, hub, tmp_path, monkeypatch):
    from huggingface_hub import constants

    base = make("bert", tmp_path / "base")
    folder = adapter_of(str(base), tmp_path / "m")
    if beside:
        save_file(bert_tensors(np.random.default_rng(6), 3, 48), folder / "model.safetensors")
        (folder / "config.json").write_text((base / "config.json").read_text())
    hub.add("org/name", folder)
    expected = qk.scan(folder)
    assert len(expected.models) == (1 if beside else 3)

    def same(table):
        assert [m.rows for m in table.models] == [m.rows for m in expected.models]

    same(qk.scan("org/name"))
    fill_cache(hub)
    same(qk.scan("org/name"))
    same(qk.scan("org/name", revision=COMMIT))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    same(qk.scan("org/name"))


def test_a_damaged_file_in_the_cache_is_told_and_a_missing_one_fetched(hub, tmp_path, monkeypatch):
    from huggingface_hub import constants

    folder = make("llama, 5 shards", tmp_path / "m")
    hub.add("org/name", folder)
    local = rows_of(qk.scan(folder))
    fill_cache(hub)
    shard = next((tmp_path / "cache").rglob("model-00002-of-00005.safetensors"))
    shard.unlink()
    assert rows_of(qk.scan("org/name", revision=COMMIT)) == local
    assert "model-00002-of-00005.safetensors" in hub.served
    shard.write_bytes(b"\0" * 50)
    hub.requests.clear()
    for offline in (False, True):
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", offline)
        for revision in (COMMIT, None):
            message = refusal(revision=revision)
            assert "model-00002-of-00005.safetensors" in message
            assert "has not all of" not in message
            if revision:
                assert not hub.requests
        hub.requests.clear()
    shard.unlink()
    assert "has not all of" in refusal()


def test_a_path_is_never_looked_up(hub, tmp_path):
    hub.add("org/name", make("bert", tmp_path / "m"))
    message = refusal(Path("org/name"))
    assert "give it as text ('org/name'), or as hf://org/name" in message
    assert not hub.requests


def test_a_refused_download_is_told_in_the_same_words(hub, tmp_path):
    folder = tmp_path / "m"
    folder.mkdir()
    (folder / "model.gguf").write_bytes(b"GGUF")
    hub.add("org/name", folder)
    hub.gated, hub.token = True, TOKEN
    assert "accept its terms" in refusal(download=True)


# ---- hostile servers


def test_an_index_that_leads_out_of_the_repository_is_refused(hub, tmp_path):
    folder = make("llama, 5 shards", tmp_path / "m")
    index = folder / "model.safetensors.index.json"
    for shard in ("../other/model.safetensors", "/etc/passwd", "..", "a/b.safetensors", "http://x/y", 7):
        index.write_text(json.dumps({"weight_map": {"a.weight": shard}}))
        hub.repositories = {"org/name": {COMMIT: folder}}
        hub.served.clear()
        assert "plain file name in the same folder" in refusal()
    index.write_text(json.dumps({"weight_map": {"a.weight": "model-00009-of-00005.safetensors"}}))
    assert "which the repository does not have" in refusal()


def test_a_list_with_names_that_lead_out_is_not_followed(hub):
    def answer(handler):
        files = ["../../x/model.safetensors", "/model.safetensors", "a\\b.safetensors", "a//b", 5, None]
        handler._json({"sha": COMMIT, "siblings": [{"rfilename": f, "size": 9} for f in files]})

    hub.custom["/api/models/org/name/revision/main"] = answer
    assert "no weights among its 0 files" in refusal()
    hub.custom["/api/models/org/name/revision/main"] = lambda h: h._json({"sha": "../..", "siblings": []})
    assert "without a commit" in refusal()
    hub.custom["/api/models/org/name/revision/main"] = lambda h: h._json([1])
    assert "without a commit" in refusal()


def send(handler, body, **headers):
    handler.send_response(206 if "Content-Range" in headers else 200)
    for key, value in headers.items():
        handler.send_header(key.replace("_", "-"), value)
    handler.send_header("Connection", "close")  # as no length is given
    handler.close_connection = True
    handler.end_headers()
    if callable(body):
        body(handler)
    else:
        handler.wfile.write(body)


def endless(handler):
    block = b" " * 2**20
    while True:
        handler.wfile.write(block)


def weights_answer(hub, folder, answer):
    hub.add("org/name", folder)
    hub.custom[f"/org/name/resolve/{COMMIT}/model.safetensors"] = answer


def test_endless_answers_are_cut_off(hub, tmp_path, monkeypatch):
    from qkform.checkpoints import hub as hub_module

    monkeypatch.setattr(hub_module, "MAX_JSON_BYTES", 4 * 2**20)
    folder = make("bert", tmp_path / "m")
    list_address = "/api/models/org/name/revision/main"
    tracemalloc.start()
    hub.custom[list_address] = lambda h: send(h, endless)
    assert "longer than" in refusal()
    del hub.custom[list_address]
    hub.add("org/name", folder)
    hub.custom[f"/org/name/resolve/{COMMIT}/config.json"] = lambda h: send(h, endless)
    assert "longer than" in refusal()
    del hub.custom[f"/org/name/resolve/{COMMIT}/config.json"]
    weights_answer(hub, folder, lambda h: send(h, endless))
    assert "header" in refusal()
    assert tracemalloc.get_traced_memory()[1] < 100 * 2**20
    tracemalloc.stop()


def test_a_header_of_2_to_the_60_bytes(hub, tmp_path):
    folder = make("bert", tmp_path / "m")
    data = struct.pack("<Q", 2**60) + bytes(100)
    (folder / "model.safetensors").write_bytes(data)
    hub.add("org/name", folder)
    assert "announces a header of 1,152,921,504,606,846,976 bytes" in refusal()
    assert hub.bytes_of("safetensors") <= 8


@pytest.mark.parametrize(
    "content", [b"", b"abc", b"version https://git-lfs.github.com/spec/v1\noid sha256:0"]
)
def test_files_that_are_no_safetensors(content, hub, tmp_path):
    folder = make("bert", tmp_path / "m")
    (folder / "model.safetensors").write_bytes(content)
    hub.add("org/name", folder)
    assert "model.safetensors" in refusal()


def test_compressed_answers_are_refused(hub, tmp_path):
    folder = make("bert", tmp_path / "m")
    body = gzip.compress(bytes(10**7))
    hub.add("org/name", folder)
    for file in ("config.json", "model.safetensors"):
        address = f"/org/name/resolve/{COMMIT}/{file}"
        hub.custom[address] = lambda h: send(h, body, Content_Encoding="gzip", Content_Length=str(len(body)))
        message = refusal()
        assert "compressed" in message
        assert file in message
        del hub.custom[address]


def test_a_redirect_loop_ends(hub, tmp_path):
    folder = make("bert", tmp_path / "m")

    def again(handler):
        handler.send_response(302)
        handler.send_header("Location", handler.path)
        handler.send_header("Content-Length", "0")
        handler.end_headers()

    weights_answer(hub, folder, again)
    assert "redirect" in refusal().lower()
    assert len(hub.requests) < 40


@pytest.mark.parametrize("location", ["file:///etc/passwd", "ftp://x/y", "http://[bad", "//"])
def test_a_redirect_to_something_else_is_refused(location, hub, tmp_path):
    folder = make("bert", tmp_path / "m")

    def away(handler):
        handler.send_response(302)
        handler.send_header("Location", location)
        handler.send_header("Content-Length", "0")
        handler.end_headers()

    weights_answer(hub, folder, away)
    assert "org/name/model.safetensors cannot be fetched" in refusal()


# ---- servers that never finish the head of their answer


def drips_its_header(handler):
    handler.wfile.write(b"HTTP/1.1 206 Partial Content\r\nX-Slow: ")
    while True:
        time.sleep(0.05)
        handler.wfile.write(b"x")
        handler.wfile.flush()


def continues(handler):
    while True:
        handler.wfile.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        time.sleep(0.01)


def drips_its_chunk(handler):
    handler.wfile.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5;x=")
    while True:
        time.sleep(0.05)
        handler.wfile.write(b"x")


@pytest.mark.parametrize("answer", [drips_its_header, continues, drips_its_chunk])
@pytest.mark.parametrize("what", ["list", "weights"])
def test_an_answer_that_never_begins_is_given_up(answer, what, hub, tmp_path, monkeypatch):
    monkeypatch.setattr(remote, "ANSWER_SECONDS", 0.6)
    folder = make("bert", tmp_path / "m")
    if what == "weights":
        weights_answer(hub, folder, answer)
    else:
        hub.custom["/api/models/org/name/revision/main"] = answer
    begin = time.monotonic()
    assert "no answer in time" in refusal()
    assert time.monotonic() - begin < 60
    hub.custom.clear()  # and the client serves again
    hub.add("org/name", folder)
    monkeypatch.setattr(remote, "ANSWER_SECONDS", 30.0)
    assert len(qk.scan("org/name").rows) == 12


def test_a_slow_body_is_not_taken_for_no_answer(hub, tmp_path, monkeypatch):
    monkeypatch.setattr(remote, "ANSWER_SECONDS", 2.0)
    folder = make("bert", tmp_path / "m")
    content = (folder / "config.json").read_bytes()

    def slow(handler):
        handler.send_response(200)
        handler.send_header("Content-Length", str(len(content)))
        handler.end_headers()
        for i in range(0, len(content), len(content) // 4):
            time.sleep(0.7)
            handler.wfile.write(content[i : i + len(content) // 4])

    hub.add("org/name", folder)
    hub.custom[f"/org/name/resolve/{COMMIT}/config.json"] = slow
    assert len(qk.scan("org/name").rows) == 12


def large_header(handler):
    handler.wfile.write(b"HTTP/1.1 206 Partial Content\r\nX-Large: " + b"x" * 200_000 + b"\r\n\r\n")


def control_characters(handler):
    handler.wfile.write(b"HTTP/1.1 302 Found\r\nLocation: http://h/\x01\x02\r\nContent-Length: 0\r\n\r\n")


def a_part_of_what(handler):
    handler.wfile.write(b"HTTP/1.1 206 Partial Content\r\nContent-Length: 8\r\n\r\n12345678")


@pytest.mark.parametrize("answer", [large_header, control_characters, a_part_of_what])
def test_what_will_not_pass_is_not_tried_again(answer, hub, tmp_path):
    asked = []

    def counted(handler):
        asked.append(handler.path)
        handler.close_connection = True
        answer(handler)

    weights_answer(hub, make("bert", tmp_path / "m"), counted)
    assert "cannot be fetched" in refusal()
    assert len(asked) == 1


def test_a_trickle_is_given_up(hub, tmp_path, monkeypatch):
    monkeypatch.setattr(remote, "TRICKLE_SECONDS", 0.05)
    monkeypatch.setattr(remote, "TRIES", 1)
    folder = make("bert", tmp_path / "m")

    def drip(handler):
        handler.send_response(206)
        handler.send_header("Content-Range", f"bytes 0-7/{(folder / 'model.safetensors').stat().st_size}")
        handler.send_header("Content-Length", "8")
        handler.end_headers()
        for _ in range(8):
            handler.wfile.write(b"\0")
            time.sleep(0.04)

    weights_answer(hub, folder, drip)
    assert "too slow" in refusal()


def test_an_index_of_a_quarter_of_a_million_entries(hub, tmp_path):
    folder = make("llama, 5 shards", tmp_path / "m")
    index = folder / "model.safetensors.index.json"
    places = json.loads(index.read_text())["weight_map"]
    more = {f"x.{i}": "model-00001-of-00005.safetensors" for i in range(250_000)}
    index.write_text(json.dumps({"weight_map": places | more}))
    hub.add("org/name", folder)
    start = time.monotonic()
    assert rows_of(qk.scan("org/name"))  # what it adds is never looked at
    index.write_text(json.dumps({"weight_map": {f"x.{i}": f"s{i}" for i in range(11_000)}}))
    assert "over more than 10,000 files" in refusal()
    assert time.monotonic() - start < 60


def test_a_config_that_is_no_object(hub, tmp_path):
    hub.add("org/name", write(tmp_path / "m", bert_tensors(np.random.default_rng(0)), [1, 2]))
    with pytest.raises(ConfigError, match="JSON list"):
        qk.scan("org/name")


# ---- the header's own validation, against the format's library


def sound(header: bytes, size: int) -> bool:
    try:
        parse_header(header, size, Path("x"))
    except CheckpointError:
        return False
    return True


def library_opens(path: Path) -> bool:
    try:
        with safe_open(path, framework="numpy"):
            return True
    except (SafetensorError, ValueError, OSError):
        return False


entries = st.builds(
    lambda dtype, shape, begin, length, extra: {
        "dtype": dtype, "shape": shape, "data_offsets": [begin, begin + length, *extra]
    },
    st.sampled_from([*BITS, "Q7"]),
    st.lists(st.integers(-1, 4), max_size=3),
    st.integers(-1, 40),
    st.integers(-1, 40),
    st.sampled_from([[], [], [], [1]]),
)  # fmt: skip


@st.composite
def packed(draw):
    """A header whose tensors lie end to end, as sound files have them."""
    header, at = {}, 0
    for i in range(draw(st.integers(0, 4))):
        dtype = draw(st.sampled_from(list(BITS)))
        shape = draw(st.lists(st.integers(0, 4), max_size=3))
        bits = BITS[dtype] * int(np.prod(shape, dtype=int))
        end = at + bits // 8
        header[f"t{draw(st.integers(0, 99))}{i}"] = {
            "dtype": dtype,
            "shape": shape,
            "data_offsets": [at, end],
        }
        at = end
    if draw(st.booleans()):
        header["__metadata__"] = draw(st.one_of(st.none(), st.dictionaries(st.text(), st.text(), max_size=2)))
    return json.dumps(header).encode(), at


def mutated(draw):
    raw, data = draw(packed())
    kind = draw(st.integers(0, 4))
    if kind == 0 and raw:
        at = draw(st.integers(0, len(raw) - 1))
        raw = raw[:at] + draw(st.binary(min_size=1, max_size=3)) + raw[at + 1 :]
    elif kind == 1:
        raw = json.dumps(draw(st.dictionaries(st.sampled_from("abc"), entries, max_size=3))).encode()
        data = draw(st.integers(0, 60))
    elif kind == 2:
        data += draw(st.integers(-2, 2))
    elif kind == 3:
        odd = ["NaN", "-0", "1.0", "1e2", "true", "null", '"\\ud800"', "18446744073709551616", "[[1]]", "{}"]
        word = draw(st.sampled_from(["1", "0", "2", "[", '"']))
        raw = raw.decode().replace(word, draw(st.sampled_from(odd)), 1).encode()
    return raw, max(data, 0)


@given(st.data())
def test_what_the_formats_library_refuses_is_refused(tmp_path_factory, data):
    raw, nbytes = mutated(data.draw)
    path = tmp_path_factory.getbasetemp() / "mutated.safetensors"
    path.write_bytes(struct.pack("<Q", len(raw)) + raw + bytes(nbytes))
    if sound(raw, 8 + len(raw) + nbytes):
        assert library_opens(path), raw


@given(packed())
def test_what_the_formats_library_writes_is_read(tmp_path_factory, case):
    raw, nbytes = case
    path = tmp_path_factory.getbasetemp() / "packed.safetensors"
    path.write_bytes(struct.pack("<Q", len(raw)) + raw + bytes(nbytes))
    assert sound(raw, 8 + len(raw) + nbytes) == library_opens(path), raw


def whole(entry_text: str, size: int = 4) -> tuple[bytes, int]:
    raw = ('{"a":' + entry_text + "}").encode()
    return raw, 8 + len(raw) + size


GOOD = '{"dtype":"F32","shape":[1],"data_offsets":[0,4]}'


@pytest.mark.parametrize(
    ("raw", "size", "word"),
    [
        (*whole(GOOD.replace("[1]", "[-0]")), "-0"),
        (*whole(GOOD.replace("[1]", "[1.0]")), "1.0"),
        (*whole(GOOD.replace("[1]", "[true]")), "whole numbers"),
        (*whole(GOOD.replace("[1]", "[NaN]")), "NaN"),
        (*whole(GOOD.replace("0,4]", "4,0]")), "data_offsets"),
        (*whole(GOOD.replace("0,4]", "0,4,4]")), "data_offsets"),
        (*whole(GOOD.replace('"F32"', '"f32"')), "dtype"),
        (*whole(GOOD.replace('"F32"', "7")), "dtype"),
        (*whole(GOOD[:-1] + ',"dtype":"F32"}'), "twice"),
        (*whole(GOOD + ',"a":' + GOOD), "twice"),
        (*whole('["F32",[1],[0,4]]'), "described by"),
        (*whole(GOOD.replace("[1]", f"[{2**63},{2**63},0]"), 0), "more bytes"),
        (*whole(GOOD + ',"\\ud800":{"dtype":"U8","shape":[0],"data_offsets":[4,4]}'), "Unicode"),
        (*whole(GOOD + ',"__metadata__":{"a":1}'), "metadata"),
        (b"\xef\xbb\xbf{}", 13, "starts with"),
        (" {}".encode("utf-16-le"), 14, "starts with"),
        (b"{}", 11, "no tensor"),
        (b'{"a":' * 100_000, 500_008, "nested"),
        (*whole(GOOD + ',"b":' + GOOD, 8), "overlaps"),  # in all as many bytes as the file has
        (*whole(GOOD.replace("0,4", "4,8") + ',"b":' + GOOD.replace("0,4", "4,8"), 8), "hole"),
        (*whole(GOOD, 5), "no tensor"),
        (*whole(GOOD, 3), "truncated"),
        (*whole('{"dtype":"F4","shape":[3],"data_offsets":[0,1]}', 1), "bits"),
    ],
)
def test_a_header_that_is_not_sound(raw, size, word, tmp_path):
    with pytest.raises(CheckpointError, match=word):
        parse_header(raw, size, Path("x"))


def test_a_good_header_is_read():
    raw, size = whole(GOOD)
    info = parse_header(raw, size, Path("x"))["a"]
    assert (info.shape, info.dtype, info.offset, info.nbytes) == ((1,), "F32", 8 + len(raw), 4)
    assert header_length(struct.pack("<Q", len(raw)), size, Path("x")) == len(raw)


def test_a_file_that_shrinks_after_its_header_was_read_is_an_error(tmp_path):
    folder = make("bert", tmp_path / "m")
    checkpoint = open_checkpoint(folder)
    name = next(n for n in checkpoint.tensors if n.endswith("layer.2.attention.self.value.weight"))
    os.truncate(folder / "model.safetensors", 5_000)
    with pytest.raises(CheckpointError, match="truncated"):
        checkpoint.read(name)


# ---- the command


def command(hub, *arguments, cwd, **env):
    return subprocess.run(
        [sys.executable, "-m", "qkform", "scan", *arguments],
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env={
            **os.environ,
            "HF_HUB_OFFLINE": "0",
            "HF_ENDPOINT": hub.address,
            "HF_HOME": str(cwd / "home"),
            **env,
        },
    )


def test_the_command_scans_a_hub_id_with_its_options(hub, tmp_path):
    folder = make("bert", tmp_path / "m")
    hub.add("org/name", folder)
    hub.add("org/name", folder, OTHER)
    hub.branches |= {"step1": COMMIT, "step2": OTHER}
    hub.token, hub.private = TOKEN, True
    run = command(
        hub, "org/name", "--revision", "step1,step2", "--format", "json", "--token", TOKEN, cwd=tmp_path
    )
    assert run.returncode == 0, run.stderr
    models = json.loads(run.stdout)["models"]
    assert [(m["revision"], m["step"]) for m in models] == [(COMMIT, 1), (OTHER, 2)]
    assert TOKEN not in run.stdout + run.stderr
    run = command(hub, "org/name", cwd=tmp_path, HF_TOKEN=TOKEN, HF_DEBUG="1")
    assert run.returncode == 0
    assert TOKEN not in run.stdout + run.stderr
    run = command(hub, "org/name", cwd=tmp_path)
    assert run.returncode == 2
    assert len(run.stderr.strip().splitlines()) == 1
    assert "hf auth login" in run.stderr


def test_a_local_source_has_no_revision(tmp_path):
    make("bert", tmp_path / "m")
    with pytest.raises(ConfigError, match="revision"):
        qk.scan(tmp_path / "m", revision="main")


def test_files_are_scanned_without_the_hubs_client(tmp_path):
    make("bert", tmp_path / "m")
    code = (
        "import sys, qkform; qkform.scan('m'); print([m for m in sys.modules if m.startswith('huggingface')])"
    )
    run = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True, timeout=60
    )
    assert run.stdout.strip() == "[]"


def test_open_hub_refuses_what_is_no_id():
    with pytest.raises(SourceError, match="not a hub id"):
        open_hub("a/b/c", revision=None, token=None, download=False, source="a/b/c")
