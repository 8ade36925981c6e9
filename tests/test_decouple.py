"""`decouple_`, `recouple_`, `set_attention_`: what they do to a model, what it starts with, and what they refuse."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys
import threading
import warnings
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo.testing as dynamo_testing
from torch import nn

from qkform import sites
from qkform.errors import SurgeryError
from qkform.surgery import decouple_, record, recouple_, set_attention_, symmetrize_
from qkform.surgery.decouple import restore
from qkform.surgery.huggingface import switched
from qkform.surgery.own_form import own_form
from qkform.surgery.regression import STRENGTHS
from qkform.surgery.self_score import SelfScore
from tests.test_decouple_families import (
    BERT,
    BY_NAME,
    GQA,
    assert_close,
    built,
    cache_for,
    decoupled,
    inputs,
    logits,
    past_name,
    randomised,
)

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore:.*learned bias of position")  # of T5, tested by itself


def bert(**settings: Any) -> Any:
    torch.manual_seed(0)
    return transformers.BertForMaskedLM(transformers.BertConfig(**BERT | settings)).eval()


def llama(**settings: Any) -> Any:
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**GQA | settings)).eval()


def state_of(model: Any) -> dict[str, Any]:
    """What surgery must leave alone where it refuses."""
    return {
        "names": list(model.state_dict()),
        "hooks": [(n, len(m._forward_pre_hooks), len(m._forward_hooks)) for n, m in model.named_modules()],
        "attributes": [(n, sorted(vars(m))) for n, m in model.named_modules()],
        "config": model.config.to_dict(),
        "implementation": model.config._attn_implementation,
    }


# ---- the self score ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("normalise", [False, True])
def test_a_self_score_is_the_weighted_sum_of_squares(normalise: bool) -> None:
    score = SelfScore(3, 7, normalise=normalise, dtype=torch.float64)
    nn.init.normal_(score.v)
    x = torch.randn(2, 5, 7, dtype=torch.float64)
    found = score(x)
    assert found.shape == (2, 3, 5)
    for b, h, i in ((0, 0, 0), (1, 2, 4), (1, 0, 3)):
        token = x[b, i] / (x[b, i].norm() / 7**0.5 if normalise else 1)
        assert torch.isclose(found[b, h, i], sum(score.v[h, k] * token[k] ** 2 for k in range(7)), rtol=1e-12)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64], ids=str)
def test_a_self_score_is_computed_in_float32_at_least(dtype: torch.dtype) -> None:
    score = SelfScore(3, 7).to(dtype)
    nn.init.normal_(score.v)
    x = torch.randn(2, 5, 7).to(dtype)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    with torch.autocast("cpu", torch.bfloat16):
        found = score(x)
    assert found.dtype == wide
    exact = (x.double() ** 2) @ score.v.double().mT
    assert_close(found.detach().double(), exact.mT.detach(), 1e-6)


def test_a_token_of_zeros_scores_zero_and_has_gradients() -> None:
    score = SelfScore(2, 5, normalise=True)
    nn.init.normal_(score.v)
    x = torch.zeros(1, 3, 5, requires_grad=True)
    score(x).sum().backward()
    assert bool(x.grad.isfinite().all())
    assert not score(x).any()


# ---- what the model is afterwards --------------------------------------------------------------------------


def test_v_is_a_parameter_like_others() -> None:
    model = decouple_(llama(num_hidden_layers=1).to(torch.bfloat16))
    (name,) = [n for n, _ in model.named_parameters() if "self_score" in n]
    assert name == "model.layers.0.self_attn.self_score.v"
    v = model.get_parameter(name)
    assert v.shape == (6, 24)
    assert v.dtype == torch.bfloat16
    assert v.requires_grad
    model.to(torch.float64)
    assert model.get_parameter(name).dtype == torch.float64
    assert model.to("meta").get_parameter(name).device.type == "meta"


def test_v_and_everything_else_learn() -> None:
    model = decoupled(BY_NAME["bert"]).train()
    logits = model(**inputs(BY_NAME["bert"])).logits
    logits.square().mean().backward()
    for name, parameter in model.named_parameters():
        if "self_score" in name or ("query" in name and "weight" in name):
            assert parameter.grad is not None
            assert parameter.grad.abs().max() > 0
    before = [p.clone() for p in model.parameters()]
    torch.optim.AdamW(model.parameters(), lr=0.1).step()
    changed = [
        n for (n, p), old in zip(model.named_parameters(), before, strict=True) if not torch.equal(p, old)
    ]
    assert sum("self_score" in name for name in changed) == 2


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("name", ["bert", "llama", "t5"])
def test_checkpointed_gradients_are_the_same(name: str, reentrant: bool) -> None:
    family = BY_NAME[name]
    model = decoupled(family).train()
    model.config.use_cache = False

    def gradients() -> dict[str, torch.Tensor]:
        model.zero_grad()
        model(**inputs(family)).logits.square().mean().backward()
        return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}

    expected = gradients()
    enable = getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)
    enable({"use_reentrant": reentrant})
    if reentrant:
        model.enable_input_require_grads()
    found = gradients()
    assert expected.keys() <= found.keys()
    for parameter, gradient in expected.items():
        assert_close(found[parameter], gradient, 1e-6)
    assert sum("self_score" in n for n in found) == len(sites.find(model)) - (2 if name == "t5" else 0)


@pytest.mark.parametrize("name", ["bert", "gpt2", "mistral"])
def test_a_copy_is_a_model_of_its_own(name: str) -> None:
    family = BY_NAME[name]
    model = decoupled(family)
    given = inputs(family)
    before = logits(model, **given)
    other = copy.deepcopy(model)
    assert torch.equal(logits(other, **given), before)
    randomised(other, seed=9)
    assert torch.equal(logits(model, **given), before)
    assert not torch.equal(logits(other, **given), before)
    recouple_(other)
    assert torch.equal(logits(model, **given), before)
    recouple_(model)
    assert torch.equal(logits(model, **given), logits(other, **given))


def test_pickled_models_compute_the_same_in_a_new_process(tmp_path: Path) -> None:
    family = BY_NAME["bert"]
    given = inputs(family)
    models = [decoupled(family), set_attention_(built(family), "exclusive")]
    for i, model in enumerate(models):
        (tmp_path / f"{i}.pickle").write_bytes(pickle.dumps((model, given, logits(model, **given))))
    code = (
        "import pickle, sys, torch\n"
        "for path in sys.argv[1:]:\n"
        "    model, given, expected = pickle.load(open(path, 'rb'))\n"
        "    torch.testing.assert_close(model(**given).logits, expected)\n"
        "    from transformers import AttentionInterface\n"
        "    del AttentionInterface._global_mapping['qkform']\n"
    )
    files = [str(tmp_path / f"{i}.pickle") for i in range(2)]
    place = {"PYTHONPATH": str(Path(sites.__file__).parents[2])}
    subprocess.run([sys.executable, "-c", code, *files], check=True, env=place)


def test_the_state_dict_loads_and_a_wrong_shape_is_named() -> None:
    family = BY_NAME["llama"]
    model, other = decoupled(family), decouple_(built(family, seed=5))
    other.load_state_dict(model.state_dict())
    assert torch.equal(logits(other, **inputs(family)), logits(model, **inputs(family)))
    state = model.state_dict() | {"model.layers.0.self_attn.self_score.v": torch.zeros(5, 24)}
    with pytest.raises(RuntimeError, match=r"layers\.0\.self_attn\.self_score\.v"):
        other.load_state_dict(state)


def test_nothing_of_a_call_is_kept_even_if_it_raises() -> None:
    family = BY_NAME["bert"]
    model = decoupled(family)
    model(**inputs(family))
    scores = [m for m in model.modules() if isinstance(m, SelfScore)]
    assert all(score.take() is None for score in scores)

    class Broken(nn.Module):
        def forward(self, x: Any) -> Any:
            raise ArithmeticError("broken on purpose")

    model.bert.encoder.layer[1].attention.self.key = Broken()  # after the queries were projected
    with pytest.raises(ArithmeticError, match="on purpose"):
        model(**inputs(family))
    assert all(score.take() is None for score in scores)


def test_a_probe_of_the_query_projection_keeps_nothing() -> None:
    model = decoupled(BY_NAME["bert"])
    attention = model.bert.encoder.layer[0].attention.self
    x = torch.randn(2, 5, 24)
    assert_close(attention.query(input=x), attention.query(x))  # by keyword too
    assert not attention.self_score._held
    expected = logits(model, **inputs(BY_NAME["bert"]))
    attention.query(x)
    assert torch.equal(logits(model, **inputs(BY_NAME["bert"])), expected)


def test_a_self_score_on_another_device_is_an_error() -> None:
    """As in the replicas of nn.DataParallel, whose projections name the self score of the first of them."""
    model = decoupled(BY_NAME["bert"])
    model.bert.encoder.layer[0].attention.self.self_score.to("meta")
    with pytest.raises(SurgeryError, match=r"on cpu and its self score on meta; .*DistributedDataParallel"):
        model(**inputs(BY_NAME["bert"]))


@pytest.mark.parametrize("name", ["bert", "llama"])
def test_threads_that_call_one_model_do_not_mix_their_scores(name: str) -> None:
    """Each call waits inside the attention, after its queries, until the other has come as far."""
    model = decoupled(BY_NAME[name], num_hidden_layers=1)
    given = [inputs(BY_NAME[name], seed=seed) for seed in (1, 2)]
    expected = [logits(model, **each) for each in given]
    barrier = threading.Barrier(2, timeout=30)
    (site,) = sites.find(model)

    def wait(module: Any, args: Any) -> None:
        barrier.wait()

    handle = site.shares["w_k"].at.owner.register_forward_pre_hook(wait)
    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(lambda each: logits(model, **each), given))
    handle.remove()
    for one, other in zip(found, expected, strict=True):
        assert_close(one, other, 1e-6)
    assert not site.module.self_score._held


def test_attentions_are_those_of_the_changed_score() -> None:
    family = BY_NAME["llama"]
    model = built(family)
    model.set_attn_implementation("eager")
    eager = model(**inputs(family), output_attentions=True).attentions
    model.set_attn_implementation("sdpa")
    exclusive = set_attention_(copy.deepcopy(model), "exclusive")
    for found, expected in zip(
        exclusive(**inputs(family), output_attentions=True).attentions, eager[:1], strict=False
    ):
        assert_close(found, expected)
    decouple_(model, init="zero")
    with torch.no_grad():
        for score in (m for m in model.modules() if isinstance(m, SelfScore)):
            score.v.fill_(1e4)  # every token sees itself alone
    for found in model(**inputs(family), output_attentions=True).attentions:
        assert_close(found, torch.eye(9).expand(2, 6, 9, 9))
    with torch.no_grad():
        for score in (m for m in model.modules() if isinstance(m, SelfScore)):
            score.v.fill_(-1e4)  # none sees itself, where it has another
    for found in model(**inputs(family), output_attentions=True).attentions:
        assert not found.diagonal(dim1=-2, dim2=-1)[..., 1:].any()
        assert_close(found.sum(-1), torch.ones(2, 6, 9))


@pytest.mark.parametrize("kind", ["decoupled", "exclusive", "no-diagonal"])
@pytest.mark.parametrize("name", ["bert", "mistral", "t5", "whisper"])
def test_attentions_are_what_the_values_are_weighed_with(name: str, kind: str) -> None:
    """Of every attention of the model, across too, with a cache and where tokens are padded."""
    from transformers import AttentionInterface

    from qkform.surgery import interface

    family = BY_NAME[name]
    model = decoupled(family) if kind == "decoupled" else set_attention_(built(family), kind)
    given = inputs(family)
    if name in ("bert", "mistral"):
        given["attention_mask"] = torch.ones(2, 9, dtype=torch.long)
        given["attention_mask"][1, :3] = 0
    seen = []

    def checked(module: Any, query: Any, key: Any, value: Any, *args: Any, **options: Any) -> Any:
        out, weights = interface.attention(module, query, key, value, *args, **options)
        y = weights @ value.repeat_interleave(query.shape[1] // value.shape[1], 1)
        if kind == "exclusive" and switched(module):
            v = value[:, :, -y.shape[2] :].repeat_interleave(query.shape[1] // value.shape[1], 1)
            y = y - (y * v).sum(-1, keepdim=True) * v / v.square().sum(-1, keepdim=True)
        assert_close(out.transpose(1, 2), y, 1e-5)
        seen.append(weights.shape)
        return out, weights

    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(AttentionInterface._global_mapping, "qkform", checked)
        with torch.no_grad():
            out = model(**given, output_attentions=True)
            if name == "mistral":
                more = torch.cat([given["attention_mask"], torch.ones(2, 4, dtype=torch.long)], 1)
                model(
                    input_ids=given["input_ids"][:, :4],
                    attention_mask=more,
                    output_attentions=True,
                    **{past_name(): out.past_key_values},
                )
    assert len(seen) == {"t5": 6, "whisper": 6, "mistral": 4}.get(name, 2)


def test_cross_attention_is_left_alone_and_keeps_its_weights() -> None:
    family = BY_NAME["whisper"]
    model = built(family)
    paths = {site.path for site in sites.find(model) if site.layer.attention == "cross"}
    assert len(paths) == 2
    decouple_(model)
    for path in paths:
        assert switched(model.get_submodule(path)) is None
        assert not hasattr(model.get_submodule(path), "self_score")
    out = model(**inputs(family), output_attentions=True)
    for weights in out.cross_attentions:
        assert weights.shape == (2, 3, 9, 11)
        assert_close(weights.sum(-1), torch.ones(2, 3, 9))


def test_a_bert_that_attends_across_keeps_doing_so() -> None:
    settings = {"is_decoder": True, "add_cross_attention": True}
    torch.manual_seed(0)
    model = transformers.BertLMHeadModel(transformers.BertConfig(**BERT | settings)).eval()
    seen = torch.randn(2, 5, 24)
    given = {"input_ids": torch.randint(3, 53, (2, 7)), "encoder_hidden_states": seen}
    before = logits(model, **given)
    decouple_(model)
    assert len([n for n, _ in model.named_parameters() if "self_score" in n]) == 2
    after = logits(randomised(model), **given)
    assert (after - before).abs().max() > 1e-3
    assert (logits(model, **{**given, "encoder_hidden_states": seen * 2}) - after).abs().max() > 1e-4
    assert torch.equal(logits(recouple_(model), **given), before)


def clip() -> tuple[Any, dict[str, Any]]:
    text = {k: v for k, v in BERT.items() if "prob" not in k} | {"attention_dropout": 0.0}
    vision = {"hidden_size": 24, "num_hidden_layers": 1, "num_attention_heads": 3, "intermediate_size": 20}
    torch.manual_seed(0)
    config = transformers.CLIPConfig(
        text_config=text, vision_config=vision | {"image_size": 12, "patch_size": 4}, projection_dim=16
    )
    given = {"input_ids": torch.randint(3, 53, (2, 7)), "pixel_values": torch.randn(2, 3, 12, 12)}
    return transformers.CLIPModel(config).eval(), given | {"attention_mask": torch.ones(2, 7).long()}


def test_parts_with_configs_of_their_own_are_all_decoupled() -> None:
    model, given = clip()
    before = model(**given)
    decouple_(model)
    assert [m.config._attn_implementation for m in (model.text_model, model.vision_model)] == ["qkform"] * 2
    randomised(model)
    for name in ("text_embeds", "image_embeds"):
        assert (model(**given)[name] - before[name]).abs().max() > 1e-4
    recouple_(model)
    assert [m.config._attn_implementation for m in (model.text_model, model.vision_model)] == ["sdpa"] * 2
    assert torch.equal(model(**given).logits_per_text, before.logits_per_text)


def test_a_part_of_a_model_can_be_decoupled_alone() -> None:
    model, given = clip()
    before = model(**given)
    decouple_(model.text_model)
    names = [n for n, _ in model.named_parameters() if "self_score" in n]
    assert len(names) == 2
    assert all(name.startswith("text_model.") for name in names)
    after = randomised(model)(**given)
    assert (after.text_embeds - before.text_embeds).abs().max() > 1e-4
    assert torch.equal(after.image_embeds, before.image_embeds)


@pytest.mark.parametrize("inside", ["encoder", "decoder"])
@pytest.mark.parametrize("name", ["t5", "whisper"])
def test_an_encoder_or_a_decoder_is_decoupled_alone_as_in_its_model(name: str, inside: str) -> None:
    family = BY_NAME[name]
    whole, part = decouple_(built(family)), built(family)
    stack = (part if name == "t5" else part.model).get_submodule(inside)
    decouple_(stack)
    v = {n: p for n, p in whole.named_parameters() if "self_score" in n}
    mine = {n: p for n, p in part.named_parameters() if "self_score" in n}
    assert len(mine) == 2
    assert all(torch.equal(p, v[n]) for n, p in mine.items())
    given = inputs(family)
    before = logits(part, **given)
    assert (logits(randomised(part), **given) - before).abs().max() > 1e-3
    recouple_(stack)
    assert torch.equal(logits(part, **given), logits(built(family), **given))


def test_queries_made_outside_of_their_attention_are_refused() -> None:
    from qkform.surgery import huggingface

    first, second = sites.find(bert())
    elsewhere = replace(first, shares=second.shares)
    with pytest.raises(SurgeryError, match="outside of it; give the whole model, not a part of it"):
        huggingface.check(elsewhere)


def test_albert_shares_one_self_score() -> None:
    settings = BERT | {"embedding_size": 16, "num_hidden_layers": 3}
    torch.manual_seed(0)
    model = transformers.AlbertForMaskedLM(transformers.AlbertConfig(**settings)).eval()
    decouple_(model)
    assert sum("self_score" in n for n, _ in model.named_parameters()) == 1
    ids = {"input_ids": torch.randint(3, 53, (2, 7))}
    assert logits(randomised(model), **ids).isfinite().all()


def test_the_record_says_what_was_done() -> None:
    model = decouple_(bert(), init="spread", seed=4)
    change = record.done(model, "decouple")
    assert change == {
        "change": "decouple",
        "of": "BertForMaskedLM",
        "init": "spread",
        "seed": 4,
        "sites": [f"bert.encoder.layer.{i}.attention.self" for i in range(2)],
        "normalised": [False, False],
    }
    assert record.done(decouple_(built(BY_NAME["qwen3"])), "decouple")["normalised"] == [True, True]


def test_a_restored_structure_takes_the_values() -> None:
    model = decoupled(BY_NAME["llama"])
    other = built(BY_NAME["llama"], seed=8)
    restore(other, record.done(model, "decouple"))
    other.load_state_dict(model.state_dict())
    given = inputs(BY_NAME["llama"])
    assert torch.equal(logits(other, **given), logits(model, **given))
    with pytest.raises(SurgeryError, match=r"layers\.7\.self_attn was decoupled"):
        restore(built(BY_NAME["llama"]), {"sites": ["model.layers.7.self_attn"]})


# ---- starts ------------------------------------------------------------------------------------------------


def test_the_diagonal_start_is_that_of_every_heads_form() -> None:
    model = decouple_(llama())
    for site in sites.find(model):
        form = site.form()
        for head in range(6):
            whole = form.w_q[head] @ form.w_k[head // 3].T
            found = site.module.self_score.v[head].detach()
            assert torch.allclose(found, torch.as_tensor(whole).diagonal(), rtol=1e-5, atol=1e-8)


def self_scores(model: Any, given: dict[str, Any]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Per attention of a model without surgery: the inputs, and the self scores q_i . k_i (B, N, H)."""
    seen: list[torch.Tensor] = []
    found = []
    handles = [
        site.module.register_forward_pre_hook(
            lambda m, args, kwargs: seen.append(args[0] if args else kwargs["hidden_states"]),
            with_kwargs=True,
        )
        for site in sites.find(model)
    ]
    with torch.no_grad():
        model(**given)
    for handle in handles:
        handle.remove()
    for x, site in zip(seen, sites.find(model), strict=True):
        attention = site.module
        q = attention.q_proj(x).unflatten(-1, (site.layer.n_heads, -1))
        k = attention.k_proj(x).unflatten(-1, (site.layer.n_kv_heads, -1))
        if hasattr(attention, "q_norm"):
            q, k = attention.q_norm(q), attention.k_norm(k)
        k = k.repeat_interleave(site.layer.n_heads // site.layer.n_kv_heads, 2)
        found.append((x, (q * k).sum(-1).detach()))
    return found


@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_the_spread_start_lets_tokens_differ_as_much_as_before(name: str) -> None:
    family = BY_NAME[name]
    settings = {"hidden_size": 128, "num_attention_heads": 16, "num_key_value_heads": 16, "head_dim": 16}
    torch.manual_seed(0)
    model_class = getattr(transformers, family.model)
    model = model_class(model_class.config_class(**family.config | settings)).eval()
    given = inputs(family, batch=8, length=40)
    old = [y.flatten(0, 1).std(0).mean() for _, y in self_scores(model, given)][:1]
    decouple_(model, init="spread", seed=3)
    x = self_scores(recoupled_copy(model), given)[0][0]
    with torch.no_grad():
        score = sites.find(model)[0].module.self_score(x)
    new = score.transpose(1, 2).flatten(0, 1).std(0).mean()
    assert float(new / old[0]) == pytest.approx(1.0, abs=0.15)


def recoupled_copy(model: Any) -> Any:
    return recouple_(copy.deepcopy(model))


def test_the_spread_start_is_of_the_seed() -> None:
    one, same, other = (decouple_(bert(), init="spread", seed=s) for s in (1, 1, 2))
    v = [next(m for m in model.modules() if isinstance(m, SelfScore)).v for model in (one, same, other)]
    assert torch.equal(v[0], v[1])
    assert not torch.equal(v[0], v[2])


@pytest.mark.parametrize("name", ["llama", "qwen3", "opt"])
def test_the_fitted_start_is_the_regression_of_old_self_scores(name: str) -> None:
    """Of real tokens alone: padding, which would change the answer, does not count. Before the scale, also in OPT."""
    family = BY_NAME[name]
    model = built(family)
    given = inputs(family, batch=12, length=20)
    alone = self_scores(model, given)
    padded = {
        "input_ids": torch.cat([given["input_ids"], torch.zeros(12, 3, dtype=torch.long)], 1),
        "attention_mask": torch.cat([torch.ones(12, 20), torch.zeros(12, 3)], 1).long(),
    }
    decouple_(model, init="fit", batch=padded)
    change = record.done(model, "decouple")
    r2 = change["r2"]
    assert change["tokens"] == [240] * len(r2)
    for (x, y), site, told in zip(alone, sites.find(model), r2, strict=True):
        x, y = x.flatten(0, 1).double(), y.flatten(0, 1).double()
        if family.normalised:
            x = x / x.square().mean(-1, keepdim=True).sqrt()
        z, v = x**2, site.module.self_score.v.detach().double().mT
        whole = (y - y.mean(0)).square().sum(0)
        found = torch.zeros(y.shape[1], dtype=torch.float64)
        for strength in STRENGTHS:
            inverse = torch.linalg.inv(z.mT @ z + strength * torch.diag((z.mT @ z).diagonal()))
            h = ((z @ inverse) * z).sum(1, keepdim=True)
            missed = ((y - z @ inverse @ z.mT @ y) / (1 - h)).square().sum(0)
            found = torch.maximum(found, 1 - missed / whole)
            mine = ((inverse @ z.mT @ y - v).norm(dim=0) / v.norm(dim=0)) < 1e-4
            assert torch.allclose(torch.tensor(told).double()[mine], (1 - missed / whole)[mine], atol=1e-4)
        assert torch.allclose(torch.tensor(told).double().clamp_min(0), found, atol=1e-4)
        assert max(told) > 0.1  # of tokens left out


def test_a_fit_finds_a_self_score_that_is_of_the_form() -> None:
    """W_K = W_Q with rows of one feature each: q . k is a sum of squares, and the model does not change."""
    model = llama(num_attention_heads=4, num_key_value_heads=4, head_dim=6)
    for site in sites.find(model):
        w = torch.zeros(4, 24, 6)
        for head in range(4):
            for row in range(6):
                w[head, (head + 3 * row) % 24, row] = 1.0 + row
        site.write_(w_q=w, w_k=w)
    given = inputs(BY_NAME["llama"], batch=12, length=20)
    before = logits(model, **given)
    decouple_(model, init="fit", batch=given)
    assert all(r2 > 0.999 for layer in record.done(model, "decouple")["r2"] for r2 in layer)
    assert_close(logits(model, **given), before, 1e-3)


def test_a_fit_needs_a_batch_and_leaves_the_model_as_it_was() -> None:
    model = bert().train()
    before = state_of(model)
    with pytest.raises(SurgeryError, match=r"batch=\.\.\."):
        decouple_(model, init="fit")
    assert state_of(model) == before
    with pytest.raises(ValueError, match="input_ids"):
        decouple_(model, init="fit", batch={"attention_mask": torch.ones(1, 2)})
    assert state_of(model) == before
    assert model.training


def test_a_symmetric_start_is_kept() -> None:
    """Symmetrized, then decoupled: with Q = K every head's diagonal is one of squares."""
    model = llama(num_key_value_heads=6)
    symmetrize_(model, arm="matched", seed=0)
    decouple_(model)
    for site in sites.find(model):
        assert bool((site.module.self_score.v >= 0).all())
        assert torch.allclose(site.w_q().square().sum(-1), site.module.self_score.v * site_ratio(site))
    assert [change["change"] for change in record.changes(model)] == ["symmetrize", "decouple"]


def site_ratio(site: Any) -> Any:
    """|W_Q| / |W_K| per head: what a matched start scales by."""
    norms = [w.flatten(1).norm(dim=1, keepdim=True) for w in (site.w_q(), site.w_k())]
    return norms[0] / norms[1]


@pytest.mark.parametrize("name", ["bert", "llama"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
def test_other_types_and_autocast(name: str, dtype: torch.dtype) -> None:
    family = BY_NAME[name]
    model, given = decoupled(family), inputs(family)
    expected = logits(model, **given)
    found = logits(copy.deepcopy(model).to(dtype), **given)
    assert found.dtype == dtype
    assert_close(found.float(), expected, 0.2 if dtype == torch.bfloat16 else 1e-5)
    if dtype == torch.bfloat16:
        with torch.autocast("cpu", dtype):
            out = model(**given).logits
        assert_close(out.float(), expected, 0.2)
        out.float().square().mean().backward()
        assert all(p.grad is not None for n, p in model.named_parameters() if "self_score" in n)


def test_a_model_without_memory_runs_too() -> None:
    model = decoupled(BY_NAME["bert"]).to("meta")
    out = model(input_ids=torch.zeros(2, 7, dtype=torch.long, device="meta")).logits
    assert out.shape == (2, 7, 53)


# ---- refusals ----------------------------------------------------------------------------------------------


def refused(model: Any, match: str, change: Any = decouple_) -> None:
    before = state_of(model) if hasattr(model, "config") else None
    with pytest.raises(SurgeryError, match=match):
        change(model)
    if before is not None:
        assert state_of(model) == before


def test_decoupling_twice_is_refused() -> None:
    model = decouple_(bert())
    refused(model, r"decoupled already; qkform\.surgery\.recouple_")
    decouple_(recouple_(model))


def test_recoupling_a_model_that_is_not_decoupled_is_refused() -> None:
    refused(bert(), "not decoupled", recouple_)


def test_a_model_made_of_the_config_of_a_decoupled_one_is_told_apart() -> None:
    model = decouple_(bert())
    other = transformers.BertForMaskedLM(copy.deepcopy(model.config))
    with pytest.raises(SurgeryError, match="config says that it is decoupled"):
        decouple_(other)


def test_no_attention_is_refused() -> None:
    with pytest.raises(SurgeryError, match="no attention was found in Sequential"):
        decouple_(nn.Sequential(nn.Linear(3, 3)))


def test_cross_attention_only_is_refused() -> None:
    class Reader(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.config = bert().config
            self.layer = built(BY_NAME["whisper"]).model.decoder.layers[0].encoder_attn

    model = built(BY_NAME["whisper"]).model.decoder.layers[0]
    del model.self_attn
    try:
        found = sites.find(model)
    except Exception as error:
        pytest.skip(f"a layer alone is not understood here: {error}")
    if {site.layer.attention for site in found} != {"cross"}:
        pytest.skip("the kind of an attention in a layer alone is not known")
    with pytest.raises(SurgeryError, match="cross-attention only"):
        decouple_(model)


def test_attention_past_the_interface_is_refused() -> None:
    config = transformers.BloomConfig(vocab_size=53, hidden_size=24, n_layer=2, n_head=3)
    refused(transformers.BloomForCausalLM(config), r"h\.0\.self_attention.*AttentionInterface")


def test_several_query_key_terms_are_refused() -> None:
    config = transformers.DebertaV2Config(
        **{k: v for k, v in BERT.items() if "prob" not in k},
        relative_attention=True,
        pos_att_type=["c2p", "p2c"],
    )
    refused(transformers.DebertaV2ForMaskedLM(config), r"layer\.0\.attention.*(terms|AttentionInterface)")
    config = transformers.DeepseekV3Config(
        vocab_size=53,
        hidden_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        q_lora_rank=8,
        kv_lora_rank=8,
        qk_rope_head_dim=4,
        qk_nope_head_dim=4,
        v_head_dim=6,
        intermediate_size=20,
        first_k_dense_replace=2,
    )
    refused(
        transformers.DeepseekV3ForCausalLM(config),
        r"no attention of DeepseekV3ForCausalLM can be changed: .*layers\.0\.self_attn.*product of matrices",
    )


def test_capped_scores_are_refused() -> None:
    config = transformers.Gemma2Config(**GQA)
    refused(transformers.Gemma2ForCausalLM(config), r"layers\.0\.self_attn.*attn_logit_softcapping")
    config = transformers.Gemma2Config(**GQA, attn_logit_softcapping=None)
    decouple_(transformers.Gemma2ForCausalLM(config))


def test_sinks_are_refused() -> None:
    config = transformers.GptOssConfig(**GQA, num_local_experts=2, num_experts_per_tok=1)
    refused(transformers.GptOssForCausalLM(config), r"layers\.0\.self_attn.*attention sinks")


def test_a_batch_without_a_fit_is_refused() -> None:
    refused(bert(), r'batch is for init="fit"', lambda m: decouple_(m, batch=inputs(BY_NAME["bert"])))


def test_attentions_that_are_not_understood_are_warned_of() -> None:
    """An attention whose Q no single parameter holds, beside one that can be changed."""
    model = llama()
    original = sites.find(model)
    part = {"module": "model.layers.1.self_attn", "reason": "no single parameter holds w_q"}

    def fewer(found: Any) -> Any:
        return sites.Sites(original[:1], (part, {"module": "model.layers.0.mlp", "reason": "no attention"}))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sites, "find", fewer)
        with pytest.warns(UserWarning, match=r"layers\.1\.self_attn stays as it is: no single") as caught:
            decouple_(model)
    assert len(caught) == 1


@pytest.mark.parametrize("seed", [-1, 1.5, True, None])
def test_a_seed_is_a_whole_number_from_0(seed: Any) -> None:
    refused(bert(), "seed is .*; expected a whole number from 0", lambda m: decouple_(m, seed=seed))


def test_a_layer_more_leaves_the_noise_of_the_others() -> None:
    v = []
    for layers in (2, 3):
        model = decouple_(llama(num_hidden_layers=layers), init="spread", seed=3)
        first = sites.find(model)[0].module.self_score.v.detach()
        v.append([site.module.self_score.v.detach() for site in sites.find(model)])
        assert not torch.allclose(first, v[-1][1])
    form = [own_form(site, False) for site in sites.find(llama(num_hidden_layers=3))]
    other = [own_form(site, False) for site in sites.find(llama(num_hidden_layers=2))]
    for i in range(2):  # weights of the two models differ in size, the noise does not
        one, two = (
            ((x - x.mean(1, keepdim=True)) / each.deviation[:, None])
            for x, each in zip((v[0][i], v[1][i]), (other[i], form[i]), strict=True)
        )
        assert_close(one.float(), two.float(), 1e-4)


def test_a_scale_that_may_be_in_the_queries_already_is_refused() -> None:
    """A module that hands over the scale 1 and has another one: only classes that are known tell which counts."""
    from qkform.surgery.interface import prescale

    model = built(BY_NAME["opt"])
    attention = sites.find(model)[0].module
    assert prescale(attention, 1.0) == attention.scaling
    assert prescale(attention, 0.5) is None

    class Odd(nn.Module):
        scaling = 0.25

    with pytest.raises(SurgeryError, match=r"Odd hands over the scale 1 and has scaling=0\.25"):
        prescale(Odd(), 1.0)
    assert prescale(Odd(), 0.25) is None
    assert prescale(nn.Linear(2, 2), 1.0) is None


def test_an_unknown_start_is_refused() -> None:
    refused(bert(), "init='diag' is none of diagonal, zero, spread, fit", lambda m: decouple_(m, init="diag"))


@pytest.mark.parametrize("kind", ["decoupled", "exclusive", "no-diagonal"])
@pytest.mark.parametrize("name", ["bert", "t5"])
def test_another_implementation_set_afterwards_is_an_error_not_standard_attention(
    name: str, kind: str
) -> None:
    family = BY_NAME[name]
    model = decoupled(family) if kind == "decoupled" else set_attention_(built(family), kind)
    expected = logits(model, **inputs(family))
    for other in ("sdpa", "eager"):
        model.set_attn_implementation(other)
        with pytest.raises(SurgeryError, match=rf"is (of )?{kind}.* computed standard attention.*{other}"):
            model(**inputs(family))
    model.set_attn_implementation("qkform")
    assert torch.equal(logits(model, **inputs(family)), expected)


def test_a_projection_replaced_afterwards_is_an_error() -> None:
    model = decoupled(BY_NAME["bert"])
    model.bert.encoder.layer[0].attention.self.query = nn.Linear(24, 24)
    with pytest.raises(SurgeryError, match="has been replaced since"):
        model(**inputs(BY_NAME["bert"]))


def test_attention_dropout_is_warned_of_once() -> None:
    with pytest.warns(
        UserWarning, match=r"layer\.0\.attention\.self has attention dropout 0\.25.*set it to 0.*slower"
    ) as caught:
        model = decouple_(bert(attention_probs_dropout_prob=0.25))
    assert len(caught) == 1
    given = inputs(BY_NAME["bert"])
    torch.manual_seed(0)
    one, other = (logits(model.train(), **given) for _ in range(2))
    assert not torch.equal(one, other)
    assert torch.equal(logits(model.eval(), **given), logits(model, **given))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        decouple_(bert())
        set_attention_(bert(attention_probs_dropout_prob=0.25), "exclusive")  # has no need of the reference
    with pytest.warns(UserWarning, match=r"layer\.0\.attention\.self has attention dropout 0\.25") as caught:
        set_attention_(bert(attention_probs_dropout_prob=0.25), "no-diagonal")
    assert len(caught) == 1


@pytest.mark.filterwarnings("default:.*learned bias of position")
@pytest.mark.parametrize("change", [decouple_, lambda model: set_attention_(model, "no-diagonal")])
def test_a_learned_bias_of_position_is_warned_of_once(change: Any) -> None:
    """Its gradient needs the reference in training; a T5 whose bias is frozen takes the fast path."""
    model = built(BY_NAME["t5"])
    with pytest.warns(
        UserWarning, match=r"SelfAttention has a learned bias of position.*requires_grad"
    ) as caught:
        change(model)
    assert len(caught) == 1
    frozen = built(BY_NAME["t5"])
    for name, parameter in frozen.named_parameters():
        parameter.requires_grad_("relative_attention_bias" not in name)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        change(frozen)


# ---- caches ------------------------------------------------------------------------------------------------


def test_a_static_cache_knows_where_the_own_key_is() -> None:
    """Of its 17 places, and of a window's 5, that of step i is the one written last; none of the empty ones counts."""
    family = BY_NAME["mistral"]
    model = decoupled(family)
    tokens = inputs(family, length=13)["input_ids"]
    expected = logits(model, input_ids=tokens)
    mask = torch.ones(2, 13, dtype=torch.long)
    past = cache_for(model, "static", family)
    for start in range(13):
        out = logits(
            model,
            input_ids=tokens[:, start : start + 1],
            attention_mask=mask[:, : start + 1],
            **{past_name(): past},
        )
        assert_close(out[:, 0], expected[:, start])


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("name", ["llama", "mistral", "gpt2"])
def test_left_padded_generation_is_that_of_each_row_alone(name: str, cache: str) -> None:
    family = BY_NAME[name]
    model = decoupled(family)
    tokens = inputs(family, length=9)["input_ids"]
    tokens[1, :4] = 0
    mask = torch.ones_like(tokens)
    mask[1, :4] = 0
    options = {"max_new_tokens": 5, "min_new_tokens": 5, "do_sample": False, "pad_token_id": 0}
    options |= {"output_logits": True, "return_dict_in_generate": True}
    if cache == "static":
        options |= {"cache_implementation": "static", "disable_compile": True}
    both = torch.stack(model.generate(tokens, attention_mask=mask, **options).logits)
    alone = torch.stack(model.generate(tokens[1:, 4:], attention_mask=mask[1:, 4:], **options).logits)
    assert_close(both[:, 1:], alone)


# ---- torch.compile -----------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch's own compiler
@pytest.mark.parametrize("name", ["bert", "llama"])
def test_a_compiled_model_is_one_graph_with_the_same_gradients(name: str) -> None:
    family = BY_NAME[name]
    model = decoupled(family, num_hidden_layers=1).train()
    other = copy.deepcopy(model)
    given = inputs(family)
    out = model(**given).logits
    out.square().mean().backward()
    torch._dynamo.reset()
    compiled = torch.compile(other, fullgraph=True, backend="aot_eager", dynamic=False)
    found = compiled(**given).logits
    found.square().mean().backward()
    assert_close(found, out, 1e-6)
    for (path, one), two in zip(model.named_parameters(), other.parameters(), strict=True):
        if one.grad is not None:
            assert two.grad is not None, path
            assert_close(two.grad, one.grad, 1e-6)
    randomised(other, seed=5)
    assert (compiled(**given).logits - out).abs().max() > 1e-3  # v is no constant of the graph


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch's own compiler
@pytest.mark.parametrize("name", ["bert", "llama"])
def test_a_model_compiled_to_kernels_is_the_same(name: str) -> None:
    family = BY_NAME[name]
    model = decoupled(family, num_hidden_layers=1)
    torch._dynamo.reset()
    compiled = torch.compile(copy.deepcopy(model), fullgraph=True)
    given = inputs(family)
    assert_close(logits(compiled, **given), logits(model, **given))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch's own compiler
def test_a_compiled_decoding_step_serves_every_position() -> None:
    """With a static cache the place of the own key is a tensor: one graph, never compiled anew."""
    family = BY_NAME["llama"]
    model = decoupled(family, num_hidden_layers=1)
    tokens = inputs(family, length=12)["input_ids"]
    expected = logits(model, input_ids=tokens)
    torch._dynamo.reset()
    counter = dynamo_testing.CompileCounterWithBackend("eager")
    step = torch.compile(model, fullgraph=True, backend=counter, dynamic=False)
    past = cache_for(model, "static", family)
    logits(model, input_ids=tokens[:, :5], **{past_name(): past})
    for i in range(5, 12):
        out = logits(step, input_ids=tokens[:, i : i + 1], **{past_name(): past})
        assert_close(out[:, 0], expected[:, i])
    assert counter.frame_count <= 2


# ---- set_attention_ ----------------------------------------------------------------------------------------


def by_hand(model: Any, family: Any, kind: str, given: dict[str, Any]) -> torch.Tensor:
    """Logits of a model whose attention is that of `kind`, by the definition."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import eager_mask

    own = {id(site.module) for site in sites.find(model) if site.layer.attention == "self"}

    def attention(module, query, key, value, attention_mask, scaling=None, **kwargs):
        key, value = (t.repeat_interleave(query.shape[1] // key.shape[1], 1) for t in (key, value))
        scores = query @ key.mT * (query.shape[-1] ** -0.5 if scaling is None else scaling)
        if kwargs.get("position_bias") is not None:
            scores = scores + kwargs["position_bias"]
        if attention_mask is not None:
            scores = scores + attention_mask
        if id(module) in own and kind == "no-diagonal":
            scores.diagonal(dim1=-2, dim2=-1).fill_(-1e30)
        y = scores.softmax(-1) @ value
        if id(module) in own and kind == "no-diagonal" and getattr(module, "is_causal", False):
            y[:, :, 0] = 0  # the first token sees nothing
        if id(module) in own and kind == "exclusive":
            y = y - (y * value).sum(-1, keepdim=True) * value / value.square().sum(-1, keepdim=True)
        return y.transpose(1, 2), None

    AttentionInterface.register("qkform_tests_by_hand", attention)
    AttentionMaskInterface.register("qkform_tests_by_hand", eager_mask)
    model.set_attn_implementation("qkform_tests_by_hand")
    try:
        return logits(model, **given)
    finally:
        for table in (AttentionInterface, AttentionMaskInterface):
            del table._global_mapping["qkform_tests_by_hand"]


@pytest.mark.parametrize("kind", ["exclusive", "no-diagonal"])
@pytest.mark.parametrize("name", ["bert", "gpt2", "llama", "mistral", "qwen3", "opt", "whisper", "t5", "vit"])
def test_every_kind_of_attention_is_its_definition(name: str, kind: str) -> None:
    family = BY_NAME[name]
    model = built(family)
    given = inputs(family)
    before = logits(model, **given)
    expected = by_hand(copy.deepcopy(model), family, kind, given)
    assert set_attention_(model, kind) is model
    found = logits(model, **given)
    assert_close(found, expected)
    assert (found - before).abs().max() > 1e-2 * before.abs().max()
    assert record.done(model, "set_attention")["kind"] == kind
    set_attention_(model, "standard")
    assert torch.equal(logits(model, **given), before)
    assert not hasattr(model.config, "qkform")
    assert model.config._attn_implementation == "sdpa"


@pytest.mark.parametrize("kind", ["exclusive", "no-diagonal"])
@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_every_kind_of_attention_decodes_as_it_reads(name: str, cache: str, kind: str) -> None:
    family = BY_NAME[name]
    model = set_attention_(built(family), kind)
    tokens = inputs(family, length=13)["input_ids"]
    expected = logits(model, input_ids=tokens)
    past = cache_for(model, cache, family)
    done = 0
    for step in (6, 2, *[1] * 5):
        out = logits(model, input_ids=tokens[:, done : done + step], **{past_name(): past})
        assert_close(out, expected[:, done : done + step])
        done += step


def test_kinds_replace_each_other_and_a_decoupled_model_is_refused() -> None:
    model = bert()
    given = inputs(BY_NAME["bert"])
    set_attention_(model, "exclusive")
    set_attention_(model, "no-diagonal")
    assert [change["kind"] for change in record.changes(model)] == ["no-diagonal"]
    other = set_attention_(bert(), "no-diagonal")
    assert torch.equal(logits(model, **given), logits(other, **given))
    refused(model, "changed to 'no-diagonal' before")
    set_attention_(model, "standard")
    decouple_(model)
    refused(model, "is decoupled", lambda m: set_attention_(m, "exclusive"))
    refused(bert(), "'cosine' is no kind of attention", lambda m: set_attention_(m, "cosine"))
    assert set_attention_(bert(), "standard").config._attn_implementation == "sdpa"


def test_a_recorded_kind_is_restored() -> None:
    from qkform.surgery.set_attention import restore as restore_kind

    model = set_attention_(bert(), "exclusive")
    other = bert()
    restore_kind(other, record.done(model, "set_attention"))
    given = inputs(BY_NAME["bert"])
    assert torch.equal(logits(other, **given), logits(model, **given))
    with pytest.raises(SurgeryError, match=r"the model has bert\.encoder"):
        restore_kind(bert(), {"kind": "exclusive", "sites": ["nowhere"]})
