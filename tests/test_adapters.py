"""Adapters: base, delta and merged side by side, held against weights merged by hand."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

import qkform as qk
from qkform.cli import main
from qkform.differ import diff
from qkform.errors import QKFormError
from qkform.form import reference
from tests.conftest import BERT_CONFIG, bert_tensors

SCALE = 2.0  # lora_alpha / r


def lora(
    folder: Path, base: str, rng: np.random.Generator, layers: tuple[int, ...] = (0,)
) -> dict[str, np.ndarray]:
    """An adapter on the queries and keys of some layers; returns what it adds to each weight."""
    folder.mkdir()
    added, tensors = {}, {}
    for i in layers:
        for side in ("query", "key"):
            name = f"encoder.layer.{i}.attention.self.{side}"
            a, b = rng.normal(size=(2, 12)).astype(np.float32), rng.normal(size=(12, 2)).astype(np.float32)
            tensors[f"base_model.model.{name}.lora_A.weight"] = a
            tensors[f"base_model.model.{name}.lora_B.weight"] = b
            added[f"{name}.weight"] = SCALE * b @ a
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "base_model_name_or_path": base}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return added


@pytest.fixture
def adapted(write_model, tmp_path):
    rng = np.random.default_rng(0)
    tensors = bert_tensors(rng)
    base = write_model(tensors, name="base")
    added = lora(tmp_path / "adapter", str(base), rng)
    merged = write_model({name: t + added.get(name, 0.0).astype(np.float32) if name in added else t
                          for name, t in tensors.items()}, BERT_CONFIG, name="merged")  # fmt: skip
    return base, tmp_path / "adapter", merged


def scores(rows):
    return [{k: v for k, v in row.items() if k not in ("source", "step")} for row in rows]


def test_base_and_merged_are_what_the_models_themselves_give(adapted):
    base, adapter, merged = adapted
    found = qk.scan(adapter).models
    assert [m.source for m in found] == [
        f"{adapter} (base: {base})",
        f"{adapter} (delta)",
        f"{adapter} (merged)",
    ]
    assert found[0].rows == qk.scan(base).models[0].rows
    for mine, hand in zip(found[2].rows, qk.scan(merged).models[0].rows, strict=True):
        for name, value in hand.items():
            assert mine[name] == (
                pytest.approx(value, rel=1e-5, abs=1e-6) if isinstance(value, float) else value
            )


def test_delta_is_the_difference_of_the_forms(adapted):
    base, adapter, merged = adapted
    delta = qk.scan(adapter).models[1]
    before, after = (next(iter(qk.layers(folder))).form for folder in (base, merged))
    moved = np.asarray(after.matrix(), dtype=float) - before.matrix()
    first = [row for row in delta.heads if row["layer"] == 0]
    for head, row in enumerate(first):
        assert row["symmetry"] == pytest.approx(reference.symmetry(moved[head]), abs=1e-5)
        assert row["norm"] == pytest.approx(np.linalg.norm(moved[head]), rel=1e-5)
    assert delta.layers[0]["symmetry"] == pytest.approx(reference.symmetry(moved.sum(0)), abs=1e-5)
    assert "W_merged - W_base" in delta.conventions["form"]


def test_what_the_adapter_leaves_alone_is_null_with_that_reason(adapted):
    delta = qk.scan(adapted[1]).models[1]
    for row in delta.rows:
        assert (row["symmetry"] is None) == (row["layer"] == 1)
        assert row["reason"] == ("the adapter does not change it" if row["layer"] == 1 else None)


def test_layers_and_diff_take_the_merged_model(adapted):
    base, adapter, merged = adapted
    mine, hand = (next(iter(qk.layers(folder))).form for folder in (adapter, merged))
    np.testing.assert_allclose(mine.matrix(), hand.matrix(), rtol=1e-4, atol=1e-4)
    table = diff(base, adapter)
    assert table.layers[1]["relative_change"] == 0.0
    assert table.layers[0]["norm_b"] == pytest.approx(qk.scan(merged).layers[0]["norm"], rel=1e-5)


def test_options_apply_to_all_three(adapted):
    base, adapter, merged = adapted
    found = qk.scan(adapter, bias=True).models
    assert found[0].rows == qk.scan(base, bias=True).models[0].rows
    assert found[2].layers[0]["symmetry"] == pytest.approx(
        qk.scan(merged, bias=True).layers[0]["symmetry"], abs=1e-5
    )
    assert {row["d_model"] for m in found for row in m.rows} == {13}


def test_the_command_prints_three_models(adapted, capsys):
    assert main(["scan", str(adapted[1]), "--format", "json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["models"]) == 3


@pytest.mark.parametrize("base", ["./nowhere", "", "../../etc"])
def test_a_base_that_is_not_there_is_named(base, tmp_path):
    lora(tmp_path / "adapter", base, np.random.default_rng(1))
    with pytest.raises(QKFormError, match="base"):
        qk.scan(tmp_path / "adapter")
