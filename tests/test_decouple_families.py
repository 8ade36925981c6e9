"""Decoupled models of many families: what they compute is what the definition says, whatever their family does."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from qkform import sites
from qkform.surgery import decouple_, recouple_
from tests import truth

transformers = pytest.importorskip("transformers")
truth.quiet()
pytestmark = pytest.mark.filterwarnings("ignore:.*learned bias of position")  # of T5, see test_decouple

ORACLE = "qkform_tests_oracle"
VOCABULARY = 53
TEXT = {
    "vocab_size": VOCABULARY,
    "hidden_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "intermediate_size": 20,
    "max_position_embeddings": 64,
    "attention_dropout": 0.0,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
BERT = {k: v for k, v in TEXT.items() if k != "attention_dropout"} | {
    "attention_probs_dropout_prob": 0.0,
    "hidden_dropout_prob": 0.0,
}
GQA = TEXT | {"num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 6}


@dataclass(frozen=True)
class Family:
    """A tiny model of a family, with what the oracle has to know of it."""

    name: str
    model: str
    config: dict[str, Any]
    kind: str = "encoder"  # "encoder", "decoder", "image", "audio", "pair"
    scale: float | None = None  # of the scores; None: 1 / sqrt(d_head)
    normalised: bool = False
    pads: bool = True  # takes an attention mask

    @property
    def generates(self) -> bool:
        return self.kind in ("decoder", "pair")


FAMILIES = [
    Family("bert", "BertForMaskedLM", BERT),
    Family("roberta", "RobertaForMaskedLM", BERT | {"max_position_embeddings": 66}),
    Family("electra", "ElectraForMaskedLM", BERT | {"embedding_size": 16}),
    Family(
        "modernbert",
        "ModernBertForMaskedLM",
        TEXT | {"local_attention": 8, "num_hidden_layers": 3, "global_attn_every_n_layers": 2},
    ),
    Family(
        "modernbert-decoder",
        "ModernBertDecoderForCausalLM",
        TEXT | {"local_attention": 8, "num_hidden_layers": 3, "global_attn_every_n_layers": 2},
        kind="decoder",
    ),
    Family(
        "vit",
        "ViTForImageClassification",
        {
            "hidden_size": 24,
            "num_hidden_layers": 2,
            "num_attention_heads": 3,
            "intermediate_size": 20,
            "image_size": 12,
            "patch_size": 4,
            "num_labels": 5,
            "attention_probs_dropout_prob": 0.0,
            "hidden_dropout_prob": 0.0,
        },
        kind="image",
        pads=False,
    ),
    Family(
        "gpt2",
        "GPT2LMHeadModel",
        {
            "vocab_size": VOCABULARY,
            "n_embd": 24,
            "n_layer": 2,
            "n_head": 3,
            "n_positions": 64,
            "attn_pdrop": 0.0,
            "resid_pdrop": 0.0,
            "embd_pdrop": 0.0,
            "bos_token_id": 1,
            "eos_token_id": 2,
        },
        kind="decoder",
    ),
    Family("llama", "LlamaForCausalLM", GQA, kind="decoder"),
    Family("mistral", "MistralForCausalLM", GQA | {"sliding_window": 5}, kind="decoder"),
    Family("qwen2", "Qwen2ForCausalLM", GQA, kind="decoder"),
    Family("qwen3", "Qwen3ForCausalLM", GQA, kind="decoder", normalised=True),
    Family("gemma", "GemmaForCausalLM", GQA | {"num_key_value_heads": 1}, kind="decoder"),
    Family("gpt-neox", "GPTNeoXForCausalLM", TEXT | {"rotary_pct": 0.5}, kind="decoder"),
    Family(
        "opt",
        "OPTForCausalLM",
        TEXT | {"ffn_dim": 20, "word_embed_proj_dim": 24, "dropout": 0.0},
        kind="decoder",
    ),
    Family("phi", "PhiForCausalLM", TEXT | {"partial_rotary_factor": 0.5}, kind="decoder"),
    Family(
        "whisper",
        "WhisperForConditionalGeneration",
        {
            "vocab_size": VOCABULARY,
            "d_model": 24,
            "encoder_layers": 2,
            "decoder_layers": 2,
            "encoder_attention_heads": 3,
            "decoder_attention_heads": 3,
            "encoder_ffn_dim": 20,
            "decoder_ffn_dim": 20,
            "num_mel_bins": 5,
            "max_source_positions": 11,
            "max_target_positions": 40,
            "attention_dropout": 0.0,
            "dropout": 0.0,
            "pad_token_id": 0,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "decoder_start_token_id": 1,
        },
        kind="audio",
        pads=False,
    ),
    Family(
        "t5",
        "T5ForConditionalGeneration",
        {
            "vocab_size": VOCABULARY,
            "d_model": 24,
            "d_kv": 6,
            "num_heads": 3,
            "d_ff": 20,
            "num_layers": 2,
            "dropout_rate": 0.0,
            "decoder_start_token_id": 0,
        },
        kind="pair",
        scale=1.0,
    ),
]
BY_NAME = {family.name: family for family in FAMILIES}
every = pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
generating = pytest.mark.parametrize(
    "family", [f for f in FAMILIES if f.generates], ids=lambda family: family.name
)


def built(family: Family, seed: int = 0, **settings: Any) -> Any:
    """The model with weights large enough that attention is far from uniform."""
    torch.manual_seed(seed)
    model_class = getattr(transformers, family.model)
    model = model_class(model_class.config_class(**family.config | settings)).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 2 and "embed" not in name:
                parameter.mul_(8 if parameter.std() < 0.05 else 1)
    return model


def randomised(model: Any, seed: int = 1) -> Any:
    """Another v in every head, of a size that makes self scores matter."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("self_score.v"):
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.7)
    return model


def decoupled(family: Family, **settings: Any) -> Any:
    return randomised(decouple_(built(family, **settings)))


def inputs(family: Family, batch: int = 2, length: int = 9, seed: int = 2) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)

    def tokens() -> Any:
        return torch.randint(3, VOCABULARY, (batch, length), generator=generator)

    if family.kind == "image":
        return {"pixel_values": torch.randn(batch, 3, 12, 12, generator=generator)}
    if family.kind == "audio":
        return {
            "input_features": torch.randn(batch, 5, 22, generator=generator),
            "decoder_input_ids": tokens(),
        }
    if family.kind == "pair":
        return {"input_ids": tokens(), "decoder_input_ids": tokens()}
    return {"input_ids": tokens()}


def logits(model: Any, **given: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(**given).logits


# ---- the oracle: an eager forward of the untouched model, whose scores get another diagonal ----------------


@dataclass
class Oracle:
    """What replaces the diagonal: the v of a decoupled model by path, and the inputs that were seen."""

    family: Family
    v: dict[str, torch.Tensor]
    inputs: dict[int, torch.Tensor] = field(default_factory=dict)
    paths: dict[int, str] = field(default_factory=dict)

    def attention(self, module, query, key, value, attention_mask, scaling=None, **kwargs):
        key, value = (t.repeat_interleave(query.shape[1] // key.shape[1], 1) for t in (key, value))
        d_head, n, m = query.shape[-1], query.shape[-2], key.shape[-2]
        scaling = d_head**-0.5 if scaling is None else scaling
        scores = torch.einsum("bhid,bhjd->bhij", query, key) * scaling
        path = self.paths.get(id(module))
        causal = kwargs.get("is_causal")
        causal = getattr(module, "is_causal", False) if causal is None else causal
        if path in self.v:
            x = self.inputs.pop(id(module))
            if self.family.normalised:
                x = x / x.square().mean(-1, keepdim=True).sqrt()
            own = torch.einsum("hk,bik->bhi", self.v[path], x**2)
            own = own * (d_head**-0.5 if self.family.scale is None else self.family.scale)
            for i in range(n):
                scores[:, :, i, i + m - n] = own[:, :, i]
        if kwargs.get("position_bias") is not None:
            scores = scores + kwargs["position_bias"]
        if attention_mask is not None:
            scores = scores + attention_mask
        elif causal and path in self.v:
            scores = scores + torch.full((n, m), -torch.inf).triu(m - n + 1)
        weights = scores.softmax(-1)
        return (weights @ value).transpose(1, 2), weights


@contextmanager
def oracle_of(family: Family, changed: Any) -> Iterator[Any]:
    """A model without surgery that computes what the definition says, with the v of `changed`."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import eager_mask

    plain = recouple_(copy.deepcopy(changed))
    v = {n.removesuffix(".self_score.v"): p for n, p in changed.named_parameters() if n.endswith("score.v")}
    oracle = Oracle(family, v)
    AttentionInterface.register(ORACLE, oracle.attention)
    AttentionMaskInterface.register(ORACLE, eager_mask)
    plain.set_attn_implementation(ORACLE)
    for path in v:
        module = plain.get_submodule(path)
        oracle.paths[id(module)] = path

        def see(module, args, kwargs):
            oracle.inputs[id(module)] = args[0] if args else kwargs["hidden_states"]

        module.register_forward_pre_hook(see, with_kwargs=True)
    try:
        yield plain
    finally:
        del AttentionInterface._global_mapping[ORACLE], AttentionMaskInterface._global_mapping[ORACLE]


def assert_close(one: torch.Tensor, other: torch.Tensor, tolerance: float = 1e-5) -> None:
    """To a share of the size of the numbers."""
    one, other = one.detach(), other.detach()
    difference = float((one - other).abs().max() / other.abs().max().clamp(min=1))
    assert difference <= tolerance, f"largest difference {difference:.2e}"


# ---- laws ---------------------------------------------------------------------------------------------------


@every
def test_logits_are_those_of_an_eager_forward_with_the_diagonal_replaced(family: Family) -> None:
    model = decoupled(family)
    given = inputs(family)
    with oracle_of(family, model) as oracle:
        expected = logits(oracle, **given)
    found = logits(model, **given)
    assert_close(found, expected)
    plain = logits(recouple_(copy.deepcopy(model)), **given)
    assert (found - plain).abs().max() > 1e-2 * plain.abs().max()  # v does something


@pytest.mark.parametrize(
    "family",
    [
        f if f.name in ("bert", "gpt2", "opt", "whisper") else pytest.param(f, marks=pytest.mark.slow)
        for f in FAMILIES
    ],
    ids=lambda family: family.name,
)
def test_output_attentions_are_those_of_an_eager_forward_with_the_diagonal_replaced(family: Family) -> None:
    model = decoupled(family)
    given = inputs(family)
    with torch.no_grad():
        found = model(**given, output_attentions=True)
        with oracle_of(family, model) as oracle:
            expected = oracle(**given, output_attentions=True)
    names = [name for name in expected if name.endswith("attentions") and expected[name]]
    assert names
    for name in names:
        assert len(found[name]) == len(expected[name])
        for one, other in zip(found[name], expected[name], strict=True):
            assert_close(one, other)
    unasked = model(**given)
    assert not any(unasked.get(name) for name in names)


@every
def test_self_attention_alone_gets_a_self_score(family: Family) -> None:
    model = decoupled(family)
    paths = {site.path for site in sites.find(model) if site.layer.attention == "self"}
    found = {n for n, _ in model.named_parameters() if "self_score" in n}
    assert found == {f"{path}.self_score.v" for path in paths}
    assert set(model.state_dict()) == set(built(family).state_dict()) | found


@every
def test_recoupling_gives_the_old_model_back_bit_for_bit(family: Family) -> None:
    model = built(family)
    given = inputs(family)
    names, implementation = set(model.state_dict()), model.config._attn_implementation
    before = logits(model, **given)
    assert not torch.equal(logits(randomised(decouple_(model)), **given), before)
    assert recouple_(model) is model
    assert torch.equal(logits(model, **given), before)
    assert set(model.state_dict()) == names
    assert model.config._attn_implementation == implementation
    assert not hasattr(model.config, "qkform")
    for module in model.modules():
        assert not any("qkform" in name for name in vars(module))


@pytest.mark.parametrize(
    "family", [f for f in FAMILIES if f.generates or f.kind == "audio"], ids=lambda f: f.name
)
def test_future_tokens_cannot_change_past_outputs(family: Family) -> None:
    model = decoupled(family)
    given = inputs(family)
    name = "input_ids" if family.kind == "decoder" else "decoder_input_ids"
    for masked in (False, True) if family.pads else (False,):
        if masked:
            mask = torch.ones_like(given[name])
            given["attention_mask" if family.kind == "decoder" else "decoder_attention_mask"] = mask
        before = logits(model, **given)
        changed = given[name].clone()
        changed[:, 6:] = (changed[:, 6:] + 5) % (VOCABULARY - 3) + 3
        after = logits(model, **{**given, name: changed})
        assert_close(after[:, :6], before[:, :6], 1e-6)
        assert (after[:, 6:] - before[:, 6:]).abs().max() > 1e-3


@generating
@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_each_step_with_a_cache_is_the_full_forward(family: Family, cache: str) -> None:
    """Prefill of several tokens, then two at once, then one at a time; longer than the sliding windows."""
    model = decoupled(family)
    given = inputs(family, length=13)
    expected = logits(model, **given)
    name = "decoder_input_ids" if family.kind == "pair" else "input_ids"
    tokens = given.pop(name)
    if family.kind == "pair":
        given = {"encoder_outputs": model.encoder(**given)}
    past = cache_for(model, cache, family)
    done = 0
    for step in (6, 2, *[1] * 5):
        out = model(
            **given,
            **{name: tokens[:, done : done + step], past_name(): past, "use_cache": True},
        ).logits.detach()
        assert_close(out, expected[:, done : done + step])
        done += step


def past_name() -> str:
    import inspect

    forward = inspect.signature(transformers.LlamaModel.forward)
    return "cache" if "cache" in forward.parameters else "past_key_values"


def cache_for(model: Any, kind: str, family: Family) -> Any:
    def one() -> Any:
        if kind == "static":
            return transformers.StaticCache(
                config=model.config.get_text_config(decoder=True), max_cache_len=17
            )
        return transformers.DynamicCache(config=model.config.get_text_config(decoder=True))

    if family.kind != "pair":
        return one()
    return transformers.EncoderDecoderCache(one(), transformers.DynamicCache())


@generating
def test_generation_depends_on_v(family: Family) -> None:
    model = decoupled(family)
    given = inputs(family)
    given.pop("decoder_input_ids", None)
    options = {
        "max_new_tokens": 6,
        "do_sample": False,
        "output_logits": True,
        "return_dict_in_generate": True,
    }
    options |= {"min_new_tokens": 6, "pad_token_id": 0}
    given["attention_mask"] = torch.ones_like(given["input_ids"])
    cached = torch.stack(model.generate(**given, **options).logits)
    whole = torch.stack(model.generate(**given, **options, use_cache=False).logits)
    assert_close(cached, whole)
    other = torch.stack(randomised(model, seed=7).generate(**given, **options).logits)
    assert (other - cached).abs().max() > 1e-3


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("family", [f for f in FAMILIES if f.pads], ids=lambda f: f.name)
def test_padded_and_unpadded_agree(family: Family, side: str) -> None:
    model = decoupled(family)
    given = inputs(family, batch=1, length=7)
    alone = logits(model, **given)
    tokens = given["input_ids"]
    others = inputs(family, batch=1, length=11, seed=3)
    padding = torch.full((1, 4), 0)
    row = torch.cat([padding, tokens] if side == "left" else [tokens, padding], 1)
    real = row != 0
    batch = {**others, "input_ids": torch.cat([others["input_ids"], row])}
    batch["attention_mask"] = torch.cat([torch.ones_like(real), real]).long()
    if family.kind == "decoder" and side == "left":
        batch["position_ids"] = (batch["attention_mask"].cumsum(-1) - 1).clamp(min=0)
    if family.name == "opt":
        batch.pop("position_ids", None)  # it counts them by the mask
    if family.kind == "encoder" and side == "left" and family.name != "roberta":
        batch["position_ids"] = (batch["attention_mask"].cumsum(-1) - 1).clamp(min=0)
    if family.kind == "pair":
        batch["decoder_input_ids"] = given["decoder_input_ids"].repeat(2, 1)
        if side == "left":
            return  # its positions are relative: left and right padding are one case
        assert_close(logits(model, **batch)[1], alone[0])
        return
    assert_close(logits(model, **batch)[1][real[0]], alone[0])
