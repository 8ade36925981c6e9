"""Adapters: base, delta and merged side by side, held against weights merged by hand."""

from __future__ import annotations

import gc
import json
import tracemalloc
import weakref
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


@pytest.mark.parametrize("offset", [None, (0, 2)])
def test_bytes_of_three_models_are_those_that_were_read(offset, write_model, tmp_path):
    rng = np.random.default_rng(2)
    config = {"model_type": "llama", "hidden_size": 12, "num_attention_heads": 3, "num_hidden_layers": 2}
    names = [f"model.layers.{i}.self_attn.{side}_proj" for i in range(2) for side in "qkv"]
    base = write_model({f"{n}.weight": rng.normal(size=(12, 12)).astype(np.float32) for n in names}, config)
    lora(tmp_path / "adapter", str(base), rng, ())
    parts = {
        f"{name}.lora_{part}.weight": rng.normal(size=shape).astype(np.float32)
        for name in names
        for part, shape in (("A", (2, 12)), ("B", (12, 2)))
    }
    save_file(parts, tmp_path / "adapter" / "adapter_model.safetensors")
    alone = qk.scan(base, offset=offset)
    table = qk.scan(tmp_path / "adapter", offset=offset)
    known = sum(m.bytes_read for m in alone.models)
    assert known == alone.models[0].bytes_read > 4 * 12 * 12 * 4
    found = [m.bytes_read for m in table.models]
    assert found[:2] == [known, 0]
    assert 8 * 2 * 12 * 4 < found[2] < sum(p.stat().st_size for p in (tmp_path / "adapter").iterdir())
    assert not any(found[3:])


def peak(source: Path) -> int:
    gc.collect()
    tracemalloc.start()
    qk.scan(source, signature="none")
    (_, top), _ = tracemalloc.get_traced_memory(), tracemalloc.stop()
    return top


def test_an_adapter_takes_the_memory_of_one_layer(write_model, tmp_path):
    rng, d = np.random.default_rng(3), 256
    tops = {}
    for layers in (1, 4):
        config = BERT_CONFIG | {"hidden_size": d, "num_attention_heads": 4, "num_hidden_layers": layers}
        base = write_model(bert_tensors(rng, layers, d), config, f"base{layers}")
        adapter = tmp_path / f"adapter{layers}"
        lora(adapter, str(base), rng, ())
        parts = {
            f"encoder.layer.{i}.attention.self.{side}.lora_{part}.weight": np.ones(shape, np.float32)
            for i in range(layers)
            for side in ("query", "key")
            for part, shape in (("A", (2, d)), ("B", (d, 2)))
        }
        save_file(parts, adapter / "adapter_model.safetensors")
        peak(adapter)
        tops[layers] = peak(adapter)
    layer = 2 * d * d * 4
    assert tops[4] < tops[1] + layer / 2, (tops, layer)
    assert tops[1] < 20 * layer, (tops, layer)


def test_a_layer_is_gone_before_the_next_is_read(adapted, monkeypatch):
    from qkform import scanner

    alive, seen = [], []
    change_form, changed = scanner.change_form, scanner.changed

    def form(a, b):
        alive.extend(weakref.ref(f) for f in (a, b))
        return change_form(a, b)

    def read(layer, changes):
        if layer.layer not in seen:
            seen.append(layer.layer)
            assert not [f for f in alive if f() is not None]
        return changed(layer, changes)

    monkeypatch.setattr(scanner, "change_form", form)
    monkeypatch.setattr(scanner, "changed", read)
    qk.scan(adapted[1])
    assert seen == [0, 1]
    assert len(alive) == 4


def test_the_change_is_formed_once_where_biases_do_not_matter(adapted, monkeypatch):
    from qkform import scanner

    formed = []
    real = scanner.change_form
    monkeypatch.setattr(scanner, "change_form", lambda a, b: formed.append(1) or real(a, b))
    qk.scan(adapted[1])
    assert len(formed) == 2
    qk.scan(adapted[1], bias=True)
    assert len(formed) == 2 + 4
