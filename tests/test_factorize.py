"""Collapsed and factorized circuits: the same function to rounding, there and back, and balanced factors."""

from __future__ import annotations

import copy
import itertools
import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from qkform import sites
from qkform.errors import SurgeryError
from qkform.surgery import CircuitAttention, collapse_, factorize_, from_pretrained, param_groups, unsplit_
from qkform.surgery.collapsed import balanced, converted
from qkform.surgery.factorize import from_torch
from qkform.surgery.record import changes
from qkform.surgery.widened import plan
from tests import truth

KINDS = ("collapsed", "factorized")
TOLERANCE = {torch.float32: 1e-6, torch.float64: 1e-12}
DTYPES = pytest.mark.parametrize("dtype", TOLERANCE, ids=str)


def drawn(module: Any, seed: int = 0) -> Any:
    """The module with every parameter drawn anew, biases too, small enough that nothing saturates."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            wide = parameter.shape[-1] if parameter.ndim > 1 else 4
            parameter.copy_(torch.randn(parameter.shape, generator=generator) / math.sqrt(wide))
    return module


def noise(*shape: int, dtype: torch.dtype = torch.float64, seed: int = 1) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def largest(one: torch.Tensor, other: torch.Tensor) -> float:
    return float((one - other).detach().abs().max())


def by_definition(a: CircuitAttention, x: Any, y: Any, z: Any, allowed: Any) -> tuple[Any, Any]:
    """The formulas of the class, head by head; `allowed` (batch, queries, keys) bool."""
    total, every = torch.zeros(*x.shape[:2], a.d_model, dtype=x.dtype), []
    for h in range(a.n_heads):
        if a.qk == "collapsed":
            scores = (x @ a.W_QK[h] + a.b_K[h]) @ y.transpose(1, 2)
        else:
            scores = (x @ a.W_Q[h] + a.b_Q[h]) @ (y @ a.W_K[h]).transpose(1, 2)
        p = torch.softmax((a.scale * scores).masked_fill(~allowed, -math.inf), -1)
        moved = z @ a.W_OV[h] if a.ov == "collapsed" else z @ a.W_V[h] @ a.W_O[h]
        total, every = total + p @ moved, [*every, p]
    return total + a.b_O, torch.stack(every, 1)


@pytest.mark.parametrize(("qk", "ov"), list(itertools.product(KINDS, KINDS)))
def test_the_four_parameterizations_are_what_they_say(qk: Any, ov: Any) -> None:
    a = drawn(
        CircuitAttention(10, 3, qk=qk, ov=ov, d_head=4, d_key=7, d_value=5, bias=True, scale=0.7).double()
    )
    x, y, z = noise(2, 6, 10), noise(2, 9, 7, seed=2), noise(2, 9, 5, seed=3)
    everyone = torch.ones(2, 6, 9, dtype=torch.bool)
    forbidden = torch.rand(6, 9, generator=torch.Generator().manual_seed(4)) < 0.3
    padding = torch.zeros(2, 9, dtype=torch.bool)
    padding[1, 5:] = True
    out, weights = by_definition(a, x, y, z, everyone)
    found = a(x, y, z, average_attn_weights=False)
    assert largest(found[0], out) < 1e-13
    assert largest(found[1], weights) < 1e-14
    fused = a(x, y, z, need_weights=False)
    assert fused[1] is None
    assert largest(fused[0], out) < 1e-13
    for masks, allowed in (
        ({"attn_mask": forbidden}, ~forbidden.expand(2, 6, 9)),
        ({"attn_mask": torch.zeros(6, 9).masked_fill(forbidden, -math.inf)}, ~forbidden.expand(2, 6, 9)),
        ({"attn_mask": forbidden.expand(6, 6, 9)}, ~forbidden.expand(2, 6, 9)),
        ({"key_padding_mask": padding}, ~padding[:, None].expand(2, 6, 9)),
        ({"key_padding_mask": padding, "attn_mask": forbidden}, ~(padding[:, None] | forbidden)),
    ):
        out, weights = by_definition(a, x, y, z, allowed)
        for need in (True, False):
            assert largest(a(x, y, z, need_weights=need, **masks)[0], out) < 1e-13
        assert largest(a(x, y, z, **masks)[1], weights.mean(1)) < 1e-14


def test_future_tokens_cannot_change_past_outputs() -> None:
    a = drawn(CircuitAttention(8, 2, causal=True).double())
    x = noise(2, 7, 8)
    changed = x.clone()
    changed[:, 4:] += 1.0
    for need in (True, False):
        one, other = a(x, need_weights=need)[0], a(changed, need_weights=need)[0]
        assert torch.equal(one[:, :4], other[:, :4])
        assert largest(one[:, 4:], other[:, 4:]) > 1e-3
    plain = drawn(CircuitAttention(8, 2).double())
    assert largest(plain(x, is_causal=True)[0], a(x)[0]) < 1e-14


def test_layouts_of_the_batch() -> None:
    a = drawn(CircuitAttention(8, 2).double())
    x = noise(3, 7, 8)
    out = a(x)[0]
    assert torch.allclose(a(x[1])[0], out[1], atol=1e-14)
    last = drawn(CircuitAttention(8, 2, batch_first=False).double())
    assert torch.allclose(last(x.transpose(0, 1))[0].transpose(0, 1), out, atol=1e-14)


def test_the_start_of_a_free_matrix_has_the_size_of_a_product() -> None:
    torch.manual_seed(0)
    free = CircuitAttention(48, 4)
    factors = CircuitAttention(48, 4, qk="factorized", ov="factorized")
    for circuit in ("circuit_qk", "circuit_ov"):
        one, other = (float(getattr(a, circuit)().detach().square().mean()) for a in (free, factors))
        assert one == pytest.approx(other, rel=0.1)


def test_the_gradient_of_a_factor_is_that_of_the_product_times_the_other_factor() -> None:
    """dL/dW_Q = G W_K and dL/dW_K = G^T W_Q, with G the gradient of the free matrix; the same for W_V, W_O."""
    factors = drawn(CircuitAttention(9, 2, qk="factorized", ov="factorized", d_head=4).double())
    free, lost = converted(factors, qk="collapsed", ov="collapsed")
    assert lost == 0.0
    x = noise(3, 5, 9)
    for a in (factors, free):
        a(x)[0].sin().sum().backward()
    g, o = free.W_QK.grad, free.W_OV.grad
    assert largest(factors.W_Q.grad, g @ factors.W_K.detach()) < 1e-13
    assert largest(factors.W_K.grad, g.transpose(1, 2) @ factors.W_Q.detach()) < 1e-13
    assert largest(factors.W_V.grad, o @ factors.W_O.detach().transpose(1, 2)) < 1e-13
    assert largest(factors.W_O.grad, factors.W_V.detach().transpose(1, 2) @ o) < 1e-13


def test_factors_are_a_site_as_any_other_attention() -> None:
    model = nn.ModuleDict({"a": drawn(CircuitAttention(9, 3, qk="factorized", d_head=4, bias=True).double())})
    (site,) = sites.find(model)
    assert site.path == "a"
    assert torch.equal(site.w_q(), model["a"].W_Q)
    assert torch.equal(site.w_k(), model["a"].W_K)
    assert torch.equal(site.b_q(), model["a"].b_Q)
    assert site.b_k() is None


# ---- nn.MultiheadAttention -----------------------------------------------------------------------------------


@DTYPES
@pytest.mark.parametrize(
    "settings", [{}, {"bias": False}, {"kdim": 7, "vdim": 5}, {"batch_first": False}], ids=str
)
def test_a_stock_attention_is_collapsed_and_taken_apart_again(settings: Any, dtype: torch.dtype) -> None:
    stock = drawn(nn.MultiheadAttention(12, 3, **{"batch_first": True, **settings}).to(dtype))
    x = noise(2, 6, 12, dtype=dtype)
    y = noise(2, 6, settings.get("kdim", 12), dtype=dtype, seed=2)
    z = noise(2, 6, settings.get("vdim", 12), dtype=dtype, seed=3)
    if not stock.batch_first:
        x, y, z = (t.transpose(0, 1) for t in (x, y, z))
    mask = torch.ones(6, 6, dtype=torch.bool).triu(1)
    padding = torch.zeros(2, 6, dtype=torch.bool)
    padding[1, 4:] = True
    tolerance = TOLERANCE[dtype]
    free = collapse_(copy.deepcopy(stock))
    assert isinstance(free, CircuitAttention)
    assert (free.qk, free.ov) == ("collapsed", "collapsed")
    again = factorize_(copy.deepcopy(free))
    assert type(again) is nn.MultiheadAttention
    assert {n: p.shape for n, p in again.state_dict().items()} == {
        n: p.shape for n, p in stock.state_dict().items()
    }
    half = collapse_(copy.deepcopy(stock), ov=False)
    assert (half.qk, half.ov) == ("collapsed", "factorized")
    for other in (from_torch(stock), free, half, again):
        for masks in ({}, {"attn_mask": mask}, {"key_padding_mask": padding}):
            out, weights = stock(x, y, z, **masks)
            found, its = other(x, y, z, **masks)
            assert largest(found, out) < tolerance
            assert largest(its, weights) < tolerance
        short = other(x, y, z, need_weights=False, attn_mask=mask, is_causal=True)[0]
        assert (
            largest(short, stock(x, y, z, need_weights=False, attn_mask=mask, is_causal=True)[0]) < tolerance
        )
        apart = other(x, y, z, average_attn_weights=False)[1]
        assert largest(apart, stock(x, y, z, average_attn_weights=False)[1]) < tolerance


def test_w_qk_is_the_product_that_a_site_reads() -> None:
    stock = drawn(nn.MultiheadAttention(12, 3).double())
    (site,) = sites.find(stock)
    free = collapse_(copy.deepcopy(stock))
    assert largest(free.W_QK, site.w_q() @ site.w_k().transpose(1, 2)) < 1e-15
    assert largest(free.b_K, torch.einsum("hde,he->hd", site.w_k(), site.b_q())) < 1e-15


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")  # the stock model's fast path
@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
def test_transformer_layers_run_on_collapsed_attention(training: bool) -> None:
    """The stock layers' fast path looks into weights that are gone: it must not be taken, with and without padding."""
    layer = nn.TransformerEncoderLayer(12, 2, 20, dropout=0.0, batch_first=True)
    stock = drawn(nn.TransformerEncoder(layer, 2).double()).train(training)
    free = collapse_(copy.deepcopy(stock))
    assert sum(isinstance(m, CircuitAttention) for m in free.modules()) == 2
    padding = torch.zeros(2, 6, dtype=torch.bool)
    padding[1, 4:] = True
    x = noise(2, 6, 12)
    for no_grad in (True, False):
        with torch.set_grad_enabled(not no_grad):
            assert largest(free(x), stock(x)) < 1e-12
            one = free(x, src_key_padding_mask=padding)
            other = stock(x, src_key_padding_mask=padding)
            assert largest(one[0], other[0]) < 1e-12
            assert largest(one[1, :4], other[1, :4]) < 1e-12  # the fast path leaves padded places out
    decoder = nn.TransformerDecoderLayer(12, 3, 20, dropout=0.0, batch_first=True)
    stock = drawn(nn.TransformerDecoder(decoder, 2).double()).train(training)
    free = collapse_(copy.deepcopy(stock))
    mask = nn.Transformer.generate_square_subsequent_mask(6, dtype=torch.float64)
    memory = noise(2, 5, 12, seed=4)
    assert largest(free(x, memory, tgt_mask=mask), stock(x, memory, tgt_mask=mask)) < 1e-12
    assert largest(factorize_(free)(x, memory, tgt_mask=mask), stock(x, memory, tgt_mask=mask)) < 1e-12


# ---- factors -------------------------------------------------------------------------------------------------


def test_factors_are_balanced_and_the_best_of_their_rank() -> None:
    product = noise(3, 9, 7)
    u, v, lost = balanced(product, 4)
    s = torch.linalg.svdvals(product)
    assert largest(u.transpose(1, 2) @ u, v.transpose(1, 2) @ v) < 1e-13
    assert largest(u.transpose(1, 2) @ u, torch.diag_embed(s[:, :4])) < 1e-13
    left = (product - u @ v.transpose(1, 2)).norm(dim=(1, 2))
    assert largest(left, s[:, 4:].norm(dim=1)) < 1e-13
    assert lost == pytest.approx(float((left / product.norm(dim=(1, 2))).max()), rel=1e-12)
    whole = balanced(product, 7)
    assert largest(whole[0] @ whole[1].transpose(1, 2), product) < 1e-14
    assert whole[2] == 0.0
    more = balanced(product, 11)
    assert more[0].shape == (3, 9, 11)
    assert largest(more[0] @ more[1].transpose(1, 2), product) < 1e-14


def test_a_matrix_of_higher_rank_is_an_error_or_is_cut_when_asked() -> None:
    model = nn.ModuleDict({"attention": drawn(CircuitAttention(12, 3, bias=True).double())})
    x = noise(2, 6, 12)
    before = {n: p.clone() for n, p in model.state_dict().items()}
    with pytest.raises(SurgeryError, match=r"attention: .*rank above 4.*relative error of 0\.\d+.*truncate"):
        factorize_(model)
    assert all(torch.equal(before[n], p) for n, p in model.state_dict().items())
    whole = factorize_(copy.deepcopy(model), rank=12)
    assert whole["attention"].W_Q.shape == (3, 12, 12)
    assert largest(whole["attention"](x)[0], model["attention"](x)[0]) < 1e-12
    cut = factorize_(copy.deepcopy(model), truncate=True)["attention"]
    assert cut.W_Q.shape == (3, 12, 4)
    whole, kept = (with_bias(a.circuit_qk(), a.key_bias()) for a in (model["attention"], cut))
    s = torch.linalg.svdvals(whole)
    assert largest((kept - whole).norm(dim=(1, 2)), s[:, 4:].norm(dim=1)) < 1e-12
    s = torch.linalg.svdvals(model["attention"].W_OV)
    left = (cut.circuit_ov() - model["attention"].W_OV).norm(dim=(1, 2))
    assert largest(left, s[:, 4:].norm(dim=1)) < 1e-12


def with_bias(weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """(H, n, m) and (H, m): the bias of each head as one more row."""
    return torch.cat([weight, bias[:, None]], 1)


PRUNED = {"one column": slice(0, 1), "two heads": slice(0, 8), "all": slice(None)}


@DTYPES
@pytest.mark.parametrize("what", PRUNED)
@pytest.mark.parametrize("kind", ["torch", "bert", "gpt2"])
def test_pruned_weights_with_biases_have_exact_factors(kind: str, what: str, dtype: torch.dtype) -> None:
    """[W_Q; b_Q] W_K^T has rank d_head at most, though b_K is outside the row space of W_QK. Values need no row."""
    model: Any
    inputs: dict[str, Any]
    if kind == "torch":
        model = drawn(nn.MultiheadAttention(12, 3, batch_first=True))
        inputs = dict.fromkeys(("query", "key", "value"), noise(2, 6, 12, dtype=dtype))
        queries, values = model.in_proj_weight[:12], model.in_proj_weight[24:]
    else:
        model, inputs = hugging_face(kind)
        drawn(model)
        last = sites.find(model)[-1].module  # the others are whole
        fused = last.c_attn.weight.T if kind == "gpt2" else None  # a view
        queries, values = (
            (last.query.weight, last.value.weight) if fused is None else (fused[:24], fused[48:])
        )
    with torch.no_grad():
        queries[PRUNED[what]] = values[PRUNED[what]] = 0.0
        model = model.to(dtype)
        expected = model(**inputs)[0]
        model = collapse_(model)
        model = factorize_(model)
        size = max(float(expected.abs().max()), 1.0)
        assert largest(model(**inputs)[0], expected) < 10 * TOLERANCE[dtype] * size
    for site in sites.find(model):
        w_q, w_k = with_bias(site.w_q().double(), site.b_q().double()), site.w_k().double()
        off = largest(w_q.transpose(1, 2) @ w_q, w_k.transpose(1, 2) @ w_k)
        assert off < 10 * TOLERANCE[dtype] * float(w_k.detach().square().sum(1).max())


def test_gradient_flow_conserves_the_balance_with_the_bias() -> None:
    """E^T dL/dE = (dL/dW_K)^T W_K with E = [W_Q; b_Q], so that E^T E - W_K^T W_K stays: of W_Q alone it does not."""
    a = drawn(CircuitAttention(9, 2, qk="factorized", d_head=4, bias=True).double())
    a(noise(3, 5, 9))[0].sin().sum().backward()
    right = a.W_K.grad.transpose(1, 2) @ a.W_K
    extended, slope = with_bias(a.W_Q, a.b_Q), with_bias(a.W_Q.grad, a.b_Q.grad)
    assert largest(extended.transpose(1, 2) @ slope, right) < 1e-13
    assert largest(a.W_Q.transpose(1, 2) @ a.W_Q.grad, right) > 1e-3


@pytest.mark.parametrize(("kept", "names"), [("qk", ("W_Q", "W_K", "b_Q")), ("ov", ("W_V", "W_O"))])
def test_a_circuit_that_is_factorized_keeps_its_factors(kept: str, names: tuple[str, ...]) -> None:
    model = drawn(CircuitAttention(12, 3, bias=True, **{kept: "factorized"}).double())
    again = factorize_(copy.deepcopy(model), truncate=True)
    assert (again.qk, again.ov) == ("factorized", "factorized")
    assert all(torch.equal(getattr(again, name), getattr(model, name)) for name in names)


# ---- Hugging Face --------------------------------------------------------------------------------------------

HUGGING_FACE = ("bert", "roberta", "electra", "albert", "deit", "vit", "gpt2")


def hugging_face(name: str) -> tuple[Any, dict[str, Any]]:
    pytest.importorskip("transformers")
    case = next(case for case in truth.CASES if case.name == name)
    model = truth.build(case)
    model.set_attn_implementation("sdpa")
    return model, truth.FEEDS[case.feed](model.config)


@DTYPES
@pytest.mark.parametrize("name", HUGGING_FACE)
def test_a_hugging_face_model_is_collapsed_and_taken_apart_again(name: str, dtype: torch.dtype) -> None:
    model, inputs = hugging_face(name)
    model = model.to(dtype)
    inputs = {n: v.to(dtype) if v.is_floating_point() else v for n, v in inputs.items()}
    shapes = {n: p.shape for n, p in model.state_dict().items()}
    classes = [type(m) for m in model.modules()]
    heads = [(s.w_q().detach().clone(), s.w_k().detach().clone()) for s in sites.find(model)]
    with torch.no_grad():
        expected = model(**inputs)[0]
        size = float(expected.abs().max())
        assert collapse_(model) is model
        assert [c["change"] for c in changes(model)] == ["collapse"]
        assert largest(model(**inputs)[0], expected) < TOLERANCE[dtype] * max(size, 1.0) * 10
        products = [p for n, p in model.named_parameters() if re.search(r"(query|q_proj)\.weight$", n)]
        for (w_q, w_k), found in zip(heads, products, strict=True):
            whole = (w_q.double() @ w_k.double().transpose(1, 2)).transpose(1, 2).reshape(found.shape)
            assert largest(found, whole.to(dtype)) < TOLERANCE[dtype]
        with pytest.raises(SurgeryError):
            collapse_(model)
        assert factorize_(model) is model
        assert largest(model(**inputs)[0], expected) < TOLERANCE[dtype] * max(size, 1.0) * 10
    assert {n: p.shape for n, p in model.state_dict().items()} == shapes
    assert [type(m) for m in model.modules()] == classes
    assert changes(model) == []
    for site in sites.find(model):
        w_q, w_k = with_bias(site.w_q().double(), site.b_q().double()), site.w_k().double()
        assert largest(w_q.transpose(1, 2) @ w_q, w_k.transpose(1, 2) @ w_k) < 1e3 * TOLERANCE[dtype]


@pytest.mark.parametrize("name", ["bert", "vit", "gpt2"])
def test_a_collapsed_model_is_saved_and_restored(name: str, tmp_path: Path) -> None:
    """Its record is in the config; `from_pretrained` of surgery builds it in, and it can be taken apart then."""
    model, inputs = hugging_face(name)
    with torch.no_grad():
        stock = model(**inputs)[0]
        collapse_(model)
        drawn(model, seed=5)
        expected = model(**inputs)[0]
        model.save_pretrained(tmp_path)
        again = from_pretrained(type(model), tmp_path, dtype=torch.float64)
        assert [c["change"] for c in changes(again)] == ["collapse"]
        assert torch.equal(again.eval()(**inputs)[0], expected)
        assert largest(expected, stock) > 1e-3
        factorize_(again, truncate=True)
        assert {n: p.shape for n, p in again.named_parameters()} == {
            n: p.shape for n, p in hugging_face(name)[0].named_parameters()
        }


def test_a_collapsed_decoder_generates_with_its_cache() -> None:
    transformers = pytest.importorskip("transformers")
    truth.quiet()
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=41, n_embd=24, n_head=3, n_layer=2, n_positions=23, initializer_range=0.3,
        eos_token_id=0, bos_token_id=0,
    )  # fmt: skip
    model = transformers.GPT2LMHeadModel(config).double().eval()
    start = torch.tensor([[3, 7, 11]])
    expected = model.generate(start, max_new_tokens=9, do_sample=False)
    collapse_(model)
    assert torch.equal(model.generate(start, max_new_tokens=9, do_sample=False), expected)
    assert torch.equal(model.generate(start, max_new_tokens=9, do_sample=False, use_cache=False), expected)


def test_a_collapsed_model_that_was_trained_has_a_higher_rank_and_nothing_is_changed() -> None:
    model, inputs = hugging_face("bert")
    collapse_(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(**inputs)[0].square().mean().backward()
    optimizer.step()
    with torch.no_grad():
        after = model(**inputs)[0]
        with pytest.raises(SurgeryError, match=r"attention\.self: .*rank above.*truncate"):
            factorize_(model)
        assert torch.equal(model(**inputs)[0], after)
        factorize_(model, truncate=True)
        assert 1e-6 < largest(model(**inputs)[0], after) < 1.0


# ---- what cannot be done -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("llama", r"rotary embedding turns queries and keys"),
        ("gpt_neox", r"rotary embedding"),
        ("qwen3, bidirectional", r"norms queries and keys|rotary"),
        ("t5", r"not known to take heads of another width"),
    ],
)
def test_models_whose_score_is_no_form_of_the_input_are_refused(name: str, reason: str) -> None:
    model, _ = hugging_face(name)
    before = {n: p.clone() for n, p in model.state_dict().items()}
    with pytest.raises(SurgeryError, match=rf"\.\d+\..*cannot be collapsed: .*({reason})"):
        collapse_(model)
    assert changes(model) == []
    assert all(torch.equal(before[n], p) for n, p in model.state_dict().items())


def test_norms_on_queries_grouped_keys_and_split_weights_are_refused() -> None:
    model, _ = hugging_face("gpt2")
    site = sites.find(model)[0]
    assert plan(model, site).keys() == {"fused", "o"}
    for facts, reason in (
        ({"flags": ("qk_norm",)}, "no linear map"),
        ({"n_kv_heads": 1}, "keys are grouped"),
    ):
        with pytest.raises(SurgeryError, match=rf"h\.0\.attn: cannot be collapsed: .*{reason}"):
            plan(model, replace(site, layer=replace(site.layer, **facts)))
    param_groups(model, lr=1e-3, qk_lr_ratio=2.0)
    with pytest.raises(SurgeryError, match=r"h\.0\.attn: .*unsplit_"):
        collapse_(model)
    collapse_(unsplit_(model))
    model, _ = hugging_face("gpt2")
    model.h[1].attn.scaling = None  # then its kernel would take the scale from the new width
    with pytest.raises(SurgeryError, match=r"h\.1\.attn: .*another width"):
        collapse_(model)
    assert model.h[0].attn.c_attn.weight.shape[1] == 3 * model.config.n_embd


def test_what_else_is_refused() -> None:
    with pytest.raises(SurgeryError, match="no attention that can be collapsed"):
        collapse_(nn.Linear(3, 3))
    with pytest.raises(SurgeryError, match="no attention that can be collapsed"):
        collapse_(CircuitAttention(8, 2))
    with pytest.raises(SurgeryError, match="collapse_ it first"):
        factorize_(nn.Linear(3, 3))
    with pytest.raises(SurgeryError, match="add_bias_kv"):
        collapse_(nn.MultiheadAttention(8, 2, add_bias_kv=True))
    with pytest.raises(SurgeryError, match=r"1,024 parameters.*max_parameters=1,000"):
        collapse_(nn.MultiheadAttention(16, 2), max_parameters=1_000)
    with pytest.raises(SurgeryError, match="rank 3 does not fit"):
        factorize_(collapse_(nn.MultiheadAttention(8, 2)), rank=3)
    with pytest.raises(SurgeryError, match="qk is 'free'"):
        CircuitAttention(8, 2, qk="free")  # type: ignore[arg-type]
    with pytest.raises(SurgeryError, match="8 is not a multiple of 3 heads"):
        CircuitAttention(8, 3)
