"""Options that change the form, held against transformers' own forward passes and against laws."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file

import qkform as qk
from qkform.errors import ConfigError, LayoutError
from qkform.form import BilinearForm, reference
from qkform.form.folding import extended, gained_inputs, gained_outputs
from qkform.form.rotary import Rotary, llama3, plain, yarn
from qkform.layouts import AttentionLayer
from qkform.layouts.rotary import Positions, _data
from tests import truth

NEAR = 2e-6  # transformers keeps its frequencies in single precision
Array = np.ndarray[Any, Any]


# ---- what a model computes ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Seen:
    """One self-attention in two forward passes, every position at N (queries) and at 0 (keys)."""

    path: str
    x: Array  # (tokens, d_model), what the projections read
    x_hat: Array  # the same before the gain of the norm in front; x where there is none
    q: Array  # (n_heads, tokens, d_head), at position N
    k: Array  # (n_kv_heads, tokens, d_head), at position 0
    q_length: Array  # (n_heads, tokens, 1), what the norm on queries divides by
    k_length: Array


def case(name: str, **settings: Any) -> truth.Case:
    (found,) = (c for c in truth.CASES if c.name == name)
    return replace(found, settings={**found.settings, **settings})


def pass_at(model: Any, inputs: Mapping[str, Any], position: int | None) -> truth.Recorder:
    import torch

    inputs = dict(inputs)
    if position is not None:
        inputs["position_ids"] = torch.full_like(inputs["input_ids"], position)
    return truth.forward(model, inputs)[0]


def seen(chosen: truth.Case, model: Any, layers: Sequence[AttentionLayer], offset: int | None) -> list[Seen]:
    """What the model computes in each of `layers`."""
    inputs = truth.FEEDS[chosen.feed](model.config)
    queries = pass_at(model, inputs, offset)
    keys = queries if offset is None else pass_at(model, inputs, 0)
    out = []
    for layer in layers:
        path = truth.live_path(chosen, layer.module)
        module = model.get_submodule(path)
        (q,) = (c for c in queries.calls if c.module is module)
        (k,) = (c for c in keys.calls if c.module is module)
        assert float((q.x - k.x).abs().max()) < 1e-4  # constant positions leave the tokens alone
        x_hat = x = k.x
        if layer.norm is not None:
            norm = model.get_submodule(truth.live_path(chosen, layer.norm))
            r = truth._input(*keys.inputs[norm][0])
            centred = r - r.mean(-1, keepdim=True) if layer.norm_kind == "layer" else r
            eps = next(getattr(norm, n) for n in ("eps", "variance_epsilon") if hasattr(norm, n))
            x_hat = centred * ((centred**2).mean(-1, keepdim=True) + eps) ** -0.5
        lengths = []
        for side, recorder, call in (("q", queries, q), ("k", keys, k)):
            heads = (call.query if side == "q" else call.key).shape[1]
            lengths.append(length(module, side, recorder, heads))
        flat = x.shape[0] * x.shape[1]
        out.append(
            Seen(
                path,
                x.reshape(flat, -1).numpy(),
                x_hat.reshape(flat, -1).numpy(),
                *(t.transpose(0, 1).reshape(t.shape[1], flat, -1).numpy() for t in (q.query, k.key)),
                *lengths,
            )
        )
    return out


def length(module: Any, side: str, recorder: truth.Recorder, heads: int) -> Array:
    """(heads, tokens, 1): the length by which the norm on queries or keys divides, 1 without such a norm."""
    for name in (f"{side}_norm", f"{side}_layernorm"):
        norm = getattr(module, name, None)
        if norm is not None and type(norm).__name__ != "Identity" and recorder.inputs.get(norm):
            r = truth._input(*recorder.inputs[norm][0])
            if hasattr(norm, "norms"):
                norm = norm.norms[0]
            if "LayerNorm" in type(norm).__name__:
                r = r - r.mean(-1, keepdim=True)
            eps = next(getattr(norm, n) for n in ("eps", "variance_epsilon") if hasattr(norm, n))
            divisor = ((r**2).mean(-1, keepdim=True) + eps).sqrt().numpy()
            if divisor.ndim == 3:  # across all heads: (batch, tokens, 1)
                return np.repeat(divisor.reshape(1, -1, 1), heads, 0)
            if divisor.shape[1] != heads:  # (batch, tokens, heads, 1)
                divisor = divisor.swapaxes(1, 2)
            return divisor.swapaxes(0, 1).reshape(heads, -1, 1)
    return np.ones((heads, 1, 1))


def scores(what: Seen) -> Array:
    """(n_heads, tokens, tokens): the model's scores times the lengths that its norms divide by."""
    group = len(what.q) // len(what.k)
    q, k = what.q * what.q_length, np.repeat(what.k * what.k_length, group, 0)
    return np.einsum("hid,hjd->hij", q, k)


def off(form: BilinearForm, inputs: Array, true: Array) -> float:
    """Largest relative difference between x W x^T and the model's scores; W may be of [x, 1]."""
    if form.d_model == inputs.shape[1] + 1:
        inputs = np.hstack([inputs, np.ones((len(inputs), 1))])
    w = np.asarray(form.matrix(), dtype=np.float64)
    mine = np.einsum("ia,hab,jb->hij", inputs, w, inputs)
    return max(float(np.linalg.norm(m - t) / np.linalg.norm(t)) for m, t in zip(mine, true, strict=True))


def built(chosen: truth.Case, folder: Path, *, raw_qk: bool = False, biases: bool = True) -> Any:
    """The model of a case, saved to `folder`. `raw_qk`: norms on queries and keys are taken out of it afterwards."""
    import torch

    model = truth.build(chosen)
    truth.save(chosen, model, folder)
    if not biases:
        truth.without_biases(model)
    for module in model.modules() if raw_qk else ():
        for name in ("q_norm", "k_norm", "q_layernorm", "k_layernorm", "q_a_layernorm", "kv_a_layernorm"):
            if isinstance(getattr(module, name, None), torch.nn.Module):
                setattr(module, name, torch.nn.Identity())
    return model


LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
    "rope_theta": 500.0,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "rope_theta": 500.0}
LONGROPE = {
    "rope_type": "longrope",
    "short_factor": [1.5, 2.5],
    "long_factor": [4.0, 6.0],
    "rope_theta": 300.0,
}
DEEPSEEK = truth._case(
    "deepseek_v3",
    "DeepseekV3Model",
    {
        **{k: v for k, v in truth._ENCODER.items() if "layer" not in k},
        "num_hidden_layers": 2,
        "num_attention_heads": 3,
        "num_key_value_heads": 3,
        "q_lora_rank": 14,
        "kv_lora_rank": 16,
        "qk_nope_head_dim": 5,
        "qk_rope_head_dim": 6,
        "v_head_dim": 7,
        "first_k_dense_replace": 2,
    },
)
GEMMA3 = {
    "num_hidden_layers": 3,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    "rope_parameters": {
        "sliding_attention": {"rope_type": "default", "rope_theta": 50.0},
        "full_attention": {"rope_type": "linear", "factor": 3.0, "rope_theta": 900.0},
    },
}
ROTARY = {
    "llama": case("llama"),
    "llama, theta": case("llama", rope_parameters={"rope_type": "default", "rope_theta": 77.0}),
    "llama, linear": case(
        "llama", rope_parameters={"rope_type": "linear", "factor": 3.0, "rope_theta": 77.0}
    ),
    "llama, llama3": case("llama", rope_parameters=LLAMA3, max_position_embeddings=512),
    "llama, yarn": case("llama", rope_parameters=YARN, max_position_embeddings=256),
    "llama, yarn, mscale": case(
        "llama",
        rope_parameters={**YARN, "mscale": 1.3, "mscale_all_dim": 0.7, "truncate": False, "beta_fast": 8},
    ),
    "llama, dynamic": case(
        "llama", rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 77.0}
    ),
    "gpt_neox, partial": case(
        "gpt_neox", rope_parameters={"partial_rotary_factor": 0.67, "rope_theta": 90.0}
    ),
    "gptj": case("gptj"),
    "gemma3_text": case("gemma3_text", **GEMMA3),
    "modernbert": case("modernbert"),
    "modernbert-decoder": case("modernbert-decoder"),
    "phi": case("phi", num_attention_heads=3, num_key_value_heads=3),
    "phi3": case("phi3"),
    "phi3, longrope": case(
        "phi3",
        rope_parameters=LONGROPE,
        head_dim=4,
        original_max_position_embeddings=16,
        max_position_embeddings=64,
    ),
    "qwen3": case("qwen3"),
    "smollm3": case("smollm3", num_hidden_layers=5),
    "deepseek_v3": DEEPSEEK,
    "deepseek_v3, half": replace(DEEPSEEK, settings={**DEEPSEEK.settings, "rope_interleave": False}),
    "deepseek_v3, yarn": replace(
        DEEPSEEK, settings={**DEEPSEEK.settings, "rope_parameters": YARN, "max_position_embeddings": 256}
    ),
    "stablelm": case("stablelm", num_attention_heads=3, num_key_value_heads=3),
    "starcoder2": case("starcoder2"),
    "olmo2": case("olmo2"),
    "gguf:llama": case("gguf:llama"),
    "gguf:qwen2": case("gguf:qwen2"),
    "gguf:gemma": case("gguf:gemma"),
    "gguf:phi3": case("gguf:phi3"),
}


@pytest.mark.parametrize("name", ROTARY)
def test_form_at_a_distance_is_what_the_model_scores_and_mistakes_are_noticed(
    name: str, tmp_path: Path
) -> None:
    chosen, n = ROTARY[name], 5
    model = built(chosen, tmp_path, raw_qk=True, biases=False)
    everything = list(qk.layers(tmp_path))
    layers = [layer for layer in everything if layer.part is None]
    parts = [layer for layer in everything if layer.part is not None]
    assert len(parts) == (4 if name.startswith("deepseek") else 0)
    for layer in parts:  # the content part stays as it is, and the two make the whole
        (whole,) = (a for a in layers if a.module == layer.module)
        (other,) = (a for a in parts if a.module == layer.module and a.part != layer.part)
        together = layer.form_with(offset=n).matrix() + other.form_with(offset=n).matrix()
        np.testing.assert_allclose(whole.form_with(offset=n).matrix(), together, rtol=1e-9, atol=1e-12)
        if layer.part == "nope":
            np.testing.assert_array_equal(layer.form_with(offset=n).w_q, layer.form.w_q)
    for layer, what in zip(layers, seen(chosen, model, layers, n), strict=True):
        true = scores(what)
        assert off(layer.form_with(offset=n), what.x, true) < NEAR, layer.module
        turns = layer.positions.rotary(layer.d_head, n)
        if turns is None:
            assert (name, layer.layer) == ("smollm3", 3)
            continue
        for mistake in (
            rotated(layer, turns, -n),  # the wrong sign
            rotated(
                layer, replace(turns, style="half" if turns.style == "interleaved" else "interleaved"), n
            ),
            rotated(layer, replace(turns, frequencies=wrong_theta(turns)), n),
            rotated(layer, replace(turns, factor=turns.factor * 1.05), n),
            layer.form,
        ):
            assert off(mistake, what.x, true) > 1e-3
    if name == "modernbert":
        assert len({layer.positions.rotary(layer.d_head, n).frequencies for layer in layers}) == 2


def rotated(layer: AttentionLayer, turns: Rotary, n: int) -> BilinearForm:
    return BilinearForm(turns.turned(layer.form.w_q, n), layer.form.w_k)


def wrong_theta(turns: Rotary) -> tuple[float, ...]:
    return tuple(f**1.2 * 1.3 for f in turns.frequencies)


@pytest.mark.parametrize("n", [-4, 0, 15, 16, 40])
def test_longrope_takes_its_long_factors_where_a_sequence_must_be_long(n: int, tmp_path: Path) -> None:
    import torch

    chosen = ROTARY["phi3, longrope"]
    model = built(chosen, tmp_path)
    (layer, *_) = qk.layers(tmp_path)
    assert layer.positions is not None
    rotary = model.rotary_emb
    position = torch.tensor([[abs(n)]])
    cos, sin = rotary(torch.zeros(1, 1, 4, dtype=torch.float64), position)
    turns = layer.positions.rotary(layer.d_head, n)
    assert turns is not None
    angles = np.array(turns.frequencies) * abs(n)
    np.testing.assert_allclose(cos[0, 0, :2].numpy(), turns.factor * np.cos(angles), atol=1e-5)
    np.testing.assert_allclose(sin[0, 0, :2].numpy(), turns.factor * np.sin(angles), atol=1e-5)
    assert turns.factor > 1.0


# ---- everything at once, against scores by brute force -----------------------------------------------------

COMBINED = {
    "llama": (case("llama", attention_bias=True), ("fold_norm", "bias", "offset")),
    "qwen3": (case("qwen3", attention_bias=True), ("fold_norm", "bias", "qk_norm", "offset")),
    "gemma3_text": (
        case("gemma3_text", attention_bias=True, **GEMMA3),
        ("fold_norm", "bias", "qk_norm", "offset"),
    ),
    "gpt_neox": (
        case("gpt_neox", rope_parameters={"partial_rotary_factor": 0.67}),
        ("fold_norm", "bias", "offset"),
    ),
    "phi": (case("phi"), ("fold_norm", "bias", "offset")),
    "stablelm": (
        case("stablelm", qk_layernorm=True, use_qkv_bias=True),
        ("fold_norm", "bias", "qk_norm", "offset"),
    ),
    "olmo2": (case("olmo2", attention_bias=True), ("bias", "qk_norm", "offset")),
    "modernbert": (case("modernbert", attention_bias=True), ("fold_norm", "bias", "offset")),
    "gpt2": (case("gpt2"), ("fold_norm", "bias")),
    "biogpt": (case("biogpt"), ("fold_norm", "bias")),
    "vit": (case("vit"), ("fold_norm", "bias")),
    "gguf:llama": (case("gguf:llama"), ("fold_norm", "offset")),
    "gguf:gemma": (case("gguf:gemma"), ("fold_norm", "offset")),
}


@pytest.mark.parametrize("name", COMBINED)
def test_all_options_together_give_the_scores_of_the_model(name: str, tmp_path: Path) -> None:
    chosen, options = COMBINED[name]
    n = 3 if "offset" in options else None
    asked: dict[str, Any] = {option: True for option in options if option != "offset"}
    asked |= {"offset": n} if n is not None else {}
    model = built(chosen, tmp_path)
    layers = list(qk.layers(tmp_path))
    for layer, what in zip(layers, seen(chosen, model, layers, n), strict=True):
        inputs = what.x_hat if "fold_norm" in options else what.x
        true = scores(what)
        assert off(layer.form_with(**asked), inputs, true) < NEAR, layer.module
        for option in options:  # each of them is needed
            less = {k: v for k, v in asked.items() if k != option}
            without = off(layer.form_with(**less), inputs, true)
            skipped = option == "fold_norm" and layer.norm is None
            assert (without < NEAR) if skipped else (without > 1e-3), (layer.module, option)


def test_table_of_positions_turns_as_the_models_own_modules_do() -> None:
    """Every rotary type that is listed and that the installed transformers has, at its default config."""
    checked = []
    for style in ("half", "interleaved"):
        for kind, facts in _data()[style].items():
            if not kind.startswith("gguf:"):
                checked += [kind] if own_turns_agree(kind, facts) else []
    missing = {k for s in ("half", "interleaved") for k in _data()[s]} - set(checked)
    assert {k for k in missing if not k.startswith("gguf:")} == set()


def own_turns_agree(kind: str, facts: Mapping[str, Any]) -> bool:
    import importlib

    import torch
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    truth.quiet()
    config = CONFIG_MAPPING[kind]()
    modeling = importlib.import_module(type(config).__module__.replace("configuration_", "modeling_"))
    n, generator = 3, torch.Generator().manual_seed(1)
    heads = getattr(config, "n_head", None) or config.num_attention_heads
    width = getattr(config, "n_embd", None) or config.hidden_size
    d_head = getattr(config, "head_dim", None) or width // heads
    if kind.startswith("deepseek"):
        d_head = config.qk_rope_head_dim
    q, k = torch.randn(2, 1, 1, 1, d_head, generator=generator).float()
    for number in range(4):
        turns = Positions((kind,), config.to_dict(), kind, number).rotary(d_head, n)
        if turns is None:
            assert facts.get("without")
            continue
        r = turns.dims
        turned = own_turn(modeling, config, number, q, k, n, r)
        mine = turns.turned(q[0, 0].double().numpy(), n) @ k[0, 0].double().numpy().T
        theirs = (turned[0] * turned[1]).sum().double().numpy()
        np.testing.assert_allclose(
            mine.item(), theirs, rtol=1e-4, atol=2e-4, err_msg=f"{kind} layer {number}"
        )
    return True


def own_turn(modeling: Any, config: Any, number: int, q: Any, k: Any, n: int, r: int) -> tuple[Any, Any]:
    """(q at position n, k at position 0) by the functions of a modeling file."""
    import torch

    position = torch.tensor([[n], [0]])  # a batch of two: the query's and the key's
    both = torch.cat([q, k])  # (2, 1, 1, d_head)
    if hasattr(modeling, "create_sinusoidal_positions"):
        table = modeling.create_sinusoidal_positions(8, r)[position]  # (2, 1, r)
        sin, cos = table.chunk(2, dim=-1)
        turned = modeling.apply_rotary_pos_emb(both[..., :r], sin, cos)
        turned = torch.cat([turned, both[..., r:]], -1)
        return turned[0], turned[1]
    (name,) = {
        c
        for c, value in vars(modeling).items()
        if c.endswith("RotaryEmbedding") and value.__module__ == modeling.__name__
    }
    rotary = getattr(modeling, name)(config)
    kinds = getattr(config, "layer_types", None)
    nested = isinstance(next(iter((config.rope_parameters or {}).values()), None), dict)
    given = (kinds[number],) if nested else ()
    embedded = rotary(both, position, *given)
    if torch.is_tensor(embedded):  # complex
        turned = modeling.apply_rotary_emb(both, both, embedded)[0]
    elif hasattr(modeling, "apply_rotary_pos_emb_interleave"):
        turned = modeling.apply_rotary_pos_emb_interleave(both, both, *embedded)[0]
    else:
        turned = modeling.apply_rotary_pos_emb(both[..., :r], both[..., :r], *embedded)[0]
        turned = torch.cat([turned, both[..., r:]], -1)
    return turned[0], turned[1]


# ---- laws --------------------------------------------------------------------------------------------------

RNG = np.random.default_rng(4)
TURNS = {
    "half": Rotary("half", tuple(plain(100.0, 6))),
    "interleaved": Rotary("interleaved", tuple(plain(100.0, 6))),
    "partial": Rotary("half", tuple(plain(100.0, 4))),
    "last": Rotary("interleaved", tuple(plain(100.0, 2)), start=4),
    "middle, with a factor": Rotary("half", tuple(plain(100.0, 2)), start=2, factor=1.3),
}


def factors(heads: int = 4, kv: int = 2, d: int = 9, k: int = 6) -> tuple[Array, Array, Array, Array]:
    return (
        RNG.normal(size=(heads, d, k)),
        RNG.normal(size=(kv, d, k)),
        RNG.normal(size=(heads, k)),
        RNG.normal(size=(kv, k)),
    )


@pytest.mark.parametrize("name", TURNS)
def test_turning_queries_by_n_equals_turning_keys_by_minus_n(name: str) -> None:
    turns, (w_q, w_k, _, _) = TURNS[name], factors(kv=4)
    for n in (-7, 1, 30):
        after = BilinearForm(turns.turned(w_q, n), w_k).matrix()
        before = BilinearForm(w_q, turns.turned(w_k, -n)).matrix()
        np.testing.assert_allclose(after, before, rtol=1e-12, atol=1e-12)
        # queries and keys exchanged, and the distance reversed: the transpose
        swapped = BilinearForm(turns.turned(w_k, -n), w_q).matrix()
        np.testing.assert_allclose(after, swapped.transpose(0, 2, 1), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", TURNS)
def test_turns_add_up_and_no_distance_is_no_turn(name: str) -> None:
    turns, (w, *_) = TURNS[name], factors()
    once = replace(turns, factor=1.0)
    np.testing.assert_allclose(once.turned(once.turned(w, 5), -2), once.turned(w, 3), rtol=1e-12, atol=1e-12)
    np.testing.assert_array_equal(once.turned(w, 0), w)
    changed = turns.turned(w, 0) / w
    inside = slice(turns.start, turns.start + turns.dims)
    np.testing.assert_allclose(changed[..., inside], turns.factor**2)
    changed[..., inside] = 1.0
    np.testing.assert_array_equal(changed, 1.0)


@pytest.mark.parametrize("style", ["half", "interleaved"])
def test_symmetry_of_tied_orthogonal_factors_falls_as_the_mean_cosine(style: str) -> None:
    w = 3.0 * np.linalg.qr(RNG.normal(size=(9, 6)))[0][None]
    turns = Rotary(style, tuple(plain(20.0, 6)))  # type: ignore[arg-type]
    for n in (0, 1, 4, 19):
        form = BilinearForm(turns.turned(w, n), w)
        expected = np.mean(np.cos(2 * n * np.array(turns.frequencies)))
        np.testing.assert_allclose(form.symmetry(), expected, atol=1e-12)


@pytest.mark.parametrize("style", ["half", "interleaved"])
def test_score_of_positions_depends_on_their_distance(style: str) -> None:
    """Brute force: q turned to i, k turned to j, as one complex number for each pair."""
    turns = Rotary(style, tuple(plain(50.0, 6)))  # type: ignore[arg-type]
    w_q, w_k, _, _ = factors(heads=1, kv=1)
    x, y = RNG.normal(size=9), RNG.normal(size=9)

    def at(v: Array, position: int) -> Array:
        pairs = (v[:3], v[3:]) if style == "half" else (v[::2], v[1::2])
        return (pairs[0] + 1j * pairs[1]) * np.exp(1j * position * np.array(turns.frequencies))

    for i, j in ((5, 2), (2, 5), (9, 9), (103, 100)):
        true = (at(x @ w_q[0], i) * np.conj(at(y @ w_k[0], j))).real.sum()
        form = BilinearForm(turns.turned(w_q, i - j), w_k).matrix()[0]
        np.testing.assert_allclose(x @ form @ y, true, rtol=1e-10)


def test_turn_of_torch_and_of_small_types_is_the_same() -> None:
    import ml_dtypes
    import torch

    w = RNG.normal(size=(2, 5, 6))
    for turns in TURNS.values():
        expected = turns.turned(w, 3)
        assert turns.turned(torch.from_numpy(w), 3).dtype == torch.float64
        np.testing.assert_allclose(turns.turned(torch.from_numpy(w), 3).numpy(), expected, rtol=1e-14)
        small = w.astype(ml_dtypes.bfloat16)
        assert turns.turned(small, 3).dtype == np.float32
        np.testing.assert_allclose(
            turns.turned(small, 3), turns.turned(small.astype(np.float64), 3), rtol=1e-5, atol=1e-6
        )


def test_stored_linear_weights_keep_their_memory_order() -> None:
    """Scores stream along d_model; a turned factor must not be slower to score than the stored one."""
    w = np.swapaxes(RNG.normal(size=(2, 6, 9)), 1, 2)
    assert TURNS["half"].turned(w, 2)[0].flags.f_contiguous
    assert extended(BilinearForm(w, w)).w_q[0].flags.f_contiguous


def test_fold_of_ones_and_of_nothing_is_identity() -> None:
    w_q, _, b_q, _ = factors()
    w, b = gained_inputs(w_q, b_q, np.ones(9), np.zeros(9))
    np.testing.assert_array_equal(w, w_q)
    np.testing.assert_array_equal(b, b_q)
    assert gained_inputs(w_q, None, np.ones(9), None)[1] is None
    w, b = gained_outputs(w_q, b_q, np.ones(6), centred=False)
    np.testing.assert_array_equal(w, w_q)
    np.testing.assert_array_equal(b, b_q)


def test_folded_form_scores_normalised_tokens_by_brute_force() -> None:
    w_q, w_k, b_q, b_k = factors()
    gain, shift = RNG.normal(size=9), RNG.normal(size=9)
    x_hat = RNG.normal(size=(5, 9))
    x = x_hat * gain + shift
    q = np.einsum("id,hdk->hik", x, w_q) + b_q[:, None]
    k = np.einsum("id,hdk->hik", x, w_k) + b_k[:, None]
    true = np.einsum("hik,hjk->hij", q, np.repeat(k, 2, 0))
    sides = [gained_inputs(w, b, gain, shift) for w, b in ((w_q, b_q), (w_k, b_k))]
    form = extended(BilinearForm(sides[0][0], sides[1][0], b_q=sides[0][1], b_k=sides[1][1]))
    one = np.hstack([x_hat, np.ones((5, 1))])
    np.testing.assert_allclose(np.einsum("ia,hab,jb->hij", one, form.matrix(), one), true, rtol=1e-10)


@pytest.mark.parametrize("centred", [False, True])
@pytest.mark.parametrize("shape", [(6,), (4, 6), (24,)])
def test_gains_behind_a_projection_by_brute_force(shape: tuple[int, ...], centred: bool) -> None:
    w, _, b, _ = factors()
    gain, x = RNG.normal(size=shape), RNG.normal(size=9)
    q = np.einsum("d,hdk->hk", x, w) + b
    axes = None if shape == (24,) else 1
    q = q - q.mean(axis=axes, keepdims=True) if centred else q
    true = q * (gain.reshape(4, 6) if shape == (24,) else gain)
    new_w, new_b = gained_outputs(w, b, gain, centred=centred)
    np.testing.assert_allclose(np.einsum("d,hdk->hk", x, new_w) + new_b, true, rtol=1e-10)


def test_scores_of_the_extended_form_are_those_of_the_full_matrix() -> None:
    w_q, w_k, b_q, b_k = factors(kv=4)
    form = extended(BilinearForm(w_q, w_k, b_q=b_q, b_k=b_k))
    assert form.d_model == 10
    for h in range(4):
        w = np.vstack([w_q[h], b_q[h]]) @ np.vstack([w_k[h], b_k[h]]).T
        for score in ("symmetry", "symmetry_z", "directionality", "norm", "effective_rank"):
            np.testing.assert_allclose(getattr(form, score)()[h], getattr(reference, score)(w), rtol=1e-9)
    whole = sum(np.asarray(m) for m in form.matrix())
    np.testing.assert_allclose(form.total().symmetry()[0], reference.symmetry(whole), rtol=1e-9)


def test_smooth_frequencies_meet_their_ends() -> None:
    f = plain(10_000.0, 64)
    assert llama3(f, 8.0, 1.0, 4.0, 8192.0)[0] == f[0]
    assert llama3(f, 8.0, 1.0, 4.0, 8192.0)[-1] == f[-1] / 8.0
    bent = yarn(f, 10_000.0, 4.0, 4096.0)
    assert bent[0] == f[0]
    assert bent[-1] == f[-1] / 4.0
    assert all(a >= b for a, b in pairwise(bent))


# ---- scans -------------------------------------------------------------------------------------------------


def llama_folder(folder: Path, **config: Any) -> Path:
    rng = np.random.default_rng(8)
    tensors = {}
    for i in range(2):
        path = f"model.layers.{i}"
        tensors[f"{path}.self_attn.q_proj.weight"] = rng.normal(size=(24, 18)).astype(np.float32)
        tensors[f"{path}.self_attn.k_proj.weight"] = rng.normal(size=(12, 18)).astype(np.float32)
        tensors[f"{path}.self_attn.q_proj.bias"] = rng.normal(size=24).astype(np.float32)
        tensors[f"{path}.input_layernorm.weight"] = rng.normal(size=18).astype(np.float32)
    save_file(tensors, folder / "model.safetensors")
    base = {
        "model_type": "llama",
        "hidden_size": 18,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 6,
        "num_hidden_layers": 2,
    }
    (folder / "config.json").write_text(json.dumps(base | config))
    return folder


def test_several_distances_are_read_once_and_each_is_that_of_a_scan_of_its_own(tmp_path: Path) -> None:
    folder = llama_folder(tmp_path)
    table = qk.scan(folder, offset=(0, 3, -3))
    assert [m.offset for m in table.models] == [0, 3, -3]
    for model in table.models:
        (alone,) = qk.scan(folder, offset=model.offset).models
        assert alone.rows == model.rows
        assert model.bytes_read == (alone.bytes_read if model is table.models[0] else 0)
        assert f"R({model.offset})" in model.conventions["rotary"]
    raw = qk.scan(folder).models[0]
    assert raw.offset is None
    drop = {"flags"}
    for a, b in zip(raw.rows, table.models[0].rows, strict=True):
        for name in a.keys() - drop:
            assert (
                a[name] == pytest.approx(b[name], rel=1e-6)
                if isinstance(a[name], float)
                else a[name] == b[name]
            )
    assert raw.rows[0]["symmetry"] != table.models[1].rows[0]["symmetry"]
    saved = qk.ScoreTable.load(table.save(tmp_path / "table.json"))
    assert [m.offset for m in saved.models] == [0, 3, -3]


def test_rows_of_a_biased_scan_are_of_the_extended_form(tmp_path: Path) -> None:
    folder = llama_folder(tmp_path)
    (biased,) = qk.scan(folder, bias=True, fold_norm=True).models
    (folded,) = qk.scan(folder, fold_norm=True).models
    layers = list(qk.layers(folder))
    for layer, row, same in zip(layers, biased.layers, folded.layers, strict=True):
        form = layer.form_with(bias=True, fold_norm=True)
        assert row["d_model"] == 19
        whole = sum(np.asarray(m, dtype=np.float64) for m in form.matrix())
        assert row["symmetry"] == pytest.approx(reference.symmetry(whole), abs=1e-6)
        assert row["bias_share"] == pytest.approx(same["bias_share"], rel=1e-6)
        assert row["bias_share"] > 0
        assert row["norm"] ** 2 * (1 - row["bias_share"]) == pytest.approx(same["norm"] ** 2, rel=1e-5)
    for row, same in zip(biased.heads, folded.heads, strict=True):
        assert row["bias_share"] == pytest.approx(same["bias_share"], rel=1e-6)
    assert "x_hat" in biased.conventions["form"]
    assert "one more row" in biased.conventions["biases"]
    assert "rows of W_Q and W_K times the gain" in biased.conventions["norm_gains"]


def test_what_is_read_is_what_is_announced(tmp_path: Path) -> None:
    from qkform.layouts.transform import Changes, changed, extra_needs

    folder = llama_folder(tmp_path)
    for layer in qk.layers(folder):
        got: list[str] = []

        def reading(
            name: str, rows: int | None = None, read: Any = layer.read, got: list[str] = got
        ) -> Array:
            got.append(name)
            return read(name, rows)

        changes = Changes(fold_norm=True, bias=True, offset=2)
        changed(replace(layer, read=reading), changes)
        announced = [name for name, _ in (*layer.needs(), *extra_needs(layer, changes))]
        assert sorted(got) == sorted(announced)


def test_cross_attention_folds_the_query_side_alone(tmp_path: Path) -> None:
    chosen = case("t5")
    truth.save(chosen, truth.build(chosen), tmp_path)
    crossed = [a for a in qk.layers(tmp_path) if a.attention == "cross"]
    assert crossed
    for layer in crossed:
        gain = load_file(tmp_path / "model.safetensors")[f"{layer.norm}.weight"]
        form = layer.form_with(fold_norm=True)
        np.testing.assert_allclose(form.w_q, layer.form.w_q * gain[:, None], rtol=1e-12)
        np.testing.assert_array_equal(form.w_k, layer.form.w_k)
    (model,) = qk.scan(tmp_path, fold_norm=True, signature="none").models
    flagged = {row["attention"]: row["flags"] for row in model.layers}
    assert "norm_on_queries_only" in flagged["cross"]
    assert "norm_on_queries_only" not in flagged["self"]


@pytest.mark.parametrize(
    ("name", "option", "message"),
    [
        ("bert", "fold_norm", r"encoder.layer.0.attention.self: its input is also the residual.*post-norm"),
        ("olmo2", "fold_norm", r"layers.0.self_attn: .*post-norm"),
        ("gpt2", "qk_norm", "no norm on queries and keys"),
        (
            "phi, query and key norms",
            "qk_norm",
            r"adds 'layers.0.self_attn.q_layernorm.bias' behind the division",
        ),
        ("bert", "offset", "no layer of this model is rotary: learned or fixed positions"),
        ("t5", "offset", "a learned bias for each distance"),
        ("gguf:bert", "offset", "learned or fixed positions"),
    ],
)
def test_option_that_a_model_does_not_admit_is_refused(
    name: str, option: str, message: str, tmp_path: Path
) -> None:
    chosen = case(name)
    truth.save(chosen, truth.build(chosen), tmp_path)
    asked: dict[str, Any] = {option: 2 if option == "offset" else True}
    with pytest.raises(LayoutError, match=message):
        qk.scan(tmp_path, **asked)


def test_layers_that_an_option_leaves_alone_are_flagged(tmp_path: Path) -> None:
    chosen = case("smollm3", num_hidden_layers=5)
    truth.save(chosen, truth.build(chosen), tmp_path)
    (model,) = qk.scan(tmp_path, offset=2, signature="none").models
    assert [("no_rope" in row["flags"]) for row in model.layers] == [False, False, False, True, False]


def test_first_layer_without_a_norm_is_flagged(tmp_path: Path) -> None:
    chosen = case("modernbert")
    truth.save(chosen, truth.build(chosen), tmp_path)
    (model,) = qk.scan(tmp_path, fold_norm=True, signature="none").models
    assert [("no_norm" in row["flags"]) for row in model.layers] == [True, False, False, False]


def test_towers_without_rotation_stand_beside_a_rotary_text_model(tmp_path: Path) -> None:
    chosen = case("gemma3")
    truth.save(chosen, truth.build(chosen), tmp_path)
    (model,) = qk.scan(tmp_path, offset=2, signature="none").models
    flagged = {("vision" in row["module"]): ("no_rope" in row["flags"]) for row in model.layers}
    assert flagged == {True: True, False: False}


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"rope_theta": "many"}, "rope_theta is 'many'; expected a number"),
        ({"rope_theta": 0}, "rope_theta is 0; expected a number from 1"),
        ({"rope_theta": 1e400}, "rope_theta is inf"),
        ({"rope_theta": math.nan}, "rope_theta is nan"),
        ({"rope_theta": True}, "rope_theta is True"),
        ({"rope_parameters": [1]}, r"rope_parameters is \[1\]; expected an object"),
        (
            {"rope_scaling": {"type": "proportional", "factor": 2}},
            "rope_type 'proportional' is not read; known:",
        ),
        ({"rope_scaling": {"type": "linear"}}, "factor is None"),
        ({"rope_scaling": {"type": ["linear"]}}, "is not read"),
        ({"rope_scaling": {"type": "linear", "factor": 0}}, "factor is 0"),
        (
            {"rope_scaling": {"type": "dynamic", "factor": 2}, "max_position_embeddings": 2},
            "length of the sequence",
        ),
        (
            {"rope_scaling": {"type": "llama3", "factor": 2, "low_freq_factor": 4, "high_freq_factor": 1}},
            "smaller",
        ),
        (
            {"rope_scaling": {"type": "yarn", "factor": 2}, "rope_theta": 1, "max_position_embeddings": 99},
            "above 1",
        ),
        (
            {"rope_scaling": {"type": "longrope", "short_factor": [1]}, "max_position_embeddings": 99},
            "3 pairs",
        ),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5, and 'llama' turns whole heads"),
        (
            {"rope_parameters": {"full_attention": {}}, "layer_types": ["x", "y"]},
            "says nothing about 'x' layers",
        ),
        (
            {"rope_parameters": {"full_attention": {}}, "layer_types": [[], "y"]},
            r"says nothing about \[\] layers",
        ),
        (
            {"rope_parameters": {"a": {}}, "layer_types": []},
            "layer_types has 0 entries and there is a layer 0",
        ),
        ({"model_type": "nobody-knows"}, "how 'nobody-knows' knows positions is not described"),
    ],
)
def test_config_that_makes_no_sense_is_one_clear_error(
    config: dict[str, Any], message: str, tmp_path: Path
) -> None:
    folder = llama_folder(tmp_path, **config)
    assert qk.scan(folder, signature="none").rows  # where nobody asks, the form is read as it is stored
    with pytest.raises((ConfigError, LayoutError), match=message) as caught:
        qk.scan(folder, offset=3)
    assert len(str(caught.value)) < 1500


@pytest.mark.parametrize("offset", [1.5, True, 2**40, (1, 1), "3"])
def test_distance_that_is_none_is_refused(offset: Any, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="offset"):
        qk.scan(llama_folder(tmp_path), offset=offset)


def test_norm_of_another_width_is_refused(tmp_path: Path) -> None:
    folder = llama_folder(tmp_path)
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.1.input_layernorm.weight"] = np.ones(7, dtype=np.float32)
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(LayoutError, match=r"input_layernorm.weight' has shape \(7,\); expected the 18"):
        qk.scan(folder, fold_norm=True)


def test_gguf_divisors_of_frequencies_are_read(tmp_path: Path) -> None:
    """rope_freqs.weight of a Llama 3.1 file: what the converter makes of the llama3 scaling."""
    import gguf

    divisors = np.array([1.0, 2.0, 8.0], dtype=np.float32)
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    writer.add_block_count(1)
    writer.add_embedding_length(18)
    writer.add_head_count(3)
    writer.add_head_count_kv(3)
    writer.add_rope_freq_base(123.0)
    w = {side: RNG.normal(size=(18, 18)).astype(np.float32) for side in "qk"}
    for side, tensor in w.items():
        writer.add_tensor(f"blk.0.attn_{side}.weight", tensor)
    writer.add_tensor("blk.0.attn_norm.weight", np.ones(18, dtype=np.float32))
    writer.add_tensor("rope_freqs.weight", divisors)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    (layer,) = qk.layers(tmp_path / "m.gguf")
    turns = Rotary(
        "interleaved", tuple(f / d for f, d in zip(plain(123.0, 6), divisors.tolist(), strict=True))
    )
    expected = turns.turned(layer.form.w_q, 4)
    np.testing.assert_allclose(layer.form_with(offset=4).w_q, expected, rtol=1e-6)


@pytest.mark.parametrize("arguments", [["--offset", "0,2"], ["--offset=-2"], ["--fold-norm", "--bias"]])
def test_command_line_records_what_was_asked(arguments: list[str], tmp_path: Path, capsys: Any) -> None:
    from qkform.cli import main

    folder = llama_folder(tmp_path)
    assert main(["scan", str(folder), *arguments, "--format", "json", "--quiet"]) == 0
    models = json.loads(capsys.readouterr().out)["models"]
    if arguments == ["--offset", "0,2"]:
        assert [m["offset"] for m in models] == [0, 2]
    elif arguments == ["--offset=-2"]:
        assert [m["offset"] for m in models] == [-2]
        assert "2 positions before its key" in models[0]["conventions"]["rotary"]
    else:
        assert models[0]["rows"][0]["d_model"] == 19


@pytest.mark.parametrize("text", ["1,x", "", "1,,2", "0x3", "1.5", "9" * 40])
def test_command_line_refuses_distances_that_are_none(text: str, tmp_path: Path, capsys: Any) -> None:
    from qkform.cli import main

    assert main(["scan", str(llama_folder(tmp_path)), f"--offset={text}"]) == 2
    assert "--offset" in capsys.readouterr().err


def test_type_of_a_sub_config_decides_where_a_path_points_to_it(tmp_path: Path) -> None:
    """A text model inside a model type that nobody has listed: found by its names, rotary by its own type."""
    folder = llama_folder(tmp_path)
    tensors = load_file(folder / "model.safetensors")
    save_file(
        {name.replace("model.", "language_model.", 1): t for name, t in tensors.items()},
        folder / "model.safetensors",
    )
    text = json.loads((folder / "config.json").read_text()) | {"rope_theta": 33.0}
    (folder / "config.json").write_text(json.dumps({"model_type": "nobody-knows", "text_config": text}))
    for layer in qk.layers(folder):
        assert layer.positions is not None
        turns = layer.positions.rotary(6, 1)
        assert turns is not None
        assert turns.frequencies == pytest.approx(plain(33.0, 6))


_VALUES = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(-3, 40),
        st.sampled_from([10**400, -(10**20), 64, 4096]),
        st.floats(),
        st.sampled_from(
            ["default", "linear", "llama3", "yarn", "longrope", "dynamic", "sliding_attention", "x"]
        ),
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.dictionaries(
            st.sampled_from(["full_attention", "sliding_attention", "rope_type", "factor"]), inner
        ),
    ),
)
_KEYS = [
    "rope_theta",
    "rope_parameters",
    "rope_scaling",
    "layer_types",
    "no_rope_layers",
    "no_rope_layer_interval",
    "rotary_dim",
    "alibi",
    "qk_rope_head_dim",
    "partial_rotary_factor",
    "rotary_pct",
    "max_position_embeddings",
    "original_max_position_embeddings",
    "sliding_window_pattern",
    "global_attn_every_n_layers",
    "rope_interleave",
    "local_rope_theta",
]
_PARAMETERS = [
    "rope_type",
    "type",
    "rope_theta",
    "factor",
    "attention_factor",
    "mscale",
    "mscale_all_dim",
    "beta_fast",
    "beta_slow",
    "truncate",
    "low_freq_factor",
    "high_freq_factor",
    "short_factor",
    "long_factor",
    "original_max_position_embeddings",
    "partial_rotary_factor",
]


@settings(max_examples=300)
@given(
    kind=st.sampled_from([k for s in ("half", "interleaved") for k in _data()[s]]),
    config=st.dictionaries(st.sampled_from(_KEYS), _VALUES, max_size=5),
    parameters=st.none() | st.dictionaries(st.sampled_from(_PARAMETERS), _VALUES, max_size=6),
    gguf=st.dictionaries(
        st.sampled_from(
            [f"rope.{k}" for k in ("dimension_count", "freq_base", "scaling.type", "scaling.factor")]
        ),
        _VALUES,
    ),
    distance=st.integers(-(2**31), 2**31),
)
def test_no_config_crashes_the_rotation(
    kind: str, config: dict[str, Any], parameters: dict[str, Any] | None, gguf: dict[str, Any], distance: int
) -> None:
    config |= {f"{kind.removeprefix('gguf:')}.{key}": value for key, value in gguf.items()}
    config |= {} if parameters is None else {"rope_parameters": parameters}
    try:
        turns = Positions((kind,), config, "config.json", 1).rotary(8, distance)
    except (ConfigError, LayoutError):
        return
    if turns is not None:
        assert turns.dims >= 2
        assert turns.start + turns.dims <= 8
        assert np.all(np.isfinite(turns.turned(np.ones((1, 2, 8)), distance)))
