"""What a self score starts with keeps what standard self scores are: their mean, their spread, their regression."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from qkform import sites
from qkform.surgery import decouple_, param_groups, record, recouple_, starts, symmetrize_
from qkform.surgery.interface import SWITCH
from qkform.surgery.regression import STRENGTHS, Ridge
from tests.test_decouple_families import BY_NAME, GQA, assert_close, built, inputs, logits, randomised

transformers = pytest.importorskip("transformers")

BASE = {"vocab_size": 40, "hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4}
BASE |= {"intermediate_size": 32, "num_key_value_heads": 4, "attention_dropout": 0.0, "pad_token_id": 0}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "rope_theta": 1e4}
MODELS = {
    "llama": ("Llama", {}),
    "llama-grouped": ("Llama", {"num_key_value_heads": 2}),
    "llama-yarn": ("Llama", {"rope_parameters": YARN, "max_position_embeddings": 256}),
    "qwen3": ("Qwen3", {"head_dim": 16}),
    "cohere": ("Cohere", {"use_qk_norm": True}),
    "stablelm": ("StableLm", {"qk_layernorm": True}),
    "phi": ("Phi", {"qk_layernorm": True}),
    "olmo2": ("Olmo2", {}),
}


def model_of(name: str, arm: Any = None, gains: bool = False) -> Any:
    family, settings = MODELS[name]
    config = getattr(transformers, f"{family}Config")(**BASE | settings)
    torch.manual_seed(0)
    model = getattr(transformers, f"{family}Model")(config).double().eval()
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            norm = any(side in parameter_name for side in ("q_norm", "k_norm", "q_lay", "k_lay"))
            if gains and norm and "bias" not in parameter_name:
                parameter.add_(torch.randn(parameter.shape).to(parameter) * 0.3)
    if arm is not None:
        symmetrize_(model, arm=arm)
    return model


def own_scores(model: Any, given: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """Of the first attention: the squares that `v` is multiplied with (T, d), and q . k as it was (T, H)."""
    model = decouple_(copy.deepcopy(model), init="zero")
    site = sites.find(model)[0]
    score, seen = site.module.self_score, {}
    score.register_forward_pre_hook(lambda m, args: seen.update(x=m.squares(args[0])))
    getattr(site.module, SWITCH).observe = lambda q, k, *_: seen.update(q=q, k=k)
    with torch.no_grad():
        model(**given)
    k = seen["k"].repeat_interleave(seen["q"].shape[1] // seen["k"].shape[1], 1)
    return seen["x"].flatten(0, 1), (seen["q"] * k).sum(-1).transpose(1, 2).flatten(0, 1)


def gaussian() -> dict[str, Any]:
    generator = torch.Generator().manual_seed(5)
    return {"inputs_embeds": torch.randn(8, 200, 64, generator=generator, dtype=torch.float64)}


# ---- from the weights --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted(MODELS))
@pytest.mark.parametrize("gains", [False, True])
def test_a_matched_start_keeps_the_mean_self_score(name: str, gains: bool) -> None:
    """`diagonal` and `spread`, with the factor of yarn and with norms that take the mean away first."""
    model = model_of(name, "matched", gains)
    squares, old = own_scores(model, gaussian())
    site = sites.find(model)[0]
    normalise = "qk_norm" in site.layer.flags
    assert float(old.mean()) > 0.2
    for v in (
        starts.diagonal(site, normalise),
        starts.spread(site, normalise, torch.Generator().manual_seed(3)),
    ):
        assert_close((squares @ v.mT).mean(0), old.mean(0), 0.035)


@pytest.mark.parametrize("arm", [None, "matched", "indefinite"])
@pytest.mark.parametrize("name", ["cohere", "llama", "llama-grouped", "llama-yarn", "qwen3"])
def test_the_spread_start_differs_from_token_to_token_as_before(name: str, arm: Any) -> None:
    model = model_of(name, arm, gains=True)
    squares, old = own_scores(model, gaussian())
    site = sites.find(model)[0]
    v = [
        starts.spread(site, "qk_norm" in site.layer.flags, torch.Generator().manual_seed(s)) for s in range(9)
    ]
    new = torch.stack([(squares @ each.mT).std(0) for each in v]).mean(0)
    assert torch.allclose(new, old.std(0), rtol=0.15), (new, old.std(0))


def test_normed_queries_that_are_the_keys_have_one_self_score() -> None:
    """q = k, both of one length: q . k is d_head for every token, and no noise is added to that."""
    model = model_of("qwen3", "matched")
    squares, old = own_scores(model, gaussian())
    site = sites.find(model)[0]
    v = starts.spread(site, True, torch.Generator().manual_seed(3))
    assert float((old - 16).abs().max()) < 1e-2
    assert float((squares @ v.mT - 16).abs().max()) < 1e-6


@pytest.mark.parametrize("arm", [None, "matched", "skew"])
def test_a_spread_start_has_the_trace_and_the_size_of_the_symmetric_part(arm: Any) -> None:
    """sum_k v_k is tr(W) and |v| is ||S||_F: mean and variance for Gaussian features, exactly."""
    model = model_of("llama", arm)
    site = sites.find(model)[0]
    v = starts.spread(site, False, torch.Generator().manual_seed(3))
    other = starts.spread(site, False, torch.Generator().manual_seed(4))
    for head in range(4):
        w = (site.w_q()[head] @ site.w_k()[head].mT).detach()
        s = (w + w.mT) / 2
        assert float(v[head].sum() - w.trace()) == pytest.approx(0, abs=1e-9)
        assert float(v[head].norm()) == pytest.approx(float(s.norm()), rel=1e-9, abs=1e-9)
        if arm != "skew":  # x W x is 0 there, and so is v
            assert not torch.allclose(v[head], other[head])


@pytest.mark.parametrize("name", ["cohere", "qwen3", "stablelm"])
def test_the_diagonal_start_is_the_best_where_norms_are(name: str) -> None:
    """No other v with the same features does better by more than sampling: against least squares on many tokens."""
    model = model_of(name, None, gains=True)
    squares, old = own_scores(model, gaussian())
    site = sites.find(model)[0]
    v = starts.diagonal(site, True)
    best = torch.linalg.lstsq(squares, old).solution
    left, least = ((old - squares @ b).square().sum(0) / old.square().sum(0) for b in (v.mT, best))
    assert bool((left < least + 2 * 64 / len(old)).all()), (left, least)


# ---- from a batch ------------------------------------------------------------------------------------------


def explicit(z: Any, y: Any) -> tuple[Any, Any]:
    """Sums of squares missed by leaving out every row in turn, (strengths, targets); b (strengths, d, targets)."""
    zz, missed, solutions = z.T @ z, [], []
    for strength in STRENGTHS:
        penalty = strength * np.diag(np.diag(zz))
        solutions.append(np.linalg.solve(zz + penalty, z.T @ y))
        errors = []
        for i in range(len(z)):
            kept, others = np.delete(z, i, 0), np.delete(y, i, 0)
            errors.append(y[i] - z[i] @ np.linalg.solve(kept.T @ kept + penalty, kept.T @ others))
        missed.append(np.square(errors).sum(0))
    return np.array(missed), np.array(solutions)


@pytest.mark.parametrize("rows", [9, 31])
def test_a_ridge_leaves_out_every_row_in_turn(rows: int) -> None:
    rng = np.random.default_rng(rows)
    z = rng.normal(size=(rows, 7)) ** 2
    y = z @ rng.normal(size=(7, 4)) + np.array([0.0, 0.1, 3.0, 30.0]) * rng.normal(size=(rows, 4))
    ridge = Ridge(7, 4)
    parts = [slice(0, 2), slice(2, rows)]
    for use in (ridge.add, ridge.leave_out):
        for part in parts:
            use(torch.tensor(z[part]), torch.tensor(y[part]))
    b, r2 = ridge.solve()
    missed, solutions = explicit(z, y)
    best = missed.argmin(0)
    assert len(set(best.tolist())) > 1
    for target, strength in enumerate(best):
        assert np.allclose(b[:, target].numpy(), solutions[strength][:, target], rtol=1e-7, atol=1e-9)
    whole = np.square(y - y.mean(0)).sum(0)
    assert r2 == pytest.approx((1 - missed.min(0) / whole).tolist(), rel=1e-7, abs=1e-9)
    assert ridge.rows == rows


def test_a_loud_feature_penalises_no_other() -> None:
    torch.manual_seed(0)
    z, y = torch.randn(60, 7, dtype=torch.float64) ** 2, torch.randn(60, 2, dtype=torch.float64)
    loud = torch.ones(7, dtype=torch.float64)
    loud[2], loud[4] = 1e6, 0.0  # one far louder than the others, one that is never there
    quiet = torch.ones(7, dtype=torch.float64)
    quiet[4] = 0.0
    solved = []
    for scale in (quiet, loud):
        ridge = Ridge(7, 2)
        ridge.add(z * scale, y)
        ridge.leave_out(z * scale, y)
        solved.append(ridge.solve())
    (b, r2), (b_loud, r2_loud) = solved
    assert torch.allclose(b_loud * loud[:, None], b, rtol=1e-8, atol=1e-12)
    assert r2_loud == pytest.approx(r2, rel=1e-8)
    assert not b[4].any()


def tied(d: int = 24) -> nn.MultiheadAttention:
    """An attention with W_K = W_Q, of whose self scores v holds about a fifth."""
    torch.manual_seed(0)
    attention = nn.MultiheadAttention(d, 3, batch_first=True, bias=False, dtype=torch.float64)
    with torch.no_grad():
        attention.in_proj_weight[d : 2 * d] = attention.in_proj_weight[:d]
    return attention


def fitted(tokens: int) -> tuple[list[float], torch.Tensor, list[int]]:
    """R^2 as recorded, and of 4000 other tokens; the recorded numbers of tokens."""
    attention = tied()
    holder = nn.ModuleDict({"attention": attention})
    holder.forward = lambda x: attention(x, x, x, need_weights=False)[0]  # type: ignore[method-assign]
    x, others = torch.randn(1, tokens, 24, dtype=torch.float64), torch.randn(4000, 24, dtype=torch.float64)
    q = (others @ attention.in_proj_weight[:24].mT).unflatten(-1, (3, 8)).detach()
    decouple_(holder, init="fit", batch={"x": x})
    old, new = q.square().sum(-1), others.square() @ attention.self_score.v.detach().mT
    change = record.done(holder, "decouple")
    return change["r2"][0], 1 - (old - new).square().mean(0) / old.var(0), change["tokens"]


def test_a_fit_to_few_tokens_is_warned_of_and_does_little_harm() -> None:
    """As many tokens as features: least squares would be exact on them, and far worse than nothing on others."""
    with pytest.warns(
        UserWarning, match=r"attention: .* 24 tokens for 24 features.* at least 96, better 384"
    ):
        told, true, tokens = fitted(24)
    assert tokens == [24]
    assert max(told) < 0.7
    assert float(true.min()) > -0.5


def test_the_recorded_r2_is_that_of_other_tokens() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        told, true, tokens = fitted(384)
    assert tokens == [384]
    assert torch.allclose(torch.tensor(told, dtype=torch.float64), true, atol=0.1)
    assert float(true.min()) > 0.1


# ---- with weights that are split ---------------------------------------------------------------------------


def split(model: Any) -> Any:
    param_groups(model, lr=1e-3, qk_lr_ratio=4.0)
    return model


@pytest.mark.parametrize("init", ["diagonal", "spread", "fit"])
@pytest.mark.parametrize("name", ["gpt2", "gpt-neox", "modernbert"])
def test_fused_weights_are_split_before_or_after(name: str, init: Any) -> None:
    family = BY_NAME[name]
    given = inputs(family, batch=6, length=17)
    options = {"init": init, "batch": given if init == "fit" else None}
    before, after = decouple_(split(built(family)), **options), split(decouple_(built(family), **options))
    plain = decouple_(built(family), **options)
    v = [[p for n, p in m.named_parameters() if "self_score" in n] for m in (plain, before, after)]
    for expected, one, other in zip(*v, strict=True):
        assert_close(one.detach(), expected.detach(), 1e-5)
        assert_close(other.detach(), expected.detach(), 1e-5)
    for model in (plain, before, after):
        randomised(model)
    expected = logits(plain, **given)
    for model in (before, after):
        assert_close(logits(model, **given), expected, 1e-5)
        assert model.state_dict().keys() == plain.state_dict().keys()
        assert_close(logits(recouple_(model), **given), logits(built(family), **given), 1e-5)


def test_grouped_heads_read_the_keys_of_their_group() -> None:
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**GQA))
    for site in sites.find(model):
        v = starts.diagonal(site, False)
        w_q, w_k = site.w_q().double(), site.w_k().double()
        for head in range(6):
            assert torch.allclose(v[head], (w_q[head] @ w_k[head // 3].mT).diagonal(), rtol=1e-9)
