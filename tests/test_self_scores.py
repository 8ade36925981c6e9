"""A checkpoint whose tokens score themselves by x diag(v) x^T: the columns of v, whose it is, what is refused."""

from __future__ import annotations

import json

import numpy as np
import pytest

import qkform as qk
from qkform import scoring
from qkform.errors import ConfigError
from qkform.records import ScoreTable
from tests.conftest import bert_tensors

PATH = "encoder.layer.{}.attention.self.self_score.v"


def decoupled(rng, *layers):
    tensors = bert_tensors(rng, dtype=np.float64)
    for layer in layers:
        tensors[PATH.format(layer)] = rng.standard_normal((3, 12))
    return tensors


@pytest.mark.parametrize("at_once", [scoring.AT_ONCE, 1], ids=["all heads", "head by head"])
def test_columns_are_of_the_v_of_each_head(at_once, write_model, monkeypatch):
    monkeypatch.setattr(scoring, "AT_ONCE", at_once)
    tensors = decoupled(np.random.default_rng(0), 0, 1)
    folder = write_model(tensors)
    table = qk.scan(folder)
    for row in table.rows:
        v = tensors[PATH.format(row["layer"])]
        v = v.sum(0) if row["head"] is None else v[row["head"]]
        size = np.sqrt((v**2).sum())
        assert row["self_norm"] == pytest.approx(size)
        assert row["self_sign"] == pytest.approx(v.sum() / np.abs(v).sum())
        assert row["self_share"] == pytest.approx(size**2 / (size**2 + row["norm"] ** 2))
        assert "decoupled" in row["flags"]
    assert not table.models[0].skipped
    for layer in qk.layers(folder):
        np.testing.assert_array_equal(layer.v, tensors[PATH.format(layer.layer)])


def test_layers_without_v_have_none_and_w_is_scored_as_before(write_model):
    tensors = decoupled(np.random.default_rng(0), 1)
    table = qk.scan(write_model(tensors))
    first, second = table.layers
    assert first["self_norm"] is first["self_sign"] is first["self_share"] is None
    assert "decoupled" not in first["flags"]
    assert second["self_norm"] > 0
    stock = write_model({n: t for n, t in tensors.items() if "self_score" not in n}, name="stock")
    assert [r["symmetry"] for r in table.rows] == [r["symmetry"] for r in qk.scan(stock).rows]
    assert next(iter(qk.layers(stock))).v is None


def test_v_is_read_and_counted(write_model):
    tensors = decoupled(np.random.default_rng(0), 0, 1)
    stock = {n: t for n, t in tensors.items() if "self_score" not in n}
    own, without = (
        qk.scan(write_model(t, name=name)).models[0].bytes_read
        for name, t in (("own", tensors), ("stock", stock))
    )
    assert own - without >= 2 * 3 * 12 * 8


def test_zero_and_nan_v_are_null_where_they_mean_nothing(write_model):
    tensors = decoupled(np.random.default_rng(0), 0, 1)
    tensors[PATH.format(0)][1] = 0.0
    tensors[PATH.format(1)][2, 5] = np.nan
    rows = {(r["layer"], r["head"]): r for r in qk.scan(write_model(tensors)).rows}
    assert rows[0, 1]["self_norm"] == 0.0
    assert rows[0, 1]["self_share"] == 0.0
    assert rows[0, 1]["self_sign"] is None
    assert rows[0, 1]["reason"] == "v is zero: it has no sign"
    assert rows[1, 2]["self_norm"] is rows[1, 2]["self_share"] is None
    assert "v, the weights of the self score" in rows[1, 2]["reason"]
    assert rows[1, 0]["reason"] is None


def test_a_changed_form_has_no_share(write_model):
    row = qk.scan(write_model(decoupled(np.random.default_rng(0), 0)), bias=True).layers[0]
    assert row["self_norm"] > 0
    assert row["self_share"] is None
    assert "no share" in row["reason"]


def test_a_v_of_another_shape_is_told(write_model):
    tensors = decoupled(np.random.default_rng(0), 0)
    tensors[PATH.format(0)] = np.ones((3, 11))
    with pytest.raises(ConfigError, match=r"layer\.0\.attention\.self\.self_score\.v.*\(3, 11\).*\(3, 12\)"):
        qk.scan(write_model(tensors))


def test_older_records_are_read(write_model, tmp_path):
    table = qk.scan(write_model(bert_tensors(np.random.default_rng(0))))
    document = table.to_dict()
    for row in document["models"][0]["rows"]:
        for name in ("self_norm", "self_sign", "self_share"):
            del row[name]
    (tmp_path / "old.json").write_text(json.dumps(document))
    assert ScoreTable.load(tmp_path / "old.json").rows == table.rows


@pytest.mark.parametrize("width", [60, 75, 96, 107, 108, 117, 118])
def test_the_terminal_shows_v_where_there_is_one(width, write_model):
    from rich.console import Console

    from qkform.report.screens import renderables

    def screen(name, tensors):
        console = Console(width=width, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
        for part in renderables(qk.scan(write_model(tensors, name=name)), width=width):
            console.print(part)
        console.file.close()
        return console.export_text()

    own = screen("own", decoupled(np.random.default_rng(0), 0, 1))
    assert "own |v|" in own
    assert "…" not in own
    assert ("v sign" in own) == (width >= 118)
    assert "own |v|" not in screen("stock", bert_tensors(np.random.default_rng(0)))


def test_a_v_above_several_layers_is_of_none(write_model):
    tensors = bert_tensors(np.random.default_rng(0), dtype=np.float64)
    tensors["self_score.v"] = np.ones((3, 12))
    for row in qk.scan(write_model(tensors)).rows:
        assert row["self_norm"] is None
        assert "decoupled" not in row["flags"]


def test_an_infinite_v_has_no_share(write_model):
    tensors = decoupled(np.random.default_rng(0), 0)
    tensors[PATH.format(0)][0, 0] = np.inf
    row = next(r for r in qk.scan(write_model(tensors)).heads if (r["layer"], r["head"]) == (0, 0))
    assert row["self_norm"] is row["self_share"] is row["self_sign"] is None
