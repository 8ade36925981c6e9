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
    assert lines[0].split(",") == ["source", "model_type", "step", *COLUMNS]
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
    assert ScoreTable().to_polars().columns == ["source", "model_type", "step", *COLUMNS]
    assert list(ScoreTable().to_pandas().columns) == ["source", "model_type", "step", *COLUMNS]


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
