"""A small config of every model type: the default, with every size replaced, sub-configs too."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

VOCABULARY = 99
FIRST_WORD = 50  # ordinary tokens are FIRST_WORD..VOCABULARY - 1; special ones lie below
WIDTH, HEADS, KV_HEADS, HEAD_DIM, ROPE_DIM, LAYERS = 32, 4, 2, 16, 8, 3

# The first pattern that fits the whole key decides. A callable gets the old value.
RULES: tuple[tuple[str, Any], ...] = (
    (
        r"(num_hidden_layers|n_layers?|num_layers|encoder_layers|decoder_layers|num_(en|de)coder_layers|depth)",
        LAYERS,
    ),
    (r"(num_hidden_blocks|num_blocks|layers|resampler_depth|n_blocks|decoder_num_hidden_layers)", 2),
    (r"type_vocab_size", lambda v: v),
    (r"(vocab_size|.*_vocab_size(_base)?|n_vocab|vocabulary_size|vocab_size_per_layer_input)", VOCABULARY),
    (r"hidden_size_per_layer_input", 6),
    (r".*(key_value_heads|n_head_kv|kv_heads|multi_query_group_num|kv_n_heads)", KV_HEADS),
    (r"(num_attention_heads|n_heads?|num_heads|.*attention_heads|.*_num_heads|.*_n_heads|nhead)", HEADS),
    (r"(qk_nope_head_dim)", 10),
    (r"(qk_rope_head_dim)", ROPE_DIM),
    (r"(rotary_dim)", 4),
    (
        r"(head_dim|.*_head_dim|attention_head_dim|d_kv|kv_channels|head_size)",
        lambda v: 0 if v == 0 else HEAD_DIM,
    ),
    (r"(kv_lora_rank|q_lora_rank|.*lora_rank)", 12),
    (
        r"(hidden_size|d_model|n_embd|dim|hidden_dim|embed_dim|.*_hidden_size|.*_embed_dim|.*embedding_size)",
        WIDTH,
    ),
    (
        r"(intermediate_size|.*intermediate_size|.*ffn_dim|d_ff|n_inner|.*mlp_dim|ffn_hidden_size|.*feedforward.*)",
        40,
    ),
    (r"(num_experts_per_tok|moe_topk|num_experts_per_token|moe_k|top_k_experts)", 2),
    (r"(num_experts|n_routed_experts|num_local_experts|moe_num_experts|n_experts|.*num_experts)", 4),
    (r"(n_group|topk_group)", 1),
    (r"(first_k_dense_replace|moe_layer_start_index)", 1),
    (r"image_size", 64),
    (r"patch_size", lambda v: min(v, 16) if v != 14 else 16),
    (
        r"(num_channels|in_channels|in_chans|audio_channels|spatial_merge_size|temporal_patch_size)",
        lambda v: v,
    ),
    (
        r"(max_position_embeddings|n_positions|max_2d_position_embeddings|n_ctx|max_seq_len|max_seq_length)",
        128,
    ),
    (r"max_(source|target)_positions", 128),
    (r"num_kv_shared_layers", 0),
    (r"window_size", lambda v: min(v, 4)),
    (r"depths", lambda v: [2] * len(v)),
    (r".*(codebook_size|num_embeddings)", 16),
    (
        r"(projection_dim|.*_dim|.*width|.*hidden_dim|.*channels|.*features_?size)",
        lambda v: WIDTH if v >= 64 else v,
    ),
    (
        r".*(size)",
        lambda v: WIDTH if v in (256, 512, 640, 768, 1024, 1152, 1280, 1408, 1536, 2048, 3584, 4096) else v,
    ),
)
# what shrinks where the widths of a model hang together in ways of their own
NARROW = tuple(rule for rule in RULES if rule[1] in (LAYERS, 2, VOCABULARY) or rule[0] == "image_size")
KEPT = {"transformers_version", "id2label", "label2id", "torch_dtype", "dtype", "architectures"}

SERIES = {"prediction_length": 4, "context_length": 12, "lags_sequence": [1, 2], "num_time_features": 1}
ROTARY = {"rope_type": "default", "rope_theta": 10000.0}

# What the rules get wrong, by model type (also of a sub-config). A value of ... drops the key.
SETTINGS: Mapping[str, Mapping[str, Any]] = {
    "esm": {
        "vocab_size": VOCABULARY,
        "pad_token_id": 1,
        "mask_token_id": 2,
        "position_embedding_type": "rotary",
    },
    "xlnet": {"d_head": 8},
    "zaya": {"num_experts_per_tok": 1},
    "autoformer": SERIES,
    "informer": SERIES,
    "time_series_transformer": SERIES,
    "bridgetower_vision_model": {"hidden_size": 64},
    "bit": {"num_groups": 2},
    "clvp_encoder": {"projection_dim": 32},
    "hunyuan_v1_dense": {"head_dim": 8},
    "hunyuan_v1_moe": {"head_dim": 8, "num_experts": 4, "moe_topk": 2},
    "audio-spectrogram-transformer": {"max_length": 64, "num_mel_bins": 32},
    "bamba": {"mamba_n_heads": 4, "mamba_d_head": 16},
    "falcon_h1": {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_ssm": 64},
    "granitemoehybrid": {"mamba_n_heads": 4, "mamba_d_head": 16},
    "d_fine": {"decoder_attention_heads": 4, "d_model": 32},
    "deimv2": {"decoder_attention_heads": 4, "d_model": 32},
    "dbrx": {"attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0}},
    "clap_audio_model": {"num_mel_bins": 64, "spec_size": 64, "window_size": 2},
    "swin": {"window_size": 2},
    "swinv2": {"window_size": 2},
    "donut-swin": {"window_size": 2},
    "maskformer-swin": {"window_size": 2},
    "mamba2": {"num_heads": 4, "head_dim": 16, "n_groups": 2},
    "nemotron_h": {"mamba_num_heads": 4, "mamba_head_dim": 16, "n_groups": 2},
    "nemotron": {"num_key_value_heads": 2, "head_dim": 8},
    "molmo2_adapter": {"vision_feature_layer": [-1, -2]},
    "fun_asr_nano": {"adaptor_config": {"intermediate_size": 8}},
    "chameleon": {"vocabulary_map": {"<image>": 8, "IMGIMGAZ": 9}},
    "emu3": {"vocabulary_map": {"<image>": 8, "<|visual token 000001|>": 9, "<|extra_200|>": 10}},
    "dory": {"n_input_layers": 1, "n_recurrent_layers": 1, "n_output_layers": 1, "num_hidden_layers": 3},
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2},
    "cohere_compass_text": {"rope_parameters": {"full_attention": ROTARY, "sliding_attention": ROTARY}},
    "diffusion_gemma_text": {"num_global_key_value_heads": 2, "global_head_dim": 16},
    "deepseek_ocr2_text": {"mlp_layer_types": ["dense", "sparse", "sparse"]},
}


@dataclass(frozen=True)
class Variant:
    """What a config may demand of its sizes; the first variant that runs is taken."""

    name: str
    even_heads: bool = False  # d_head = d_model / n_heads
    grouped: bool = True  # fewer key heads than query heads
    widths: bool = True  # shrink widths too
    sections: bool = False  # rotary angles for time, height and width, which a default config leaves out


VARIANTS = (
    Variant("free"),
    Variant("d_head = d_model / n_heads", even_heads=True),
    Variant("one key head per query head", grouped=False),
    Variant("both", even_heads=True, grouped=False),
    Variant("sections", sections=True),
    Variant("sections, d_head = d_model / n_heads", sections=True, even_heads=True),
    Variant("default widths", widths=False),
)


def small(model_type: str, variant: Variant = VARIANTS[0]) -> Any:
    """The config object of a model type, small."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    cls = CONFIG_MAPPING[model_type]
    values = cls().to_dict()
    return cls(**shrunk(values, model_type, _Specials(variant)))


class _Specials:
    """Small distinct numbers for special tokens, the same for the same token."""

    def __init__(self, variant: Variant) -> None:
        self.given: dict[int, int] = {}
        self.variant = variant

    def __call__(self, value: int) -> int:
        if value < 5:
            return value
        return self.given.setdefault(value, 5 + len(self.given) % (FIRST_WORD - 6))


def shrunk(values: Mapping[str, Any], model_type: str, specials: _Specials) -> dict[str, Any]:
    """The values of one config, small; sub-configs likewise."""
    out: dict[str, Any] = {}
    settings = SETTINGS.get(model_type, {})
    layers = next((values[k] for k in LAYER_KEYS if isinstance(values.get(k), int)), None)
    chosen = _chosen_layers(values, layers)
    for key, value in values.items():
        if key in KEPT or key == "model_type" or settings.get(key, 0) is ...:
            continue
        if key in ("stage_names", "out_features", "out_indices"):
            out.update(_stages(key, value, values, len(chosen), layers))
            continue
        if key == "per_layer_config" and isinstance(value, dict):
            places = {old: new for new, old in enumerate(chosen)}
            out[key] = {places[int(i)]: shrunk(v, "", specials) for i, v in value.items() if int(i) in places}
            continue
        out[key] = _small(key, value, layers, chosen, specials)
    for key in LAYER_KEYS:
        if isinstance(out.get(key), int) and out[key] == LAYERS:
            out[key] = len(chosen)
    for key, value in settings.items():
        if isinstance(value, dict) and isinstance(out.get(key), dict):
            out[key] = {**out[key], **value}
        elif value is not ...:
            out[key] = value
    _fitted(out, specials.variant)
    nested = {k for k, v in values.items() if isinstance(v, dict) and "model_type" in v}
    for key in nested:
        if out.get(key) is not None and "model_type" not in out[key]:
            out[key]["model_type"] = values[key]["model_type"]
    return out


def _stages(key: str, value: Any, values: Mapping[str, Any], n: int, layers: int | None) -> dict[str, Any]:
    """Names and numbers of stages: `stage12` of twelve layers is the last of the few that stay."""
    names = values.get("stage_names")
    if not isinstance(names, list) or layers is None or len(names) != layers + 1:
        return {} if key == "stage_names" else {key: value}
    if key != "out_features" or not isinstance(value, list):
        return {}
    return {key: [f"stage{max(1, n - len(value) + 1 + i)}" for i in range(len(value))]}


def _fitted(out: dict[str, Any], variant: Variant) -> None:
    """Sizes that depend on each other."""
    if not variant.widths:
        return
    heads = next(
        (
            out[k]
            for k in ("num_attention_heads", "num_heads", "n_head", "decoder_attention_heads")
            if isinstance(out.get(k), int)
        ),
        0,
    )
    width = next((out[k] for k in ("hidden_size", "d_model", "n_embd") if isinstance(out.get(k), int)), 0)
    if isinstance(out.get("head_dim"), int) and out["head_dim"]:
        if isinstance(out.get("qk_rope_head_dim"), int):
            out["head_dim"] = out["qk_rope_head_dim"] or out["head_dim"]
        elif variant.even_heads and heads and width:
            out["head_dim"] = width // heads
    if isinstance(out.get("qk_head_dim"), int) and isinstance(out.get("qk_nope_head_dim"), int):
        out["qk_head_dim"] = out["qk_nope_head_dim"] + out["qk_rope_head_dim"]
    if not variant.grouped:
        for key in out:
            if re.fullmatch(KV_KEYS, key) and isinstance(out[key], int):
                out[key] = HEADS
    rotated = out.get("qk_rope_head_dim") or out.get("head_dim") or (width // heads if heads else HEAD_DIM)
    for key in ("rope_parameters", "rope_scaling"):
        if isinstance(out.get(key), dict):
            if variant.sections and "mrope_section" not in out[key]:
                out[key] = {**out[key], "mrope_section": [1, 1, 2]}
            out[key] = _small_rotary(out[key], rotated)
    if isinstance(out.get("mrope_section"), (list, tuple)):
        out["mrope_section"] = _sections(out["mrope_section"], rotated)


KV_KEYS = r".*(key_value_heads|n_head_kv|kv_heads|multi_query_group_num|kv_n_heads)"
# stands in for convolutional backbones of a library that is not there; it has no attention, nor have they
RESNET = {
    "model_type": "resnet",
    "embedding_size": 16,
    "hidden_sizes": [16, 16, 32, 32],
    "depths": [1, 1, 1, 1],
    "layer_type": "basic",
}
LAYER_KEYS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "depth")


def _chosen_layers(values: Mapping[str, Any], layers: int | None) -> list[int]:
    """Which layers stay: every kind of layer at least once, in their order."""
    if layers is None:
        return list(range(LAYERS))
    stages = values.get("out_features")
    if isinstance(stages, list) and len(stages) > LAYERS:
        return list(range(len(stages)))
    kinds = values.get("layer_types") or values.get("layers_block_type") or values.get("block_types")
    if not isinstance(kinds, (list, tuple)) or len(kinds) != layers:
        return list(range(min(LAYERS, layers))) if layers else list(range(LAYERS))
    first = [kinds.index(kind) for kind in dict.fromkeys(kinds)]
    rest = [i for i in range(layers) if i not in first]
    return sorted(first + rest[: max(0, LAYERS - len(first))])


def _small(key: str, value: Any, layers: int | None, chosen: list[int], specials: _Specials) -> Any:
    if isinstance(value, dict):
        if value.get("model_type") == "timm_backbone":
            return RESNET | {
                "out_features": [f"stage{i}" for i in range(1, 5)][-len(value.get("out_indices") or [4]) :]
            }
        if "model_type" in value:
            return shrunk(value, value["model_type"], specials)
        return value
    if isinstance(value, (list, tuple)):
        if layers and len(value) == layers and len(value) > 4:
            return [value[i] for i in chosen]
        if value and all(isinstance(v, int) and not isinstance(v, bool) for v in value):
            if key.endswith(("token_id", "token_ids")):
                return [specials(v) for v in value]
            return _small_list(key, list(value))
        return value
    if isinstance(value, bool) or not isinstance(value, int):
        return value
    if re.search(r"(token_id|token_index|token_idx)$", key):
        return specials(value)
    for pattern, new in RULES if specials.variant.widths else NARROW:
        if re.fullmatch(pattern, key):
            return new(value) if callable(new) else new
    return value


def _small_list(key: str, values: list[int]) -> list[int]:
    if re.fullmatch(r"depths|layers|num_blocks|stage_num_blocks", key):
        return [min(v, 2) for v in values]
    if re.fullmatch(r"num_heads|num_attention_heads|.*_heads", key):
        return [1 << min(i, 2) for i in range(len(values))]
    if re.search(r"hidden_sizes|embed_dims|.*channels.*|.*dims?$|.*sizes$", key) and max(values) >= 64:
        return [16 if v < 128 else 32 for v in values]
    return values


def _small_rotary(value: Mapping[str, Any], rotated: int) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for key, v in value.items():
        if isinstance(v, dict):
            out[key] = _small_rotary(v, rotated)
        elif key == "mrope_section" and isinstance(v, (list, tuple)):
            out[key] = _sections(v, int(rotated * value.get("partial_rotary_factor", 1.0)))
        else:
            out[key] = v
    return out


def _sections(old: Sequence[int], rotated: int) -> list[int]:
    """The same shares of half the rotated size."""
    total, half = sum(old), rotated // 2
    new = [max(1, x * half // total) for x in old]
    new[-1] += half - sum(new)
    return new
