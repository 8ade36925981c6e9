"""From files to rows: what is read, what the rows say, how tables are saved and loaded."""

from __future__ import annotations

import json
import math

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

import qkform as qk
from qkform.errors import ConfigError, LayoutError, MissingExtra, RecordError
from qkform.form import reference
from qkform.records import COLUMNS, ScoreTable
from qkform.report.terminal import cost
from qkform.steps import step_of
from tests.conftest import BERT_CONFIG, bert_tensors


def w_of(tensors, layer, head, d_head=4):
    path = f"encoder.layer.{layer}.attention.self"
    rows = slice(head * d_head, (head + 1) * d_head)
    q, k = (tensors[f"{path}.{n}.weight"][rows].astype(np.float64) for n in ("query", "key"))
    return q.T @ k


def test_rows_are_the_scores_of_the_stored_matrices(write_model):
    tensors = bert_tensors(np.random.default_rng(0), dtype=np.float64)
    table = qk.scan(write_model(tensors))
    assert len(table.layers) == 2
    assert len(table.heads) == 6
    for row in table.rows:
        heads = range(3) if row["head"] is None else [row["head"]]
        w = sum(w_of(tensors, row["layer"], h) for h in heads)
        for name in ("symmetry", "symmetry_z", "directionality", "row_excess", "column_excess", "norm"):
            assert row[name] == pytest.approx(getattr(reference, name)(w), abs=1e-10)
        assert row["effective_rank"] == pytest.approx(reference.effective_rank(w))
        positive, negative, energy = reference.signature(w)
        assert (row["positive_directions"], row["negative_directions"]) == (positive, negative)
        assert row["positive_energy"] == pytest.approx(energy)
        assert row["module"] == f"encoder.layer.{row['layer']}.attention.self"
        assert row["component"] == "encoder.layer"
        assert row["mask"] == "bidirectional"
        assert row["kv_head"] == row["head"]
        assert (row["d_model"], row["d_head"]) == (12, 4)
        assert 0 < row["bias_share"] < 1


def test_layers_give_the_forms_that_scan_scores(bert):
    rows = qk.scan(bert).layers
    for layer, row in zip(qk.layers(bert), rows, strict=True):
        assert layer.module == row["module"]
        assert layer.form.symmetry().shape == (3,)
        assert layer.form.total().symmetry()[0] == row["symmetry"]


@pytest.mark.parametrize("dtype", [np.float64, np.float32, np.float16, ml_dtypes.bfloat16], ids=str)
def test_every_float_type_is_read(dtype, write_model):
    tensors = bert_tensors(np.random.default_rng(0), dtype=dtype)
    rows = qk.scan(write_model(tensors)).heads
    tolerance = 1e-10 if dtype is np.float64 else 1e-5
    for row in rows:
        w = w_of(tensors, row["layer"], row["head"])
        assert row["symmetry"] == pytest.approx(reference.symmetry(w), abs=tolerance)


def test_only_q_and_k_are_read(write_model):
    tensors = bert_tensors(np.random.default_rng(0))
    tensors["embeddings.weight"] = np.ones((5000, 12), dtype=np.float32)
    folder = write_model(tensors)
    model = qk.scan(folder).models[0]
    needed = sum(t.nbytes for n, t in tensors.items() if "query" in n or "key" in n)
    header = 8 + int.from_bytes((folder / "model.safetensors").read_bytes()[:8], "little")
    assert model.bytes_read == needed + header - 8 + len((folder / "config.json").read_bytes())


def test_values_of_a_fused_weight_are_not_read(write_model):
    config = {"model_type": "phi3", "hidden_size": 12, "num_attention_heads": 3, "num_key_value_heads": 1}
    w = np.random.default_rng(0).normal(size=(20, 12)).astype(np.float32)
    folder = write_model({"layers.0.self_attn.qkv_proj.weight": w}, config)
    model = qk.scan(folder).models[0]
    header = int.from_bytes((folder / "model.safetensors").read_bytes()[:8], "little")
    assert model.bytes_read == 16 * 12 * 4 + header + len((folder / "config.json").read_bytes())
    (layer,) = qk.layers(folder)
    np.testing.assert_array_equal(layer.form.w_q, w[:12].reshape(3, 4, 12).swapaxes(1, 2))
    np.testing.assert_array_equal(layer.form.w_k, w[12:16].reshape(1, 4, 12).swapaxes(1, 2))


def test_the_index_decides_where_a_tensor_is_read(write_model, tmp_path):
    """A stale copy of a tensor in another shard is not read."""
    tensors = bert_tensors(np.random.default_rng(0))
    want = qk.scan(write_model(tensors)).models[0].rows
    folder = tmp_path / "sharded"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(BERT_CONFIG))
    save_file(tensors, folder / "right.safetensors")
    save_file({n: 0 * t for n, t in tensors.items()} | {"z": np.ones(1)}, folder / "zz.safetensors")
    index = {"weight_map": dict.fromkeys(tensors, "right.safetensors") | {"z": "zz.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert qk.scan(folder).models[0].rows == want


def test_model_safetensors_is_the_model_of_its_folder(write_model):
    tensors = bert_tensors(np.random.default_rng(0))
    folder = write_model(tensors)
    want = qk.scan(folder).models[0].rows
    save_file({n: 0 * t for n, t in tensors.items()}, folder / "adapter.safetensors")
    assert qk.scan(folder).models[0].rows == want


def test_layers_hold_their_forms_no_longer_than_they_are_held(bert):
    import weakref

    forms = []
    for layer in qk.layers(bert):
        assert all(ref() is None for ref in forms)
        forms.append(weakref.ref(layer.form))
        del layer
    assert len(forms) == 2


@pytest.mark.parametrize("deviations", [1.0, 2.0])
def test_the_null_band_is_mean_and_exact_deviation(bert, deviations):
    from qkform.form import null_variance
    from qkform.records import null_band

    for row in qk.scan(bert).rows:
        low, high = null_band(row, deviations)
        std = null_variance(row["d_model"], row["effective_rank"]) ** 0.5
        assert (low + high) / 2 == pytest.approx(1 / row["d_model"], abs=1e-9)
        assert (high - low) / 2 == pytest.approx(deviations * std, rel=1e-6)


def test_one_missing_layer_is_reported(write_model):
    folder = write_model(bert_tensors(np.random.default_rng(0)), {**BERT_CONFIG, "num_hidden_layers": 3})
    assert [s["module"] for s in qk.scan(folder).models[0].skipped] == ["encoder.layer"]


def test_heads_of_another_head_dim_than_the_config_are_refused(write_model):
    with pytest.raises(ConfigError, match="hidden_size"):
        qk.scan(write_model(bert_tensors(np.random.default_rng(0)), {**BERT_CONFIG, "hidden_size": 24}))


def test_a_huge_form_has_a_reason_for_its_norm(write_model):
    tensors = bert_tensors(np.random.default_rng(0), dtype=np.float64)
    rows = qk.scan(write_model({n: t * 1e180 for n, t in tensors.items()})).rows
    assert all(r["norm"] is None and "range" in r["reason"] and r["symmetry"] is not None for r in rows)


@pytest.mark.parametrize("source", ["", "~no-such-user-here/m"])
def test_a_source_that_is_no_path_is_refused(source):
    with pytest.raises(qk.errors.SourceError):
        qk.scan(source)


def test_shards_with_and_without_an_index_equal_the_single_file(write_model, tmp_path):
    tensors = bert_tensors(np.random.default_rng(0))
    want = qk.scan(write_model(tensors)).models[0].rows
    folder = tmp_path / "sharded"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(BERT_CONFIG))
    parts = [{n: t for i, (n, t) in enumerate(sorted(tensors.items())) if i % 2 == j} for j in range(2)]
    names = [f"model-0000{j + 1}-of-00002.safetensors" for j in range(2)]
    for part, name in zip(parts, names, strict=True):
        save_file(part, folder / name)
    assert qk.scan(folder).models[0].rows == want
    index = {"weight_map": {n: name for part, name in zip(parts, names, strict=True) for n in part}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert qk.scan(folder).models[0].rows == want
    assert qk.scan(folder / "model.safetensors.index.json").models[0].rows == want
    (folder / names[1]).unlink()
    with pytest.raises(qk.errors.CheckpointError, match="incomplete"):
        qk.scan(folder)


def test_a_link_to_a_shard_elsewhere_is_followed(write_model, tmp_path):
    """The hub's cache keeps files as links to blobs outside the snapshot folder."""
    folder = write_model(bert_tensors(np.random.default_rng(0)))
    want = qk.scan(folder).models[0].rows
    blob = tmp_path / "blob"
    (folder / "model.safetensors").rename(blob)
    (folder / "model.safetensors").symlink_to(blob)
    assert qk.scan(folder).models[0].rows == want


# ---- layouts that are not known ---------------------------------------------------------------------------------


def custom(rng, transposed=False):
    tensors = {}
    for i in range(2):
        for name, width in (("wq", 8), ("wk", 4)):
            w = rng.normal(size=(width, 6)).astype(np.float32)
            tensors[f"net.blocks.{i}.mixer.{name}.weight"] = np.ascontiguousarray(w.T) if transposed else w
    return tensors


@pytest.mark.parametrize("transposed", [False, True])
def test_names_and_head_counts_by_hand_are_enough(write_model, transposed):
    tensors = custom(np.random.default_rng(0), transposed)
    folder = write_model(tensors, config=None)
    options = {"q": "blocks.{layer}.mixer.wq.weight", "k": "blocks.{layer}.mixer.wk.weight"}
    table = qk.scan(folder, heads=4, kv_heads=2, transposed=transposed, **options)
    assert [(r["layer"], r["head"], r["kv_head"], r["d_head"]) for r in table.heads] == [
        (i, h, h // 2, 2) for i in range(2) for h in range(4)
    ]
    assert table.rows[0]["component"] == "net.blocks"
    assert table.rows[0]["module"] == "net.blocks.0.mixer"
    assert table.rows[0]["mask"] == "unknown"
    q, k = (tensors[f"net.blocks.1.mixer.{n}.weight"].astype(np.float64) for n in ("wq", "wk"))
    q, k = (q.T, k.T) if transposed else (q, k)
    w = q[4:6].T @ k[2:4]
    row = next(r for r in table.heads if r["layer"] == 1 and r["head"] == 2)
    assert row["symmetry"] == pytest.approx(reference.symmetry(w), abs=1e-6)


def test_a_state_dict_without_config_needs_only_the_heads(write_model):
    folder = write_model(bert_tensors(np.random.default_rng(0)), config=None)
    rows = qk.scan(folder, heads=3).layers
    assert [r["mask"] for r in rows] == ["unknown"] * 2
    with pytest.raises(LayoutError, match=r"no config\.json"):
        qk.scan(folder)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"heads": 0}, "--heads is 0"),
        ({"heads": 5}, "5"),
        ({"kv_heads": 2}, "evenly"),
        ({"head_dim": 7}, "--head-dim 7"),
        ({"q": "a.{layer}.q"}, "go together"),
        ({"q": "a.{layer}.q", "k": "a.{layer}.q"}, "same tensor"),
        ({"q": "a.{layer}.q", "k": "b.{layer}.k"}, "share the path"),
        ({"q": "a.{layer}.q.weight", "k": "a.{layer}.k.weight"}, "no tensor fits"),
        ({"gamma": math.nan}, "gamma"),
        ({"signature": "some"}, "signature"),
    ],
)
def test_options_that_make_no_sense_are_refused(bert, options, words):
    with pytest.raises((ConfigError, LayoutError), match=words):
        qk.scan(bert, **options)


def test_layers_that_the_config_promises_and_the_file_lacks_are_reported(write_model):
    folder = write_model(bert_tensors(np.random.default_rng(0)), {**BERT_CONFIG, "num_hidden_layers": 5})
    skipped = qk.scan(folder).models[0].skipped
    assert [s["module"] for s in skipped] == ["encoder.layer"]
    assert "num_hidden_layers is 5" in skipped[0]["reason"]


def test_a_query_without_a_key_is_reported(write_model):
    tensors = bert_tensors(np.random.default_rng(0))
    del tensors["encoder.layer.1.attention.self.key.weight"]
    model = qk.scan(write_model(tensors)).models[0]
    assert {r["layer"] for r in model.rows} == {0}
    assert any(s["module"] == "encoder.layer.1.attention.self" for s in model.skipped)


# ---- options that change a score ----------------------------------------------------------------------------------


def test_gamma_moves_the_threshold(write_model):
    tensors = bert_tensors(np.random.default_rng(0), dtype=np.float64)
    folder = write_model(tensors)
    for gamma in (0.5, 1.0):
        model = qk.scan(folder, gamma=gamma).models[0]
        assert model.conventions["gamma"] == gamma
        for row in model.heads:
            w = w_of(tensors, row["layer"], row["head"])
            assert row["directionality"] == pytest.approx(reference.directionality(w, gamma), abs=1e-9)
    strict = qk.scan(folder, gamma=50.0).heads
    assert all(r["directionality"] == 0.0 and r["flags"] == ["no_outliers"] for r in strict)


def test_signature_is_left_out_with_a_reason(bert, monkeypatch):
    rows = qk.scan(bert, signature="none").rows
    assert all(r["positive_directions"] is None and "not asked" in r["reason"] for r in rows)
    monkeypatch.setattr("qkform.scoring.SIGNATURE_SIZE", 8)
    auto = qk.scan(bert)
    assert all(r["positive_directions"] is None and "--signature all" in r["reason"] for r in auto.layers)
    assert all(r["positive_directions"] is not None and r["reason"] is None for r in auto.heads)
    assert all(r["positive_directions"] is not None for r in qk.scan(bert, signature="all").rows)


@pytest.mark.parametrize("name", ["heads", "kv_heads", "head_dim"])
def test_head_counts_may_be_any_whole_number(bert, name):
    value = {"heads": 3, "kv_heads": 3, "head_dim": 4}[name]
    table = qk.scan(bert, gamma=np.float32(2), **{name: np.int64(value)})
    json.loads(table.to_json())
    assert table.rows == qk.scan(bert).rows
    for wrong in (True, 3.0, "3"):
        with pytest.raises(ConfigError, match=f"{name} is"):
            qk.scan(bert, **{name: wrong})


@pytest.mark.parametrize(
    "offset", [True, 1.0, "1", [1, True], [1, 1], [2**31 + 1], np.array([0.5])], ids=repr
)
def test_distances_that_are_none_are_refused(bert, offset):
    with pytest.raises(ConfigError, match="offset"):
        qk.scan(bert, offset=offset)


# ---- several sources ----------------------------------------------------------------------------------------------


def test_sources_that_fail_are_recorded_and_cost_the_others_nothing(bert, write_model, tmp_path):
    nothing = write_model({"x": np.zeros((2, 2), np.float32)}, name="nothing")
    table = qk.scan(bert, "sample:no-such", nothing, object(), tmp_path / "gone", bert, on_error="record")
    assert [m.source for m in table.models] == [str(bert)] * 2
    assert [e.source for e in table.errors] == [
        "sample:no-such",
        str(nothing),
        "object",
        str(tmp_path / "gone"),
    ]
    assert all(e.source in e.message for e in table.errors)
    assert "minilm" in table.errors[0].message
    with pytest.raises(qk.errors.QKFormError):
        qk.scan(bert, nothing)
    with pytest.raises(ConfigError, match="on_error"):
        qk.scan(bert, on_error="ignore")


def test_faults_of_ours_are_not_recorded(bert, monkeypatch):
    monkeypatch.setattr("qkform.scanner.layer_rows", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        qk.scan(bert, on_error="record")


def test_memory_that_does_not_suffice_is_recorded_in_words(bert, monkeypatch):
    def full(*_):
        raise MemoryError

    monkeypatch.setattr("qkform.scanner.layer_rows", full)
    (error,) = qk.scan(bert, on_error="record").errors
    assert error.message == f"{bert}: out of memory: a tensor this large does not fit; is its shape right?"
    with pytest.raises(MemoryError):
        qk.scan(bert)


def test_live_models_of_one_class_have_names_of_their_own():
    torch = pytest.importorskip("torch")

    def model():
        layer = torch.nn.TransformerEncoderLayer(12, 3, 8)
        return torch.nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    told = []
    table = qk.scan(model(), model(), model(), progress=lambda source, done, total: told.append(source))
    names = ["TransformerEncoder", "TransformerEncoder (2)", "TransformerEncoder (3)"]
    assert [m.source for m in table.models] == list(dict.fromkeys(told)) == names
    assert len({row["source"] for row in table.rows}) == 3
    assert qk.scan(model()).models[0].source == names[0]


def test_a_name_that_is_neither_a_path_nor_known_to_the_hub_says_so_in_this_order(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    for name in ("no-such-model", "no-such/model"):
        with pytest.raises(qk.errors.SourceError) as caught:
            qk.scan(name)
        message = str(caught.value)
        assert message.startswith(f"there is no file or folder named {name!r}, and as a hub id: ")
        assert message.count("no file or folder") == 1
        assert "HF_HUB_OFFLINE" in message
    with pytest.raises(qk.errors.SourceError) as caught:
        qk.scan("hf://no-such/model")
    assert "no file or folder" not in str(caught.value)


# ---- revisions and steps ------------------------------------------------------------------------------------------


@pytest.fixture
def revised(write_model, monkeypatch):
    """A hub whose repositories have the revisions step1, step2 and main, each with weights of its own."""
    from qkform import scanner
    from qkform.checkpoints import open_checkpoint

    places = {
        name: write_model(bert_tensors(np.random.default_rng(i)), name=name)
        for i, name in enumerate(("main", "step1", "step2"))
    }

    def open_hub(name, revision, options):
        if (revision or "main") not in places:
            raise qk.errors.SourceError(f"{name} has no such revision")
        checkpoint = open_checkpoint(places[revision or "main"], source=name)
        checkpoint.revision = (revision or "main").ljust(40, "0")
        return checkpoint

    monkeypatch.setattr(scanner, "_from_hub", open_hub)
    return places


def test_one_revision_is_a_text_and_several_a_sequence(revised):
    one, several = qk.scan("org/m", revision="step2"), qk.scan("org/m", revision=["step1", "step2"])
    assert [(m.revision[:5], m.step) for m in one.models] == [("step2", 2)]
    assert [(m.revision[:5], m.step) for m in several.models] == [("step1", 1), ("step2", 2)]
    assert several.models[1].rows == one.models[0].rows == qk.scan(revised["step2"]).models[0].rows
    (layer, _) = qk.layers("org/m", revision="step2")
    assert layer.form.symmetry()[0] == one.heads[0]["symmetry"]
    with pytest.raises(ConfigError, match="one revision"):
        qk.layers("org/m", revision=["step1", "step2"])
    with pytest.raises(qk.errors.SourceError):  # no branch has a comma in its name here
        qk.scan("org/m", revision="step1,step2")
    table = qk.scan("org/m", revision=["step1", "gone", "main"], on_error="record")
    assert [m.step for m in table.models] == [1, None]
    assert [(e.source, e.message) for e in table.errors] == [
        ("org/m", "revision gone: org/m has no such revision")
    ]
    for wrong in (["a", "a"], [""], [3], 3):
        with pytest.raises(ConfigError, match="revision"):
            qk.scan("org/m", revision=wrong)


def test_both_sides_of_a_diff_may_be_revisions_of_one_repository(revised):
    table = qk.diff("org/m", "org/m", revision_a="step1", revision_b="step2")
    assert (table.source_a, table.source_b) == ("org/m@step1", "org/m@step2")
    assert (table.revision_a[:5], table.revision_b[:5]) == ("step1", "step2")
    assert table.rows == qk.diff(revised["step1"], revised["step2"]).rows
    assert table.rows != qk.diff("org/m", "org/m", revision_a="step1").rows


def test_flat_rows_tell_revisions_and_distances_apart(revised, write_model):
    from qkform.records import merged

    config = {"model_type": "llama", "hidden_size": 12, "num_attention_heads": 3, "num_hidden_layers": 1}
    names = [f"model.layers.0.self_attn.{side}_proj.weight" for side in "qk"]
    rng = np.random.default_rng(7)
    llama = write_model({n: rng.normal(size=(12, 12)).astype(np.float32) for n in names}, config)
    near, far = qk.scan(llama, offset=[0, 4]).models
    assert (near.wall_seconds > 0, far.wall_seconds, far.bytes_read) == (True, 0, 0), (
        "each second counts once"
    )
    assert cost(0, 0.0) == []
    assert cost(near.bytes_read, 1.0)[-1] == "1.0 s"
    table = merged([qk.scan("org/m", revision=["step1", "main"]), qk.scan(llama, offset=[0, 4])])
    want = (
        [("step1", 1, None)] * 8 + [("main0", None, None)] * 8 + [(None, None, 0)] * 4 + [(None, None, 4)] * 4
    )
    told = [(r["revision"] and r["revision"][:5], r["step"], r["offset"]) for r in table.rows]
    assert told == want
    frame = table.to_polars()
    assert list(zip(frame["step"], frame["offset"], strict=True)) == [w[1:] for w in want]
    assert frame["revision"].n_unique() == 3
    pandas = table.to_pandas()
    assert (pandas["offset"].dtype, pandas["step"].dtype, pandas["revision"].dtype) == (
        "Int64",
        "Int64",
        "string",
    )
    lines = [line.split(",") for line in table.to_csv().splitlines()]
    assert lines[0][:6] == ["source", "model_type", "revision", "step", "offset", "form"]
    assert [line[4] for line in lines[1:]] == [""] * 16 + ["0"] * 4 + ["4"] * 4
    assert " at distance 4" in table._repr_html_()


STEPS = {
    "checkpoint-500": 500,
    "runs/checkpoint-500/": 500,
    "runs/checkpoint-500/model.safetensors": 500,
    "runs/checkpoint-500/weights/model.safetensors": 500,
    "runs/step-7/checkpoint-500": 500,
    "./checkpoint-500/./model.safetensors": 500,
    "runs\\checkpoint-500\\model.safetensors": 500,
    "step1000": 1000,
    "step_1000": 1000,
    "step=1000": 1000,
    "ckpt-1000": 1000,
    "ckpt/global_step2000": 2000,
    "globalstep2000": 2000,
    "iter-20": 20,
    "iter_0001000/mp_rank_00/model.pt": 1000,
    "iteration-3": 3,
    "step0": 0,
    "step1000-tokens4B": 1000,
    "stage1-step1000-tokens5B": 1000,
    "logs/epoch=1-step=500.ckpt": 500,
    "epoch=1-step=500-v1.ckpt": 500,
    "org--name/my-step_9": 9,
    # no step
    "step-1b": None,
    "step-12b": None,
    "step10k": None,
    "llama-step-by-step-7b": None,
    "step-by-step-7": 7,  # the word and its number, at the end of a path that somebody wrote
    "stepfun-ai/Step-3": None,
    "step-3.5-flash": None,
    "step-3.5": None,
    "footstep3-base": None,
    "multiter5": None,
    "checkpoint-00001-of-00002.safetensors": None,
    "checkpoint-500/a/b/model.safetensors": None,  # too far up to speak of this file
    "models--org--step-3/snapshots/abc": None,
    "checkpoint-last": None,
    "step" + "9" * 16: None,
    "sample:minilm": None,
    "epoch-3": None,
    "": None,
}


@pytest.mark.parametrize(("source", "step"), STEPS.items(), ids=lambda x: str(x)[:50])
def test_steps_are_read_where_a_path_tells_one(source, step):
    assert step_of(source) == step
    if "/" not in source and "\\" not in source:
        assert step_of("org/m", source, hub=True) == step


@pytest.mark.parametrize(
    ("source", "step"),
    [
        ("org/step-3", None),
        ("step-3", None),
        ("step-3/checkpoint-500", None),
        ("hf://step-1/step-3", None),
        ("hf://models/step-1/step-3", None),
        ("https://huggingface.co/step-1/step-3", None),
        ("https://huggingface.co/step-1/step-3/tree/main", None),
        ("hf://org/step-3@main", None),
        ("hf://org/step-3@step70", 70),
        ("hf://step-3@step70", 70),
        ("hf://org/m@stage1-step1000-tokens5B/onnx/model.onnx", 1000),
        ("hf://org/step-3/checkpoint-500/model.safetensors", 500),
        ("https://huggingface.co/org/m/tree/step70", 70),
    ],
)
def test_the_name_of_a_repository_tells_no_step(source, step):
    assert step_of(source, hub=True) == step
    assert step_of(source, "step9", hub=True) == 9


def adapter_folder(folder, base):
    rng = np.random.default_rng(0)
    folder.mkdir(parents=True)
    module = "base_model.model.encoder.layer.0.attention.self.query"
    save_file(
        {
            f"{module}.lora_{side}.weight": rng.normal(size=shape)
            for side, shape in (("A", (2, 12)), ("B", (12, 2)))
        },
        folder / "adapter_model.safetensors",
    )
    settings = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["query"]}
    (folder / "adapter_config.json").write_text(
        json.dumps({**settings, "base_model_name_or_path": str(base)})
    )
    return folder


def test_a_step_and_a_revision_are_of_the_adapter_not_of_its_base(revised, tmp_path, monkeypatch):
    from qkform import scanner
    from qkform.checkpoints.adapter import AdapterFolder

    here = adapter_folder(tmp_path / "runs" / "checkpoint-500", revised["step2"])
    told = [(m.step, m.revision) for m in qk.scan(here).models]
    assert told == [(2, None), (500, None), (500, None)]
    there = adapter_folder(tmp_path / "runs" / "checkpoint-600", "org/step-3")  # a base of the hub
    monkeypatch.chdir(tmp_path)
    base, delta, merged = qk.scan("runs/checkpoint-600").models
    assert (base.step, base.revision[:4]) == (None, "main")
    assert [(m.step, m.revision) for m in (delta, merged)] == [(600, None)] * 2
    table = qk.diff("org/m", there)
    assert (table.revision_a[:4], table.revision_b) == ("main", None)
    of_base = scanner._from_hub

    def open_hub(name, revision, options):
        return AdapterFolder(here, "c" * 40) if name == "org/adapter" else of_base(name, revision, options)

    monkeypatch.setattr(scanner, "_from_hub", open_hub)
    base, delta, merged = qk.scan("org/adapter", revision="step7").models
    assert (base.step, base.revision) == (2, None)
    assert [(m.step, m.revision) for m in (delta, merged)] == [(7, "c" * 40)] * 2


# ---- tables ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def table(write_model):
    tensors = bert_tensors(np.random.default_rng(0))
    tensors["encoder.layer.0.attention.self.query.weight"][0, 0] = np.nan
    return qk.scan(write_model(tensors))


def test_json_is_strict_and_comes_back(table, tmp_path):
    path = table.save(tmp_path / "t.json")
    document = json.loads(path.read_text(), parse_constant=pytest.fail)
    assert document["schema"] == "qkform.scan/1"
    assert set(document["models"][0]["rows"][0]) == set(COLUMNS)
    assert ScoreTable.load(path).to_dict() == table.to_dict()


def test_csv_has_one_line_per_row_and_empty_nulls(table, tmp_path):
    lines = table.save(tmp_path / "t.csv").read_text().splitlines()
    assert len(lines) == len(table.rows) + 1
    assert lines[0].split(",") == ["source", "model_type", "revision", "step", "offset", "form", *COLUMNS]
    assert "nan" not in "".join(lines).lower().replace("holds nan", "")


def test_frames_keep_types_and_nulls(table, tmp_path):
    pl, pd = table.to_polars(), table.to_pandas()
    assert pl.height == len(pd) == len(table.rows)
    assert str(pl.schema["head"]) == "Int64"
    assert str(pl.schema["shared_by"]) == "List(Int64)"
    assert pl["symmetry"].null_count() == 2
    assert pd["symmetry"].isna().sum() == 2
    assert str(pd["head"].dtype) == "Int64"
    import polars

    back = polars.read_parquet(table.save(tmp_path / "t.parquet"))
    assert back.equals(pl)


def test_an_empty_table_makes_frames_with_all_columns():
    assert ScoreTable().to_polars().columns == [
        "source",
        "model_type",
        "revision",
        "step",
        "offset",
        "form",
        *COLUMNS,
    ]
    assert list(ScoreTable().to_pandas().columns) == [
        "source",
        "model_type",
        "revision",
        "step",
        "offset",
        "form",
        *COLUMNS,
    ]


def test_saving_is_whole_or_not_at_all(table, tmp_path, monkeypatch):
    target = tmp_path / "t.json"
    target.write_text("old")

    def fail(self, **_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(ScoreTable, "to_json", fail)
    with pytest.raises(RecordError, match="No space left"):
        table.save(target)
    assert target.read_text() == "old"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["my-model", "t.json"]


@pytest.mark.parametrize("name", ["t.xlsx", "t", "no-folder/t.json", "my-model"])
def test_a_place_that_cannot_be_written_is_an_error(name, table, tmp_path):
    with pytest.raises(RecordError, match=name.split("/")[0]):
        table.save(tmp_path / name)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        '{"schema": "qkform.scan/2"}',
        '{"schema": "qkform.scan/1"}',
        '{"schema": "qkform.scan/1", "models": [{}], "errors": []}',
    ],
)
def test_loading_anything_else_is_an_error(text, tmp_path):
    (tmp_path / "t.json").write_text(text)
    with pytest.raises(RecordError, match=r"t\.json"):
        ScoreTable.load(tmp_path / "t.json")


def test_a_missing_extra_names_the_command(table, monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "polars", None)
    with pytest.raises(MissingExtra, match=r'pip install "qkform\[frames\]"'):
        table.to_polars()


def test_a_notebook_shows_layers_and_obeys_no_markup(write_model):
    tensors = {
        n.replace("encoder", "<script>alert(1)</script>.encoder"): t
        for n, t in bert_tensors(np.random.default_rng(0)).items()
    }
    shown = qk.scan(write_model(tensors))._repr_html_()
    assert "<script>" not in shown
    assert "&lt;script&gt;" in shown
    assert shown.count("<tr>") == 3


def test_heads_scored_in_parts_are_the_same_heads(write_model, monkeypatch):
    from qkform import scoring

    rng = np.random.default_rng(3)
    tensors = {}
    for side, heads in (("q", 6), ("k", 3)):
        tensors[f"model.layers.0.self_attn.{side}_proj.weight"] = rng.normal(size=(heads * 5, 14))
        tensors[f"model.layers.0.self_attn.{side}_proj.bias"] = rng.normal(size=heads * 5)
    config = {"model_type": "qwen2", "num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 5}
    folder = write_model(tensors, config)
    whole = qk.scan(folder).rows
    parts = []
    groups = qk.BilinearForm.groups
    monkeypatch.setattr(scoring, "AT_ONCE", 1)
    monkeypatch.setattr(
        qk.BilinearForm, "groups", lambda form, n: (parts.append(p) or p for p in groups(form, n))
    )
    assert qk.scan(folder).rows == whole
    assert [(p.n_heads, p.n_kv_heads) for p in parts] == [(2, 1)] * 3
    assert [row["kv_head"] for row in whole] == [None, 0, 0, 1, 1, 2, 2]


def test_the_record_and_the_terminal_say_which_form_was_scored(write_model, capsys):
    from qkform.cli import main

    rng = np.random.default_rng(6)
    tensors = {
        f"model.layers.0.self_attn.{side}_proj.{what}": rng.normal(size=shape)
        for side in "qk"
        for what, shape in (("weight", (8, 8)), ("bias", (8,)))
    }
    tensors["model.layers.0.input_layernorm.weight"] = rng.normal(size=8)
    folder = write_model(tensors, {"model_type": "qwen2", "num_attention_heads": 2})
    (raw,), (changed,) = qk.scan(folder).models, qk.scan(folder, fold_norm=True, bias=True, offset=3).models
    assert (raw.form, changed.form) == ("raw", "fold_norm bias")
    assert {row["form"] for row in qk.ScoreTable([raw, changed]).rows} == {"raw", "fold_norm bias"}
    assert main(["scan", str(folder), "--fold-norm", "--bias", "--offset", "3"]) == 0
    assert "form with fold_norm, bias, at distance 3" in capsys.readouterr().out.replace("\n", " ")
    assert main(["scan", str(folder)]) == 0
    assert "form with" not in capsys.readouterr().out
