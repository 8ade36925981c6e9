"""How layouts are found: places in names, configs that leave things out, rows that say what the layers say."""

from __future__ import annotations

import json
import time

import numpy as np
import pytest
from safetensors.numpy import save_file

import qkform as qk
from qkform.errors import ConfigError, LayoutError
from qkform.layouts.match import place
from qkform.layouts.rules import families
from tests.conftest import BERT_CONFIG, bert_tensors


def model(tmp_path, tensors, config):
    folder = tmp_path / "m"
    folder.mkdir()
    save_file(
        {n: np.ascontiguousarray(t, dtype=np.float32) for n, t in tensors.items()},
        folder / "model.safetensors",
    )
    if config is not None:
        (folder / "config.json").write_text(json.dumps(config))
    return folder


def normal(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape)


def separate(path, q=12, k=12, d=12, names=("q_proj", "k_proj")):
    return {
        f"{path}.{n}.weight": normal(w, d, seed=i) for i, (n, w) in enumerate(zip(names, (q, k), strict=True))
    }


# ---- places in names -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("pattern", "module", "found"),
    [
        ("h.{layer}.attn", "transformer.h.11.attn", ("transformer.h", 11)),
        ("h.{layer}.attn", "h.0.attn", ("h", 0)),
        ("h.{layer}.attn", "graph.0.attn", None),
        ("h.{layer}.attn", "h.0.attn.more", None),
        ("h.{layer}.attn", "h.00.attn", None),
        ("h.{layer}.attn", "h.-1.attn", None),
        ("h.{layer}.attn", "h.1234567.attn", None),
        ("h.{layer}.attn", "h.٣.attn", None),
        ("tower.**.layers.{layer}.a", "x.tower.layers.2.a", ("x.tower.layers", 2)),
        ("tower.**.layers.{layer}.a", "tower.b.c.layers.2.a", ("tower.b.c.layers", 2)),
        ("tower.**.layers.{layer}.a", "layers.2.a", None),
        ("g.{layer}.l.{inner}.a", "g.3.l.0.a", ("g", 3)),
        ("**", "blocks.7.attn", ("blocks", 7)),
        ("**", "attn", ("attn", 0)),
        ("**", "", ("", 0)),
        ("**.cross", "blocks.7.cross", ("blocks", 7)),
    ],
)
def test_a_module_is_placed_by_its_path(pattern, module, found):
    got = place(pattern, module)
    assert (got and (got.component, got.layer)) == found


@pytest.mark.parametrize("model_type", ["gemma3", "siglip", "vit", "bert"])
def test_long_dotted_names_cost_no_time(model_type, tmp_path):
    names = [
        "vision_tower." * 38 + "a." * 230,
        "a." * 500,
        "vision_tower." + "a." * 490,
        "vision_model.head.attention." * 30,
    ]
    tensors = {f"{n}{i}.q_proj.weight": np.ones((1, 1)) for n in names for i in range(500)}
    folder = model(tmp_path, tensors, {"model_type": model_type})
    begin = time.process_time()
    with pytest.raises((LayoutError, ConfigError)):
        qk.scan(folder)
    assert time.process_time() - begin < 5.0  # was minutes; this is no measure of speed


# ---- configs that leave things out, or say more than the family ----------------------------------


def test_sub_configs_without_default_values_are_read_with_the_class_defaults(tmp_path):
    """Sub-configs are saved without what equals the defaults of their class."""
    d = 24
    text, vision = (
        "language_model.model.layers.0.self_attn",
        "vision_tower.vision_model.encoder.layers.0.self_attn",
    )
    tensors = separate(text, 8 * 256, 4 * 256, d) | separate(vision, d, d, d)
    config = {"model_type": "gemma3", "text_config": {"hidden_size": d}, "vision_config": {"hidden_size": d}}
    rows = qk.scan(model(tmp_path, tensors, config), signature="none").layers
    assert [(r["d_head"], r["mask"]) for r in rows] == [(256, "causal"), (2, "bidirectional")] or [
        (r["d_head"], r["mask"]) for r in rows
    ] == [(2, "bidirectional"), (256, "causal")]


def test_defaults_are_those_of_the_config_classes():
    from transformers import AutoConfig

    seen = 0
    for family in families().values():
        for rule in family.rules:
            if rule.defaults:
                own = getattr(AutoConfig.for_model(family.model_type), rule.config)
                assert {k: getattr(own, k) for k in rule.defaults} == dict(rule.defaults)
                seen += 1
    assert seen == 6


def test_a_sub_config_outranks_the_config_around_it(tmp_path):
    tensors = separate("text_model.encoder.layers.0.self_attn")
    config = {
        "model_type": "clip",
        "num_attention_heads": 4,
        "text_config": {"num_attention_heads": 3, "hidden_size": 12},
    }
    assert qk.scan(model(tmp_path, tensors, config)).rows[0]["d_head"] == 4


def test_a_sub_config_takes_nothing_from_the_config_around_it(tmp_path):
    """What a tower's config leaves out is the default of its class, 8 heads, not the number around it."""
    tensors = separate("text_model.encoder.layers.0.self_attn", 16, 16, 16)
    config = {"model_type": "clip", "num_attention_heads": 4, "text_config": {"hidden_size": 16}}
    assert qk.scan(model(tmp_path, tensors, config)).rows[0]["d_head"] == 2


@pytest.mark.parametrize(
    ("model_type", "extra", "mask"),
    [
        ("llama", {}, "causal"),
        ("llama", {"is_causal": False}, "bidirectional"),
        ("llama", {"is_causal": True}, "causal"),
        ("gemma3_text", {"use_bidirectional_attention": True}, "bidirectional"),
        ("gemma3_text", {"use_bidirectional_attention": False}, "causal"),
    ],
)
def test_a_config_can_change_the_mask_of_a_decoder(model_type, extra, mask, tmp_path):
    config = {"model_type": model_type, "num_attention_heads": 3, "hidden_size": 12, **extra}
    assert qk.scan(model(tmp_path, separate("layers.0.self_attn"), config)).rows[0]["mask"] == mask


@pytest.mark.parametrize(
    ("model_type", "mask"), [("bert", "causal"), ("layoutlm", "bidirectional"), ("roberta", "causal")]
)
def test_is_decoder_counts_where_the_model_obeys_it(model_type, mask, tmp_path):
    config = {**BERT_CONFIG, "model_type": model_type, "is_decoder": True}
    assert qk.scan(model(tmp_path, bert_tensors(np.random.default_rng(0)), config)).rows[0]["mask"] == mask


def test_heads_that_do_not_fill_the_width_need_a_head_dim(tmp_path):
    folder = model(
        tmp_path,
        separate("layers.0.self_attn", 18, 18),
        {"model_type": "llama", "num_attention_heads": 3, "hidden_size": 12},
    )
    with pytest.raises(ConfigError, match="--head-dim"):
        qk.scan(folder)
    assert qk.scan(folder, head_dim=6).rows[0]["d_head"] == 6


@pytest.mark.parametrize("config", [None, {"model_type": "gpt2"}, {"model_type": "gpt2", "n_head": 4}])
def test_a_gpt2_that_stores_the_other_way_round_is_refused(config, tmp_path):
    """nanoGPT and its kin use Linear where GPT-2 uses Conv1D: (3 d, d), not (d, 3 d)."""
    folder = model(tmp_path, {"transformer.h.0.attn.c_attn.weight": normal(36, 12)}, config)
    with pytest.raises((ConfigError, LayoutError), match=r"\(36, 12\)"):
        qk.scan(folder, heads=4)


# ---- torch's own modules -------------------------------------------------------------------------


@pytest.mark.parametrize(
    "path", ["multihead_attn", "blocks.0.multihead_attn", "decoder.layers.3.multihead_attn"]
)
def test_multihead_attn_is_cross_attention_wherever_it_stands(path, tmp_path):
    tensors = {f"{path}.in_proj_weight": normal(36, 12), "self_attn.in_proj_weight": normal(36, 12)}
    by_kind = {r["module"]: r for r in qk.scan(model(tmp_path, tensors, None), heads=3).layers}
    assert by_kind[path]["attention"] == "cross"
    assert by_kind[path]["symmetry"] is None
    assert "cross-attention" in by_kind[path]["reason"]
    assert by_kind["self_attn"]["attention"] == "self"
    assert by_kind["self_attn"]["symmetry"] is not None


def test_biases_of_weights_that_are_stored_apart_are_found_together(tmp_path):
    tensors = {
        "attn.q_proj_weight": normal(12, 12),
        "attn.k_proj_weight": normal(12, 7, seed=1),
        "attn.in_proj_bias": np.arange(36.0),
    }
    (layer,) = qk.layers(model(tmp_path, tensors, None), heads=3)
    np.testing.assert_array_equal(layer.form.b_q.ravel(), np.arange(12.0))
    np.testing.assert_array_equal(layer.form.b_k.ravel(), np.arange(12.0, 24.0))


def test_attention_pooling_is_listed_and_not_scored(tmp_path):
    tensors = {"attn_pool.in_proj_weight": normal(36, 12), "blocks.0.attn.in_proj_weight": normal(36, 12)}
    scanned = qk.scan(model(tmp_path, tensors, None), heads=3).models[0]
    assert {r["module"] for r in scanned.rows} == {"blocks.0.attn"}
    assert [s["module"] for s in scanned.skipped] == ["attn_pool"]


# ---- rows say what layers say --------------------------------------------------------------------


def test_albert_groups_are_rows_with_the_layers_they_serve(tmp_path):
    tensors = {}
    for group in range(2):
        tensors |= separate(
            f"encoder.albert_layer_groups.{group}.albert_layers.0.attention", names=("query", "key")
        )
    config = {
        "model_type": "albert",
        "hidden_size": 12,
        "num_attention_heads": 3,
        "num_hidden_layers": 6,
        "num_hidden_groups": 2,
    }
    rows = qk.scan(model(tmp_path, tensors, config)).rows
    assert [(r["layer"], r["shared_by"]) for r in rows if r["head"] is None] == [
        (0, [0, 1, 2]),
        (3, [3, 4, 5]),
    ]
    assert {(r["layer"], tuple(r["shared_by"])) for r in rows if r["head"] == 1} == {
        (0, (0, 1, 2)),
        (3, (3, 4, 5)),
    }


@pytest.mark.parametrize(
    ("model_type", "norms"),
    [
        ("qwen3", ["q_norm.weight"]),
        ("stablelm", ["q_layernorm.norms.0.weight"]),
        ("phi", ["k_layernorm.weight"]),
    ],
)
def test_norms_on_queries_and_keys_are_flagged_in_every_row(model_type, norms, tmp_path):
    tensors = separate("model.layers.0.self_attn") | {
        f"model.layers.0.self_attn.{n}": np.ones(4) for n in norms
    }
    config = {"model_type": model_type, "hidden_size": 12, "num_attention_heads": 3}
    assert all("qk_norm" in r["flags"] for r in qk.scan(model(tmp_path, tensors, config)).rows)


def test_what_looks_like_a_query_and_is_not_in_the_layout_is_listed(tmp_path):
    tensors = bert_tensors(np.random.default_rng(0)) | {"pooler.extra.query.weight": normal(12, 12)}
    skipped = qk.scan(model(tmp_path, tensors, BERT_CONFIG)).models[0].skipped
    assert [s["module"] for s in skipped] == ["pooler.extra"]


def test_attention_layers_can_be_collected_in_a_set(bert):
    assert len(set(qk.layers(bert))) == 2


# ---- names by hand, names alone ------------------------------------------------------------------


@pytest.mark.parametrize("names", [("W_Q", "W_K"), ("query.kernel", "key.kernel"), ("q.weight", "k.weight")])
def test_a_name_by_hand_is_taken_as_it_is(names, tmp_path):
    tensors = {f"blocks.{i}.attn.{n}": normal(12, 12, seed=j) for i in range(2) for j, n in enumerate(names)}
    q, k = (f"blocks.{{layer}}.attn.{n}" for n in names)
    rows = qk.scan(model(tmp_path, tensors, None), heads=3, q=q, k=k).layers
    assert [r["layer"] for r in rows] == [0, 1]


@pytest.mark.parametrize("part", ["bl(ocks", "{layer", "{inner}", "*", "[0]"])
def test_a_pattern_that_is_none_is_refused(part, bert):
    if part == "bl(ocks":
        with pytest.raises(LayoutError, match="no tensor fits --q and --k"):
            qk.scan(bert, q=f"{part}.q", k=f"{part}.k", heads=3)
    else:
        with pytest.raises(LayoutError, match="no part of a name"):
            qk.scan(bert, q=f"{part}.q", k=f"{part}.k", heads=3)


def test_the_suggestion_names_a_query_and_its_key(tmp_path):
    tensors = separate("net.blocks.0.mixer", names=("q_proj", "k_proj")) | {
        "net.blocks.0.mixer.a_proj.weight": normal(2, 2)
    }
    folder = model(tmp_path, tensors, {"model_type": "mine"})
    with pytest.raises(LayoutError) as caught:
        qk.scan(folder)
    suggestion = str(caught.value).partition("For example: ")[2]
    assert suggestion == (
        "--heads N --q 'net.blocks.{layer}.mixer.q_proj.weight' --k 'net.blocks.{layer}.mixer.k_proj.weight'"
    )
    options = {"q": "net.blocks.{layer}.mixer.q_proj.weight", "k": "net.blocks.{layer}.mixer.k_proj.weight"}
    assert len(qk.scan(folder, heads=3, **options).layers) == 1


def test_names_alone_decide_only_where_all_readings_agree(tmp_path):
    """opt's names fit several families, and all of them read the same weights in the same way."""
    tensors = separate("model.decoder.layers.0.self_attn")
    rows = qk.scan(model(tmp_path, tensors, None), heads=3).layers
    assert [(r["layer"], r["mask"]) for r in rows] == [(0, "unknown")]


def test_names_that_can_be_read_in_two_ways_are_refused(tmp_path, monkeypatch):
    from qkform.layouts import choose

    known = dict(families())
    first = known["gpt_neox"]
    other = first.rules[0].__class__(**{**vars(first.rules[0]), "order": "q|k|v"})
    known["twin"] = first.__class__("twin", "twin.toml", (other,))
    monkeypatch.setattr(choose, "families", lambda: known)
    tensors = {"layers.0.attention.query_key_value.weight": normal(36, 12)}
    folder = model(tmp_path, tensors, None)
    with pytest.raises(LayoutError, match="no config"):
        qk.scan(folder, heads=3)


# ---- GGUF ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arch", "causal", "mask"),
    [
        ("llama", None, "causal"),
        ("llama", False, "bidirectional"),
        ("bert", None, "bidirectional"),
        ("bert", True, "causal"),
        ("never-heard-of", None, "unknown"),
        ("never-heard-of", True, "causal"),
    ],
)
def test_the_metadata_of_a_gguf_file_decides_its_mask(arch, causal, mask, tmp_path):
    rows = qk.scan(gguf_file(tmp_path, arch, causal)).rows
    assert {r["mask"] for r in rows} == {mask}
    assert not any("qk_norm" in r["flags"] for r in rows)


def test_norms_on_queries_and_keys_are_flagged_in_gguf(tmp_path):
    rows = qk.scan(gguf_file(tmp_path, "qwen3", None, "attn_q_norm", "attn_k_norm")).rows
    assert all("qk_norm" in r["flags"] for r in rows)


def gguf_file(tmp_path, arch, causal, *norms):
    import gguf

    writer = gguf.GGUFWriter(tmp_path / "m.gguf", arch)
    writer.add_head_count(3)
    writer.add_embedding_length(12)
    writer.add_block_count(1)
    if causal is not None:
        writer.add_causal_attention(causal)
    for name in ("attn_q", "attn_k"):
        writer.add_tensor(
            f"blk.0.{name}.weight", normal(12, 12, seed=len(name)).astype(np.float32) + (name == "attn_q")
        )
    for name in norms:
        writer.add_tensor(f"blk.0.{name}.weight", np.ones(4, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return tmp_path / "m.gguf"
