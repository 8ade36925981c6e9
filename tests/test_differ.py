"""Differences of checkpoints: which layers are compared, what is said of each, and what chance would do."""

from __future__ import annotations

import inspect
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
    ("options", "words"),
    [
        ({"offset": (1, 2)}, "one distance"),
        ({"gamma": "many"}, "gamma"),
        ({"heads": 2.5}, r"heads is 2\.5"),
        ({"revision_a": "main"}, "no hub id, so it has no revision 'main'"),
        ({"revision_b": "main"}, "no hub id, so it has no revision 'main'"),
        ({"revision_b": ["a", "b"]}, "revision_b"),
    ],
)
def test_options_that_make_no_sense_are_refused(pair, options, words):
    with pytest.raises(ConfigError, match=words):
        qk.diff(*pair, **options)


@pytest.mark.parametrize("option", ["signature", "revision", "colour"])
def test_options_of_scan_alone_are_none_of_diff(pair, option):
    with pytest.raises(TypeError, match=option):
        qk.diff(*pair, **{option: "auto"})


def test_keywords_are_those_of_scan():
    """What the two share they call the same, with the same defaults."""
    scan, diff = (inspect.signature(f).parameters for f in (qk.scan, qk.diff))
    assert set(scan) - set(diff) == {"sources", "signature", "revision", "on_error"}
    assert set(diff) - set(scan) == {"a", "b", "revision_a", "revision_b"}
    for name in set(scan) & set(diff):
        assert (diff[name].kind, diff[name].default) == (scan[name].kind, scan[name].default), name


def test_conventions_are_of_columns_that_are_there(pair):
    plain, biased = (qk.diff(*pair, bias=bias).conventions for bias in (False, True))
    for told in (plain, biased):
        assert not {"signature", "symmetry_z"} & set(told)
        assert "bias_share" not in json.dumps(told)
        assert {"gamma", "symmetry", "directionality", "biases", "rotary"} <= set(told)
    assert plain["biases"] == "not in the form"


@pytest.fixture
def rotary(write_model):
    rng = np.random.default_rng(7)
    config = {"model_type": "llama", "hidden_size": 12, "num_attention_heads": 3, "num_hidden_layers": 1}
    names = [f"model.layers.0.self_attn.{side}_proj.weight" for side in "qk"]
    return [
        write_model({n: rng.normal(size=(12, 12)).astype(np.float32) for n in names}, config, name=name)
        for name in ("one", "two")
    ]


@pytest.mark.parametrize(
    "offset", [4, [4], (4,), np.int64(4), np.array([4]), np.array(4), range(4, 5)], ids=repr
)
def test_a_distance_may_be_any_whole_number_in_scan_and_diff_alike(rotary, offset):
    table = qk.diff(*rotary, offset=offset)
    assert table.offset == 4
    assert "R(4)" in table.conventions["rotary"]
    (model,) = qk.scan(rotary[0], offset=offset).models
    assert (model.offset, type(model.offset)) == (4, int)
    assert [row["symmetry"] for row in model.rows] == pytest.approx([row["symmetry_a"] for row in table.rows])
    json.loads(table.to_json())
    assert set(table.to_polars()["offset"]) == {4}


def test_records_without_revisions_are_read(pair, tmp_path):
    document = qk.diff(*pair).to_dict()
    for name in ("revision_a", "revision_b", "offset"):
        assert document.pop(name) is None
    (tmp_path / "old.json").write_text(json.dumps(document))
    assert qk.DiffTable.load(tmp_path / "old.json").revision_b is None


def test_the_command_warns_of_layers_that_one_side_lacks_and_of_heads_without_scores(write_model, capsys):
    tensors = bert_tensors(np.random.default_rng(2), layers=6)
    longer = write_model(tensors, BERT_CONFIG | {"num_hidden_layers": 6}, name="longer")
    half = {n: t.copy() for n, t in tensors.items() if int(n.split(".")[2]) < 3}
    half["encoder.layer.0.attention.self.query.weight"][:4] = 0.0
    shorter = write_model(half, BERT_CONFIG | {"num_hidden_layers": 3}, name="shorter")
    for pair, side in (((longer, shorter), "first"), ((shorter, longer), "second")):
        assert main(["diff", *map(str, pair), "--quiet", "--format", "json"]) == 0
        out, err = capsys.readouterr()
        heads, layers = err.splitlines()
        assert (
            f"3 layers are in the {side} alone and not compared: encoder.layer.3.attention.self and 2 more"
            in layers
        )
        assert "no scores for encoder.layer.0.attention.self head 0:" in heads
        assert "W_Q is all zero" in heads
        assert len(json.loads(out)["rows"]) == 12
    assert main(["diff", str(longer), str(longer), "--format", "json"]) == 0
    assert capsys.readouterr().err == ""


def test_the_command_says_that_it_fetches_a_sample(bert, capsys, monkeypatch):
    from qkform import samples

    def fetch(name, on_progress=None):
        if on_progress:
            on_progress(f"fetching {name}")
        return bert

    monkeypatch.setattr(samples, "fetch", fetch)
    assert main(["diff", "sample:a", "sample:b"]) == 0
    assert capsys.readouterr().err.split() == ["fetching", "a", "fetching", "b"]
    assert main(["diff", "sample:a", "sample:b", "--quiet"]) == 0
    assert capsys.readouterr().err == ""


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
