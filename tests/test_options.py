"""Options that change the form, held against transformers' own forward passes and against laws."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
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


def seen(
    chosen: truth.Case, model: Any, layers: Sequence[AttentionLayer], offset: int | None
) -> list[Seen]:
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
        for name in ("q_norm", "k_norm", "q_layernorm", "k_layernorm"):
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
    "llama, linear": case("llama", rope_parameters={"rope_type": "linear", "factor": 3.0, "rope_theta": 77.0}),
    "llama, llama3": case("llama", rope_parameters=LLAMA3, max_position_embeddings=512),
    "llama, yarn": case("llama", rope_parameters=YARN, max_position_embeddings=256),
    "llama, yarn, mscale": case(
        "llama", rope_parameters={**YARN, "mscale": 1.3, "mscale_all_dim": 0.7, "truncate": False, "beta_fast": 8}
    ),
    "llama, dynamic": case(
        "llama", rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 77.0}
    ),
    "gpt_neox, partial": case("gpt_neox", rope_parameters={"partial_rotary_factor": 0.67, "rope_theta": 90.0}),
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
    "stablelm": case("stablelm", num_attention_heads=3, num_key_value_heads=3),
    "starcoder2": case("starcoder2"),
    "olmo2": case("olmo2"),
    "gguf:llama": case("gguf:llama"),
    "gguf:qwen2": case("gguf:qwen2"),
    "gguf:gemma": case("gguf:gemma"),
    "gguf:phi3": case("gguf:phi3"),
}


@pytest.mark.parametrize("name", ROTARY)
def test_form_at_a_distance_is_what_the_model_scores_and_mistakes_are_noticed(name: str, tmp_path: Path) -> None:
    chosen, n = ROTARY[name], 5
    model = built(chosen, tmp_path, raw_qk=True, biases=False)
    layers = list(qk.layers(tmp_path))
    for layer, what in zip(layers, seen(chosen, model, layers, n), strict=True):
        true = scores(what)
        assert off(layer.form_with(offset=n), what.x, true) < NEAR, layer.module
        turns = layer.positions.rotary(layer.d_head, n)
        if turns is None:
            assert name == "smollm3" and layer.layer == 3
            continue
        for mistake in (
            rotated(layer, turns, -n),  # the wrong sign
            rotated(layer, replace(turns, style="half" if turns.style == "interleaved" else "interleaved"), n),
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
    "gemma3_text": (case("gemma3_text", attention_bias=True, **GEMMA3), ("fold_norm", "bias", "qk_norm", "offset")),
    "gpt_neox": (case("gpt_neox", rope_parameters={"partial_rotary_factor": 0.67}), ("fold_norm", "bias", "offset")),
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
        np.testing.assert_allclose(mine.item(), theirs, rtol=1e-4, atol=2e-4, err_msg=f"{kind} layer {number}")
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

