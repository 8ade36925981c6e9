"""Models that no family file describes: what their names and configs prove, and what stays open."""

from __future__ import annotations

import time
import tracemalloc
import weakref
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest

from qkform.errors import LayoutError
from qkform.layouts import Layout, Overrides, find_layers
from qkform.layouts.scopes import Projection, Solver, candidates


@dataclass(frozen=True)
class Shape:
    shape: tuple[int, ...]


def found(
    tensors: Mapping[str, Any], config: Mapping[str, Any] | None, overrides: Overrides | None = None
) -> Layout:
    """The layout of tensors, given as arrays or as shapes."""
    shapes = {name: Shape(t if isinstance(t, tuple) else t.shape) for name, t in tensors.items()}

    def read(name: str, rows: int | None = None) -> np.ndarray:
        return np.asarray(tensors[name])[:rows]

    return find_layers(shapes, config, read, source="here", overrides=overrides)


def pair(
    path: str, q: int = 12, k: int = 12, d: int = 12, names: str = "q_proj k_proj"
) -> dict[str, tuple[int, int]]:
    return {f"{path}.{name}.weight": (n, d) for name, n in zip(names.split(), (q, k), strict=True)}


def heads(layout: Layout) -> dict[str, tuple[int, int, int]]:
    return {a.module: (a.n_heads, a.n_kv_heads, a.d_head) for a in layout.layers}


MINE = {"model_type": "mine", "hidden_size": 12, "num_attention_heads": 3}


# ---- a model of one's own ------------------------------------------------------------------------


@pytest.mark.parametrize(
    "names", ["q_proj k_proj", "query key", "to_q to_k", "wq wk", "linear_q linear_k", "q k"]
)
def test_an_unheard_model_with_clear_names_is_scanned_and_flagged(names: str) -> None:
    tensors = pair("net.blocks.0.mixer", names=names) | pair("net.blocks.1.mixer", names=names)
    layout = found(tensors, MINE)
    assert [(a.layer, a.component, a.mask, a.norm_kind, a.flags) for a in layout.layers] == [
        (i, "net.blocks", "unknown", "unknown", ("by_names",)) for i in range(2)
    ]
    assert set(heads(layout).values()) == {(3, 3, 4)}


def test_key_heads_and_a_head_size_count() -> None:
    config = MINE | {"num_key_value_heads": 1, "head_dim": 8}
    assert heads(found(pair("layers.0.attn", 24, 8), config)) == {"layers.0.attn": (3, 1, 8)}


@pytest.mark.parametrize(
    ("config", "shapes"),
    [
        (MINE, (15, 15, 12)),  # no head size, and the heads do not fill the width
        (MINE | {"head_dim": 5}, (12, 12, 12)),  # a head size that does not fit
        (MINE | {"num_key_value_heads": 1}, (12, 12, 12)),
        (MINE | {"hidden_size": 16}, (12, 12, 12)),
        ({"model_type": "mine", "hidden_size": 12}, (12, 12, 12)),
    ],
)
def test_heads_that_the_shapes_do_not_bear_out_are_an_error(
    config: Any, shapes: tuple[int, int, int]
) -> None:
    with pytest.raises(LayoutError, match="no head count in the config makes its shapes"):
        found(pair("layers.0.attn", *shapes), config)


def test_heads_by_hand_do_for_a_config_without_them() -> None:
    layout = found(pair("layers.0.attn"), {"model_type": "mine"}, Overrides(heads=2))
    assert heads(layout) == {"layers.0.attn": (2, 2, 6)}


def test_fused_weights_of_an_unheard_model_are_not_guessed() -> None:
    fused = {"layers.0.attn.qkv.weight": (36, 12)}
    with pytest.raises(LayoutError, match=r"layers.\{layer\}.attn.qkv.weight"):
        found(fused, MINE)
    layout = found(pair("tower.0.attn") | fused, MINE)
    assert [s["module"] for s in layout.skipped] == ["layers.0.attn"]


def test_the_number_that_differs_between_modules_is_the_layer() -> None:
    tensors = pair("encoder.block.0.layer.0.Self") | pair("encoder.block.1.layer.0.Self")
    assert [(a.component, a.layer) for a in found(tensors, MINE).layers] == [
        ("encoder.block", 0),
        ("encoder.block", 1),
    ]


@pytest.mark.parametrize(
    "name", ["crossattention.self", "encoder_attn", "cross_attn", "EncDecAttention", "attn2"]
)
def test_cross_attention_is_known_by_its_name(name: str) -> None:
    (layer,) = found(pair(f"layers.0.{name}"), MINE).layers
    assert layer.attention == "cross"


def test_keys_of_another_width_are_cross_attention() -> None:
    tensors = {"layers.0.attn.q_proj.weight": (12, 12), "layers.0.attn.k_proj.weight": (12, 7)}
    assert [a.attention for a in found(tensors, MINE).layers] == ["cross"]


@pytest.mark.parametrize(
    ("extra", "reason"),
    [
        ({"layers.0.attn.A_log": (3,)}, "linear attention"),
        ({"layers.0.attn.q_conv1d.weight": (12, 1, 4)}, "a convolution"),
    ],
)
def test_what_is_no_softmax_attention_is_listed(extra: dict[str, Any], reason: str) -> None:
    layout = found(pair("layers.0.attn") | pair("layers.1.attn") | extra, MINE)
    assert list(heads(layout)) == ["layers.1.attn"]
    assert [(s["module"], reason in s["reason"]) for s in layout.skipped] == [("layers.0.attn", True)]


@pytest.mark.parametrize(
    ("model_type", "word"), [("rwkv", "recurrent"), ("mamba", "state space"), ("resnet", "conv")]
)
def test_a_model_without_attention_says_what_it_is(model_type: str, word: str) -> None:
    with pytest.raises(LayoutError, match=f"{model_type} has no softmax attention.*{word}"):
        found({"blocks.0.key.weight": (12, 12)}, {"model_type": model_type})


# ---- which part of the config --------------------------------------------------------------------

TWO = {
    "model_type": "mine",
    "text_config": {"hidden_size": 12, "num_attention_heads": 3},
    "vision_config": {"hidden_size": 12, "num_attention_heads": 6},
}


def test_words_of_the_path_choose_the_sub_config() -> None:
    tensors = pair("language_model.layers.0.attn") | pair("vision_tower.layers.0.attn")
    assert heads(found(tensors, TWO)) == {
        "language_model.layers.0.attn": (3, 3, 4),
        "vision_tower.layers.0.attn": (6, 6, 2),
    }


def test_two_sub_configs_that_fit_and_no_word_between_them_stay_open() -> None:
    with pytest.raises(LayoutError, match="leaves open whether it has 3 heads of 4 or 6 heads of 2"):
        found(pair("model.layers.0.attn"), TWO)


def test_a_sub_config_that_is_named_and_does_not_fit_is_not_replaced_by_another() -> None:
    config = TWO | {"vision_config": {"hidden_size": 16, "num_attention_heads": 4}}
    with pytest.raises(LayoutError, match="no head count"):
        found(pair("vision_tower.layers.0.attn"), config)


def test_encoder_and_decoder_heads_of_one_config() -> None:
    config = {"model_type": "mine", "d_model": 12, "encoder_attention_heads": 3, "decoder_attention_heads": 6}
    tensors = pair("encoder.layers.0.self_attn") | pair("decoder.layers.0.self_attn")
    assert heads(found(tensors, config)) == {
        "encoder.layers.0.self_attn": (3, 3, 4),
        "decoder.layers.0.self_attn": (6, 6, 2),
    }


def test_heads_of_stages_follow_the_first_number() -> None:
    config = {"model_type": "mine", "embed_dim": 12, "depths": [1, 2], "num_heads": [2, 4]}
    tensors: dict[str, tuple[int, int]] = {}
    for stage, block in ((0, 0), (1, 0), (1, 1)):
        d = 12 * 2**stage
        tensors |= pair(f"encoder.layers.{stage}.blocks.{block}.attention.self", d, d, d, "query key")
    assert [g[0] for g in heads(found(tensors, config)).values()] == [2, 4, 4]


def test_a_question_asked_again_has_the_answer_of_its_own_module() -> None:
    """Answers are kept, and words of a path, numbers in it and shapes still tell modules apart."""
    config = {
        "model_type": "mine",
        "hidden_size": 12,
        "num_attention_heads": 3,
        "vision_2_config": {"hidden_size": 12, "num_attention_heads": 6},
        "stage_config": {"hidden_size": 12, "num_attention_heads": [1, 2, 4]},
    }
    parts = candidates(config)
    modules = ["layers.0.a", "layers.1.a", "tower.2.a", "vision.2.a", "stage.0.a", "stage.1.a", "stage.2.a"]
    sides = [Projection(12, 12), Projection(24, 24), Projection(6, 12)]
    kept = Solver(parts, Overrides())
    asked = [(m, q, k, wide) for m in modules for q in sides for k in sides for wide in (False, True)] * 2
    answers = [kept.solve(m, q, k, None, wide) for m, q, k, wide in asked]
    assert answers == [Solver(parts, Overrides()).solve(m, q, k, None, wide) for m, q, k, wide in asked]
    plain = {m: a for (m, q, k, _), a in zip(asked, answers, strict=True) if q == k == sides[0]}
    heads = [a if isinstance(a, str) else a.n_heads for a in plain.values()]
    assert [str(a)[:23] for a in heads[:2]] == ["the config leaves open "] * 2
    assert heads[2:6] == [6, 6, 1, 2]


@pytest.mark.parametrize(
    ("names", "normed"),
    [
        (["q_norm.weight", "k_norm.weight"], True),
        (["q_norm.of.a.making.not.known.gain"], True),
        (["k_layernorm.scale"], True),
        (["q_norm_2.weight", "q_normal.weight", "q_norm"], False),
        (["q_norm-a.weight", "q_norm0.weight"], False),
    ],
)
def test_a_norm_on_queries_or_keys_is_whatever_stands_below_its_name(names: list[str], normed: bool) -> None:
    extra = {f"layers.0.attn.{name}": (4,) for name in names} | {"layers.1.attn.q_norm.weight": (4,)}
    first, second = found(pair("layers.0.attn") | pair("layers.1.attn") | extra, MINE).layers
    assert ("qk_norm" in first.flags, "qk_norm" in second.flags) == (normed, True)


def test_names_that_differ_in_numbers_are_all_listed_and_numbers_inside_words_count() -> None:
    left = [f"pool.{i}.deep.query.weight" for i in (0, 7, 12, 305)]
    extra = dict.fromkeys([*left, "pool.1.q1_proj.weight", "pool.2.que3ry.weight"], (12, 12))
    layout = found(pair("layers.0.attn") | extra, MINE)
    assert sorted(s["module"] for s in layout.skipped) == sorted(n.rsplit(".", 2)[0] for n in left)


# ---- special storage ------------------------------------------------------------------------------


def test_gated_queries_leave_the_gate_out() -> None:
    rng = np.random.default_rng(0)
    q, k = rng.normal(size=(2 * 3 * 4, 12)), rng.normal(size=(4, 12))
    config = MINE | {"model_type": "qwen3_next", "num_key_value_heads": 1, "head_dim": 4}
    tensors = {"layers.3.self_attn.q_proj.weight": q, "layers.3.self_attn.k_proj.weight": k}
    (layer,) = found(tensors, config).layers
    np.testing.assert_array_equal(layer.form.w_q, q.reshape(3, 2, 4, 12)[:, 0].swapaxes(1, 2))


def test_latent_attention_is_three_layers_whose_parts_add_up() -> None:
    rng = np.random.default_rng(1)
    d, n, nope, rope, v, rank, q_rank = 12, 3, 4, 2, 5, 6, 7
    at = "model.layers.0.self_attn"
    tensors = {
        f"{at}.q_a_proj.weight": rng.normal(size=(q_rank, d)),
        f"{at}.q_a_layernorm.weight": np.ones(q_rank),
        f"{at}.q_b_proj.weight": rng.normal(size=(n * (nope + rope), q_rank)),
        f"{at}.kv_a_proj_with_mqa.weight": rng.normal(size=(rank + rope, d)),
        f"{at}.kv_b_proj.weight": rng.normal(size=(n * (nope + v), rank)),
    }
    config = {
        "model_type": "deepseek_v3",
        "hidden_size": d,
        "num_attention_heads": n,
        "kv_lora_rank": rank,
        "qk_nope_head_dim": nope,
        "qk_rope_head_dim": rope,
        "v_head_dim": v,
    }
    whole, first, second = found(tensors, config).layers
    assert [(a.part, a.d_head, a.n_kv_heads) for a in (whole, first, second)] == [
        (None, 6, 3),
        ("nope", 4, 3),
        ("rope", 2, 1),
    ]
    assert all("latent_norm" in a.flags for a in (whole, first, second))
    q = (tensors[f"{at}.q_b_proj.weight"] @ tensors[f"{at}.q_a_proj.weight"]).reshape(n, nope + rope, d)
    kv_a = tensors[f"{at}.kv_a_proj_with_mqa.weight"]
    k = (tensors[f"{at}.kv_b_proj.weight"] @ kv_a[:rank]).reshape(n, nope + v, d)[:, :nope]
    expected = q[:, :nope].swapaxes(1, 2) @ k, q[:, nope:].swapaxes(1, 2) @ kv_a[rank:]
    np.testing.assert_allclose(first.form.matrix(), expected[0], atol=1e-12)
    np.testing.assert_allclose(second.form.matrix(), expected[1], atol=1e-12)
    np.testing.assert_allclose(whole.form.matrix(), sum(expected), atol=1e-12)


def latent_weights(d: int, n: int) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """Random weights of a latent attention, with their config."""
    rng = np.random.default_rng(5)
    nope, rope, v, rank, q_rank = 32, 16, 32, 24, 40
    at = "model.layers.0.self_attn"
    shapes = {
        "q_a_proj": (q_rank, d),
        "q_b_proj": (n * (nope + rope), q_rank),
        "kv_a_proj_with_mqa": (rank + rope, d),
        "kv_b_proj": (n * (nope + v), rank),
    }
    config = {"model_type": "deepseek_v3", "hidden_size": d, "num_attention_heads": n, "kv_lora_rank": rank}
    config |= {"qk_nope_head_dim": nope, "qk_rope_head_dim": rope, "v_head_dim": v}
    return {f"{at}.{name}.weight": rng.normal(size=shape) for name, shape in shapes.items()}, config


def test_nothing_as_large_as_a_product_lives_beside_the_products_of_latent_attention() -> None:
    tensors, config = latent_weights(512, 16)
    whole = found(tensors, config).layers[0]
    assert replace(whole).form.n_heads == 16  # what is imported on first use is no memory of a form
    tracemalloc.start()
    form = whole.form
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1.15 * (form.w_q.nbytes + form.w_k.nbytes)


def test_the_factors_of_queries_are_gone_when_those_of_keys_are_read() -> None:
    tensors, config = latent_weights(32, 4)
    alive: dict[str, weakref.ref[np.ndarray]] = {}

    def read(name: str, rows: int | None = None) -> np.ndarray:
        if ".kv_" in name:
            assert not any(ref() is not None for other, ref in alive.items() if ".q_" in other)
        array = tensors[name][:rows].copy()
        alive[name] = weakref.ref(array)
        return array

    shapes = {name: Shape(t.shape) for name, t in tensors.items()}
    whole = find_layers(shapes, config, read, source="here").layers[0]
    assert whole.form.w_q.shape == (4, 32, 48)
    assert len(alive) == 4


def test_biases_of_latent_attention_go_through_the_second_step() -> None:
    """k = (x W_a + b_a) W_b: the bias of the first step is a bias of the product; the rotary key has its own."""
    tensors, config = latent_weights(32, 4)
    at = "model.layers.0.self_attn"
    rng = np.random.default_rng(6)
    tensors[f"{at}.q_a_proj.bias"] = q_bias = rng.normal(size=40)
    tensors[f"{at}.kv_a_proj_with_mqa.bias"] = kv_bias = rng.normal(size=40)
    whole, nope, rope = (a.form for a in found(tensors, config).layers)
    q = (tensors[f"{at}.q_b_proj.weight"] @ q_bias).reshape(4, 48)
    k = (tensors[f"{at}.kv_b_proj.weight"] @ kv_bias[:24]).reshape(4, 64)[:, :32]
    np.testing.assert_allclose(whole.b_q, q, atol=1e-12)
    np.testing.assert_allclose(whole.b_k, np.hstack([k, np.tile(kv_bias[24:], (4, 1))]), atol=1e-12)
    np.testing.assert_allclose(nope.b_q, q[:, :32], atol=1e-12)
    np.testing.assert_allclose(rope.b_k, kv_bias[None, 24:], atol=1e-12)


def test_layers_that_share_keys_are_scored_with_the_keys_they_read() -> None:
    rng = np.random.default_rng(2)
    tensors: dict[str, Any] = {}
    for i in range(4):
        for name in ("q_proj", "k_proj"):  # the keys of the last two are dead
            tensors[f"model.layers.{i}.self_attn.{name}.weight"] = rng.normal(size=(12, 12))
    config = MINE | {
        "model_type": "gemma3n_text",
        "head_dim": 4,
        "num_hidden_layers": 4,
        "num_key_value_heads": 3,
        "num_kv_shared_layers": 2,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
    }
    layers = found(tensors, config).layers
    assert [a.k.weight.split(".")[2] for a in layers] == ["0", "1", "0", "1"]
    assert ["shared_k" in a.flags for a in layers] == [False, False, True, True]


def test_pruned_heads_are_fewer_in_their_layer() -> None:
    tensors: dict[str, tuple[int, int]] = {}
    for i, width in enumerate((12, 8)):
        tensors |= pair(f"encoder.layer.{i}.attention.self", width, width, names="query key")
    layout = found(tensors, MINE | {"model_type": "bert", "pruned_heads": {"1": [2]}})
    assert list(heads(layout).values()) == [(3, 3, 4), (2, 2, 4)]


def test_position_terms_of_deberta_are_listed() -> None:
    tensors = pair("deberta.encoder.layer.0.attention.self", names="query_proj key_proj")
    config = MINE | {"model_type": "deberta-v2", "relative_attention": True, "pos_att_type": ["p2c", "c2p"]}
    (note,) = found(tensors, config).skipped
    assert note["module"] == "deberta.encoder.layer"
    assert "p2c, c2p" in note["reason"]
    assert not found(tensors, config | {"relative_attention": False}).skipped


# ---- other code bases -----------------------------------------------------------------------------

TIMM = {
    "patch_embed.proj.weight": (192, 3, 16, 16),
    "blocks.0.norm1.weight": (192,),
    "blocks.0.attn.qkv.weight": (576, 192),
    "blocks.0.mlp.fc1.weight": (768, 192),
}


@pytest.mark.parametrize(
    ("config", "overrides"),
    [
        ({"architecture": "vit_tiny_patch16_224", "num_features": 192}, None),
        ({"architecture": "mine", "model_args": {"num_heads": 3}}, None),
        (None, Overrides(heads=3)),
    ],
)
def test_a_timm_model_is_known_by_its_config_or_names(config: Any, overrides: Overrides | None) -> None:
    (layer,) = found(TIMM, config, overrides).layers
    assert (layer.n_heads, layer.d_head, layer.mask, layer.norm) == (3, 64, "bidirectional", "blocks.0.norm1")
    assert layer.q.part == "q|k|v: q"


def test_torchvision_numbers_its_layers_inside_a_name() -> None:
    tensors = {
        f"encoder.layers.encoder_layer_{i}.self_attention.in_proj_weight": (36, 12) for i in (0, 1, 10)
    }
    layout = found(tensors, None, Overrides(heads=3))
    assert [(a.component, a.layer) for a in layout.layers] == [("encoder.layers", i) for i in (0, 1, 10)]


def test_a_unet_calls_its_heads_head_dim() -> None:
    """diffusers: attention_head_dim of a UNet is the number of heads, per block; attn2 reads the text."""
    config = {
        "_class_name": "UNet2DConditionModel",
        "attention_head_dim": [2, 4],
        "block_out_channels": [8, 16],
        "cross_attention_dim": 5,
    }
    tensors: dict[str, tuple[int, int]] = {}
    for block, d in (("down_blocks.0", 8), ("mid_block", 16), ("up_blocks.0", 16), ("up_blocks.1", 8)):
        at = f"{block}.attentions.0.transformer_blocks.0"
        tensors |= pair(f"{at}.attn1", d, d, d, "to_q to_k")
        tensors |= {f"{at}.attn2.to_q.weight": (d, d), f"{at}.attn2.to_k.weight": (d, 5)}
    layout = found(tensors, config)
    assert {a.module.split(".attentions")[0]: a.n_heads for a in layout.layers} == {
        "down_blocks.0": 2,
        "mid_block": 4,
        "up_blocks.0": 4,
        "up_blocks.1": 2,
    }
    assert {(a.module.rpartition(".")[2], a.attention) for a in layout.layers} == {
        ("attn1", "self"),
        ("attn2", "cross"),
    }


def test_joint_attention_has_its_added_projections_as_entries_of_their_own() -> None:
    config = {"_class_name": "FluxTransformer2DModel", "num_attention_heads": 3, "attention_head_dim": 4}
    tensors = pair("transformer_blocks.0.attn", names="to_q to_k") | pair(
        "transformer_blocks.0.attn", names="add_q_proj add_k_proj"
    )
    assert [a.q.weight.split(".")[-2] for a in found(tensors, config).layers] == ["to_q", "add_q_proj"]


# ---- size and hostility ---------------------------------------------------------------------------


def test_a_hundred_thousand_names_take_seconds_at_most() -> None:
    tensors: dict[str, tuple[int, ...]] = {}
    for i in range(12_000):
        tensors |= pair(f"model.layers.{i}.self_attn")
        tensors |= {f"model.layers.{i}.mlp.experts.{j}.w.weight": (2, 2) for j in range(6)}
        tensors[f"model.layers.{i}.self_attn.q_norm.weight"] = (4,)
    begin = time.process_time()
    assert len(found(tensors, MINE).layers) == 12_000
    assert time.process_time() - begin < 15.0  # a few seconds; quadratic would be minutes


class Counted(dict[str, Shape]):
    """Shapes by name that count how often all names are gone through."""

    passes = 0

    def __iter__(self) -> Iterator[str]:
        self.passes += 1
        return super().__iter__()


@pytest.mark.parametrize("model_type", ["mine", "llama", "qwen3"])
def test_names_are_gone_through_as_often_for_many_layers_as_for_few(model_type: str) -> None:
    """Without a norm on queries and keys too, where nothing is found however long one looks."""
    passes = []
    for n in (2, 60):
        names = {name: Shape(s) for i in range(n) for name, s in pair(f"layers.{i}.self_attn").items()}
        tensors = Counted(names)
        layout = find_layers(tensors, MINE | {"model_type": model_type}, no_weight, source="here")
        assert len(layout.layers) == n
        passes.append(tensors.passes)
    assert passes[0] == passes[1] > 0


def no_weight(name: str, rows: int | None = None) -> np.ndarray:
    raise AssertionError(f"{name} is read")


def test_hostile_names_and_configs_cost_no_time() -> None:
    deep: dict[str, Any] = MINE | {"a_config": {}}
    inner = deep["a_config"]
    for _ in range(200):
        inner["b_config"] = {"num_heads": 3}
        inner = inner["b_config"]
    wide = {f"c{i}_config": {"num_heads": i} for i in range(5_000)}
    names = ["a." * 500, "0." * 500, "self_attn." * 40, "x" * 2000 + "."]
    tensors = {f"{n}{i}.q_proj.weight": (1, 1) for n in names for i in range(500)}
    tensors |= {name.replace("q_proj", "k_proj"): (1, 1) for name in tensors}
    begin = time.process_time()
    with suppress(LayoutError):
        found(tensors, deep | wide)
    assert time.process_time() - begin < 10.0


# ---- what a config leaves out ---------------------------------------------------------------------


def test_a_sub_config_that_is_left_out_has_the_defaults_of_its_class() -> None:
    """align: a BERT text tower of 768 and 12 heads, of which a file need not say a word."""
    tensors = pair("text_model.encoder.layer.0.attention.self", 768, 768, 768, "query key")
    assert list(heads(found(tensors, {"model_type": "align"})).values()) == [(12, 12, 64)]


def test_a_head_count_under_another_name_outranks_a_default() -> None:
    config = {"model_type": "cohere", "n_heads": 3, "hidden_size": 12}
    assert heads(found(pair("layers.0.self_attn"), config)) == {"layers.0.self_attn": (3, 3, 4)}


def test_the_defaults_are_those_of_the_classes() -> None:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    from qkform.layouts.defaults import known

    values, parts = known()
    classes = {t: CONFIG_MAPPING[t] for t in CONFIG_MAPPING}
    for model_type, named in parts.items():
        subs = classes[model_type].sub_configs
        assert {key: subs[key].model_type for key in named} == dict(named)
        own = {getattr(cls, "model_type", ""): cls for cls in subs.values()}
        classes = {**own, **classes}
    checked = [(t, key) for t, own in values.items() if t in classes for key in own]
    assert all(getattr(classes[t], key) == values[t][key] for t, key in checked)
    assert len(checked) > 1000
