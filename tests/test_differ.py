"""Differences of checkpoints: which layers are compared, what is said of each, and what chance would do."""

from __future__ import annotations

import json

import numpy as np
import pytest

import qkform as qk
from qkform.cli import main
from qkform.differences import DIFF_COLUMNS
from qkform.errors import ConfigError, LayoutError
from qkform.form import reference
from tests.conftest import BERT_CONFIG, bert_tensors


@pytest.fixture
def pair(write_model):
    """A model, and the same after its weights moved a little at random and one head became symmetric."""
    rng = np.random.default_rng(0)
    before = bert_tensors(rng)
    after = {n: t + 0.05 * rng.normal(size=t.shape).astype(np.float32) for n, t in before.items()}
    path = "encoder.layer.1.attention.self"
    after[f"{path}.key.weight"][4:8] = after[f"{path}.query.weight"][4:8]
    return write_model(before, name="before"), write_model(after, name="after")


def test_rows_are_the_changes_of_the_stored_matrices(pair):
    table = qk.diff(*pair)
    forms = [[layer.form for layer in qk.layers(folder)] for folder in pair]
    for row in table.rows:
        a, b = (side[row["layer"]] for side in forms)
        if row["head"] is None:
            a, b, h = a.total(), b.total(), 0
        else:
            h = row["head"]
        w_a, w_b = (np.asarray(form.matrix()[h], dtype=float) for form in (a, b))
        expected = {
            "symmetry_a": reference.symmetry(w_a),
            "symmetry_b": reference.symmetry(w_b),
            "symmetry_change": reference.symmetry(w_b) - reference.symmetry(w_a),
            "directionality_a": reference.directionality(w_a, 2.0),
            "directionality_b": reference.directionality(w_b, 2.0),
            "relative_change": np.linalg.norm(w_b - w_a) / np.linalg.norm(w_a),
            "cosine": (w_a * w_b).sum() / np.linalg.norm(w_a) / np.linalg.norm(w_b),
            "norm_a": np.linalg.norm(w_a),
            "norm_b": np.linalg.norm(w_b),
            "change_symmetry": reference.symmetry(w_b - w_a),
        }
        for name, value in expected.items():
            assert row[name] == pytest.approx(value, abs=2e-5), name
        assert row["null_low"] < row["null_high"]
        middle = (row["null_low"] + row["null_high"]) / 2
        std = (row["null_high"] - row["null_low"]) / 4
        assert row["symmetry_change_z"] == pytest.approx((row["symmetry_change"] - middle) / std)


def test_the_head_that_was_made_symmetric_stands_out_and_the_others_do_not(pair):
    heads = {(row["layer"], row["head"]): row for row in qk.diff(*pair).heads}
    made = heads.pop((1, 1))
    assert made["symmetry_b"] == pytest.approx(1.0)
    assert made["symmetry_change_z"] > 4
    assert sum(abs(row["symmetry_change_z"]) < 3 for row in heads.values()) >= len(heads) - 1


def test_a_model_does_not_differ_from_itself(pair):
    for row in qk.diff(pair[0], pair[0]).rows:
        assert (row["relative_change"], row["symmetry_change"], row["cosine"]) == (0.0, 0.0, 1.0)
        assert row["change_symmetry"] is None
        assert row["reason"] == "no change"


def test_layers_are_matched_by_path_then_by_its_end_then_in_order(write_model):
    rng = np.random.default_rng(1)
    tensors = bert_tensors(rng)
    plain = write_model(tensors, name="plain")
    headed = write_model({f"bert.{n}": t for n, t in tensors.items()}, name="headed")
    llama = {
        f"model.layers.{i}.self_attn.{side}_proj.weight": tensors[
            f"encoder.layer.{i}.attention.self.{name}.weight"
        ]
        for i in range(2)
        for side, name in (("q", "query"), ("k", "key"))
    }
    config = {"model_type": "llama", "num_attention_heads": 3, "num_hidden_layers": 2}
    other = write_model(llama, config, name="other")
    for folder, how in ((plain, "module"), (headed, "end of the module's path"), (other, "order")):
        table = qk.diff(plain, folder)
        assert table.conventions["matched_by"] == how
        assert {row["relative_change"] for row in table.rows} == {0.0}


def test_what_only_one_of_them_has_is_listed(write_model):
    rng = np.random.default_rng(2)
    tensors = bert_tensors(rng, layers=3)
    longer = write_model(tensors, BERT_CONFIG | {"num_hidden_layers": 3}, name="longer")
    shorter = write_model({n: t for n, t in tensors.items() if ".2." not in n}, name="shorter")
    table = qk.diff(longer, shorter)
    assert table.only_in_a == ["encoder.layer.2.attention.self"]
    assert table.only_in_b == []
    assert len(table.layers) == 2


def test_models_of_other_shapes_are_refused(write_model):
    rng = np.random.default_rng(3)
    a = write_model(bert_tensors(rng), name="a")
    b = write_model(bert_tensors(rng, d=24), BERT_CONFIG | {"hidden_size": 24}, name="b")
    with pytest.raises(LayoutError, match=r"no layer of one is a layer of the other.*d_model 12.*d_model 24"):
        qk.diff(a, b)


def test_zero_and_nan_heads_say_on_which_side(write_model):
    rng = np.random.default_rng(4)
    good = bert_tensors(rng)
    bad = {n: t.copy() for n, t in good.items()}
    bad["encoder.layer.0.attention.self.query.weight"][:4] = 0.0
    bad["encoder.layer.0.attention.self.query.weight"][4, 0] = np.nan
    a, b = write_model(good, name="good"), write_model(bad, name="bad")
    heads = [row for row in qk.diff(a, b).heads if row["layer"] == 0]
    assert heads[0]["reason"] == "second: W_Q is all zero"
    assert heads[1]["reason"] == "second: W_Q holds NaN or infinity"
    assert heads[2]["reason"] == "no change"
    assert qk.diff(b, a).heads[0]["reason"] == "first: W_Q is all zero"
    json.loads(qk.diff(a, b).to_json())


def test_options_apply_to_both_sides(pair):
    table = qk.diff(*pair, bias=True)
    assert {row["d_model"] for row in table.rows} == {13}
    (a,), (b,) = (qk.scan(folder, bias=True).models for folder in pair)
    for row, x, y in zip(table.rows, a.rows, b.rows, strict=True):
        assert row["symmetry_a"] == pytest.approx(x["symmetry"], abs=1e-6)
        assert row["symmetry_b"] == pytest.approx(y["symmetry"], abs=1e-6)


def test_live_models_are_compared_with_their_files(pair, tmp_path):
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(
        hidden_size=12, num_attention_heads=3, num_hidden_layers=2, intermediate_size=8, vocab_size=20
    )
    model = transformers.BertModel(config)
    model.save_pretrained(tmp_path / "saved")
    assert {row["relative_change"] for row in qk.diff(tmp_path / "saved", model).rows} == {0.0}


@pytest.mark.parametrize(
    ("options", "words"), [({"offset": (1, 2)}, "one distance"), ({"colour": 1}, "no option 'colour'")]
)
def test_options_that_make_no_sense_are_refused(pair, options, words):
    with pytest.raises(ConfigError, match=words):
        qk.diff(*pair, **options)


def test_the_command_prints_saves_and_draws(pair, tmp_path, capsys):
    files = [str(tmp_path / name) for name in ("d.json", "d.csv", "d.html")]
    code = main(
        [
            "diff",
            *map(str, pair),
            "--format",
            "json",
            "--out",
            files[0],
            "--out",
            files[1],
            "--html",
            files[2],
        ]
    )
    assert code == 0
    document = json.loads(capsys.readouterr().out)
    assert document["schema"] == "qkform.diff/1"
    assert document["rows"] == json.loads((tmp_path / "d.json").read_text())["rows"]
    assert list(document["rows"][0]) == list(DIFF_COLUMNS)
    assert len((tmp_path / "d.csv").read_text().splitlines()) == 1 + len(document["rows"])
    assert "</html>" in (tmp_path / "d.html").read_text()


def test_the_command_prints_a_table_for_people(pair, capsys):
    assert main(["diff", *map(str, pair)]) == 0
    out = capsys.readouterr().out
    assert "before" in out
    assert "after" in out
    assert len(out.splitlines()) > 5


def test_every_column_of_a_difference_is_explained():
    from tests.test_docs import ROOT

    pages = (ROOT / "docs" / "math.md").read_text() + (ROOT / "docs" / "getting-started.md").read_text()
    for name in DIFF_COLUMNS:
        assert f"`{name}`" in pages, name
