"""Decoupled nn.MultiheadAttention: the score is the changed one, and everything else is as it was."""

from __future__ import annotations

import copy
import io
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

import qkform as qk
from qkform import sites
from qkform.errors import AttentionError, SurgeryError
from qkform.surgery import mha, record
from qkform.surgery.regression import STRENGTHS
from qkform.surgery.self_score import SelfScore

BATCH, LENGTH, WIDTH, HEADS = 3, 7, 12, 4


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


def decoupled(module: nn.Module, scale: float = 1.0) -> Any:
    """The module decoupled, with random v and random biases, so that no term is zero by chance."""
    with torch.no_grad():
        for name, value in module.named_parameters():
            if "bias" in name:
                value.normal_()
    qk.surgery.decouple_(module)
    with torch.no_grad():
        for name, value in module.named_parameters():
            if name.endswith("self_score.v"):
                value.normal_().mul_(scale)
    return module


def attention(**options: Any) -> Any:
    options = {"batch_first": True, "dtype": torch.float64, **options}
    return decoupled(nn.MultiheadAttention(WIDTH, HEADS, **options))


def inputs(length: int = LENGTH, **options: Any) -> Tensor:
    return torch.randn(BATCH, length, WIDTH, **{"dtype": torch.float64, **options})


def additive(mask: Tensor | None) -> Tensor | float:
    if mask is None or mask.is_floating_point():
        return 0.0 if mask is None else mask
    return torch.zeros(mask.shape, dtype=torch.float64).masked_fill(mask, -math.inf)


def expected(
    m: Any, x: Tensor, value: Tensor | None = None, padding: Tensor | None = None, mask: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Output (B, N, d) and weights (B, H, N, M) from the parameters, head by head, token by token."""
    value = x if value is None else value
    w_q, w_k, w_v = (
        m.in_proj_weight.chunk(3)
        if m.in_proj_weight is not None
        else (m.q_proj_weight, m.k_proj_weight, m.v_proj_weight)
    )
    b_q, b_k, b_v = m.in_proj_bias.chunk(3) if m.in_proj_bias is not None else (0.0, 0.0, 0.0)
    q, k, v = x @ w_q.T + b_q, x @ w_k.T + b_k, value @ w_v.T + b_v
    if m.bias_k is not None:
        k = torch.cat([k, m.bias_k.expand(len(x), 1, -1)], 1)
        v = torch.cat([v, m.bias_v.expand(len(x), 1, -1)], 1)
    if m.add_zero_attn:
        k, v = (torch.cat([t, torch.zeros_like(t[:, :1])], 1) for t in (k, v))
    batch, n, width = x.shape
    d = width // m.num_heads
    out = torch.zeros(batch, n, width, dtype=x.dtype)
    weights = torch.zeros(batch, m.num_heads, n, k.shape[1], dtype=x.dtype)
    extra = k.shape[1] - n
    for b in range(batch):
        for h in range(m.num_heads):
            of = slice(h * d, (h + 1) * d)
            scores = q[b, :, of] @ k[b, :, of].T
            own = torch.stack([(m.self_score.v[h] * token**2).sum() for token in x[b]])
            scores = torch.where(torch.eye(n, n + extra, dtype=torch.bool), own[:, None], scores) / math.sqrt(
                d
            )
            bias = torch.zeros(n, n, dtype=x.dtype)
            if mask is not None:
                bias = bias + additive(mask if mask.dim() == 2 else mask[b * m.num_heads + h])
            if padding is not None:
                bias = bias + additive(padding[b])
            row = (scores + nn.functional.pad(bias, (0, extra))).softmax(-1).nan_to_num(0.0)
            weights[b, h], out[b, :, of] = row, row @ v[b, :, of]
    return out @ m.out_proj.weight.T + (0.0 if m.out_proj.bias is None else m.out_proj.bias), weights


def close(one: Tensor, other: Tensor, tolerance: float = 1e-12) -> None:
    torch.testing.assert_close(one, other, rtol=0, atol=tolerance)


PADDING = torch.arange(LENGTH) >= torch.tensor([LENGTH, 4, 1])[:, None]
CAUSAL = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)
MASKS = {
    "none": lambda: None,
    "bool 2-D": lambda: CAUSAL,
    "float 2-D": lambda: torch.randn(LENGTH, LENGTH, dtype=torch.float64).masked_fill(CAUSAL, -math.inf),
    "bool 3-D": lambda: torch.rand(BATCH * HEADS, LENGTH, LENGTH) < 0.4,
    "float 3-D": lambda: torch.randn(BATCH * HEADS, LENGTH, LENGTH, dtype=torch.float64),
}
PADDINGS = {
    "none": lambda: None,
    "bool": lambda: PADDING,
    "float": lambda: torch.randn(BATCH, LENGTH, dtype=torch.float64).masked_fill(PADDING, -math.inf),
}
KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "no bias": {"bias": False},
    "other values": {"vdim": 5},
    "bias_kv": {"add_bias_kv": True},
    "zero attention": {"add_zero_attn": True},
    "both": {"add_bias_kv": True, "add_zero_attn": True},
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("padding", PADDINGS)
def test_the_module_computes_the_changed_attention(kind: str, mask: str, padding: str) -> None:
    m = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True, dtype=torch.float64, **KINDS[kind])
    m.self_score = SelfScore(HEADS, WIDTH, dtype=torch.float64)
    (site,) = sites.find(m)
    mha.attach(site, m.self_score)
    for value in m.parameters():
        nn.init.normal_(value)
    x, attn_mask, pad = inputs(), MASKS[mask](), PADDINGS[padding]()
    value = inputs()[..., :5] if kind == "other values" else x
    out, weights = expected(m, x, value, pad, attn_mask)
    for need in (True, False):
        got, seen = m(x, x, value, pad, need, attn_mask, average_attn_weights=False)
        close(got, out)
        assert (seen is not None) == need
        if need:
            close(seen, weights)
    close(m(x, x, value, pad, True, attn_mask)[1], weights.mean(1))


def test_gradients_are_those_of_the_definition() -> None:
    m, x, mask = attention(add_bias_kv=True), inputs().requires_grad_(), MASKS["float 2-D"]().requires_grad_()
    wanted = [x, mask, *m.parameters()]
    toward = torch.randn(BATCH, LENGTH, WIDTH, dtype=torch.float64)
    both = [expected(m, x, padding=PADDING, mask=mask)[0], m(x, x, x, PADDING, False, mask)[0]]
    for one, other in zip(*(torch.autograd.grad(out, wanted, toward) for out in both), strict=True):
        close(one, other, 1e-11)


def test_layouts_differ_in_order_alone() -> None:
    m, x, mask = attention(), inputs(), MASKS["float 3-D"]()
    out, weights = m(x, x, x, PADDING, attn_mask=mask)
    m.batch_first = False
    y = x.transpose(0, 1)
    turned, same = m(y, y, y, PADDING, attn_mask=mask)
    close(turned.transpose(0, 1), out)
    close(same, weights)
    for first in (True, False):
        m.batch_first = first
        for b in range(BATCH):
            one, seen = m(x[b], x[b], x[b], PADDING[b], attn_mask=mask[b * HEADS : (b + 1) * HEADS])
            close(one, out[b])
            close(seen, weights[b])


def test_a_causal_hint_changes_nothing_but_speed() -> None:
    x = inputs()
    for options in ({}, {"add_bias_kv": True}):
        m = attention(**options)
        out, _ = m(x, x, x, need_weights=False, attn_mask=CAUSAL)
        for padding in (None, PADDING):
            for need in (True, False):
                hinted, _ = m(x, x, x, padding, need, CAUSAL, is_causal=True)
                close(hinted, m(x, x, x, padding, need, CAUSAL)[0])
        close(m(x, x, x, need_weights=False, attn_mask=CAUSAL, is_causal=True)[0], out)


def test_a_wrong_hint_counts_where_torch_would_count_it() -> None:
    """The mask is read where nn.MultiheadAttention reads it: with padding, or where weights are asked for."""
    m, x = attention(), inputs()
    for mask in (MASKS["float 2-D"](), MASKS["bool 3-D"]()):
        for padding, need in ((PADDING, False), (None, True)):
            close(m(x, x, x, padding, need, mask, is_causal=True)[0], m(x, x, x, padding, need, mask)[0])
        close(m(x, x, x, None, False, mask, is_causal=True)[0], m(x, x, x, None, False, CAUSAL)[0])


@pytest.mark.parametrize("shape", [(1, 1), (2, 1), (0, 5)])
def test_small_batches(shape: tuple[int, int]) -> None:
    m, x = attention(), torch.randn(*shape, WIDTH, dtype=torch.float64)
    mask = torch.zeros(shape[1], shape[1]).masked_fill(CAUSAL[: shape[1], : shape[1]], -math.inf)
    for need in (True, False):
        for hint in (True, False):
            close(m(x, x, x, None, need, mask, is_causal=hint)[0], expected(m, x, mask=mask)[0])


def test_future_tokens_cannot_change_past_outputs() -> None:
    m, x = attention(), inputs()
    other = x.clone()
    other[:, 4:] = torch.randn_like(other[:, 4:])
    for is_causal in (True, False):
        one, two = (
            m(t, t, t, attn_mask=CAUSAL, is_causal=is_causal, need_weights=False)[0] for t in (x, other)
        )
        close(one[:, :4], two[:, :4])
        assert not torch.allclose(one[:, 4:], two[:, 4:])


def test_a_token_with_nothing_to_attend_to_gets_the_bias_of_the_output() -> None:
    m, x = attention(), inputs().requires_grad_()
    nowhere = torch.zeros(BATCH, LENGTH, dtype=torch.bool)
    nowhere[1] = True
    for need in (True, False):
        out, weights = m(x, x, x, nowhere, need)
        close(out[1], m.out_proj.bias.expand(LENGTH, -1))
        assert weights is None or bool((weights[1] == 0).all())
        (gradient,) = torch.autograd.grad(out.sum(), x)
        assert bool((gradient[1] == 0).all())
        assert bool(gradient.isfinite().all())


def test_dropout_falls_on_the_weights_that_are_returned() -> None:
    with pytest.warns(UserWarning, match="attention dropout 0.4"):
        m, x = attention(dropout=0.4).train(), inputs()
    out, weights = m(x, x, x, average_attn_weights=False)
    assert bool((weights == 0).any())
    v = (
        (x @ m.in_proj_weight.chunk(3)[2].T + m.in_proj_bias.chunk(3)[2])
        .unflatten(-1, (HEADS, -1))
        .transpose(1, 2)
    )
    close(out, m.out_proj((weights @ v).transpose(1, 2).flatten(2)))
    assert not torch.allclose(m(x, x, x, need_weights=False)[0], m(x, x, x, need_weights=False)[0])
    m.eval()
    close(m(x, x, x, need_weights=False)[0], expected(m, x)[0])


def test_the_old_self_score_gives_the_old_output() -> None:
    """One key: the weight is 1 whatever v is. And with v fitted to one token's own score, that of the stock module."""
    m = attention()
    x = inputs(1)
    stock = copy.deepcopy(m)
    qk.surgery.recouple_(stock)
    close(m(x, x, x)[0], stock(x, x, x)[0])
    x = torch.zeros(1, LENGTH, WIDTH, dtype=torch.float64)
    x[0, torch.arange(LENGTH), torch.arange(LENGTH)] = torch.randn(
        LENGTH, dtype=torch.float64
    )  # one feature each
    with torch.no_grad():
        for each in (m, stock):
            each.in_proj_bias.zero_()
        w_q, w_k, _ = m.in_proj_weight.unflatten(0, (3, HEADS, -1))
        m.self_score.v.copy_((w_q * w_k).sum(1))  # diag(W_Q W_K^T)
    close(m(x, x, x)[0], stock(x, x, x)[0])


# ---- calls that it refuses ---------------------------------------------------------------------------------


def test_cross_attention_is_refused_and_equal_inputs_are_not() -> None:
    m, x = decoupled(layer(dtype=torch.float64)).self_attn, inputs()
    out, _ = m(x, x, x)
    close(m(x, x.clone(), x.clone())[0], out)
    close(m(x, x, x + 1)[0] - out, (m.in_proj_weight.chunk(3)[2].sum(1) @ m.out_proj.weight.T).expand_as(out))
    with pytest.raises(SurgeryError, match=r"^self_attn .* is not the query.*recouple_"):
        m(x, x + 1, x)
    with pytest.raises(SurgeryError, match=r"\(3, 5, 12\), is not the query, \(3, 7, 12\)"):
        m(x, x[:, :5], x[:, :5])


def test_wrong_masks_are_named() -> None:
    m, x = attention(), inputs()
    with pytest.raises(
        AttentionError, match=r"attn_mask has shape \(2, 7, 7\); expected \(7, 7\) or \(12, 7, 7\)"
    ):
        m(x, x, x, attn_mask=torch.zeros(2, 7, 7))
    with pytest.raises(AttentionError, match=r"key_padding_mask has shape \(7,\); expected \(3, 7\)"):
        m(x, x, x, key_padding_mask=PADDING[0])
    with pytest.raises(AttentionError, match=r"holds torch.int64; expected bool"):
        m(x, x, x, key_padding_mask=PADDING.long())
    with pytest.raises(AttentionError, match="is_causal is a hint about attn_mask"):
        m(x, x, x, is_causal=True)
    with pytest.raises(AttentionError, match=r"shape \(1, 3, 7, 12\); expected two dimensions"):
        m(x[None], x[None], x[None])


# ---- nn.TransformerEncoderLayer and the rest of torch's stacks ----------------------------------------------


def layer(**options: Any) -> Any:
    options = {"batch_first": True, "dropout": 0.0, **options}
    return nn.TransformerEncoderLayer(WIDTH, HEADS, 16, **options)


def encoder(depth: int = 2, **options: Any) -> Any:
    return nn.TransformerEncoder(layer(**options), depth)


@pytest.mark.filterwarnings(
    "ignore:The PyTorch API of nested tensors"
)  # of the stock encoder, at its first use
@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("padding", [None, PADDING])
@pytest.mark.parametrize("guard", [torch.no_grad, torch.inference_mode])
def test_eval_equals_train(norm_first: bool, padding: Tensor | None, guard: Any) -> None:
    stack = nn.TransformerEncoder(layer(norm_first=norm_first), 2, enable_nested_tensor=not norm_first)
    stock = copy.deepcopy(stack).eval()
    model, x = decoupled(stack), inputs(dtype=torch.float32)
    trained = model.train()(x, src_key_padding_mask=padding)
    with guard():
        close(model.eval()(x, src_key_padding_mask=padding), trained, 1e-5)
        assert not torch.allclose(stock(x, src_key_padding_mask=padding), trained, atol=1e-2)
        one = model.layers[0](x, src_key_padding_mask=padding)
    close(one, model.layers[0].train()(x, src_key_padding_mask=padding), 1e-5)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_fast_paths_are_off_and_come_back(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []

    def noted(name: str, real: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            calls.append(name)
            return real(*args, **kwargs)

        return call

    for name in (
        "_transformer_encoder_layer_fwd",
        "_native_multi_head_attention",
        "_nested_tensor_from_mask",
    ):
        monkeypatch.setattr(torch, name, noted(name, getattr(torch, name)))
    model, x = encoder().eval(), inputs(dtype=torch.float32)

    def run() -> Tensor:
        calls.clear()
        with torch.no_grad():
            out: Tensor = model(x, src_key_padding_mask=PADDING)
            model.layers[0](x)
            model.layers[0].self_attn(x, x, x)
        return out

    before = run()
    assert set(calls) == {
        "_transformer_encoder_layer_fwd",
        "_native_multi_head_attention",
        "_nested_tensor_from_mask",
    }
    state = {name: value.clone() for name, value in model.state_dict().items()}
    attributes = {path: set(vars(m)) for path, m in model.named_modules()}
    qk.surgery.decouple_(model)
    run()
    assert calls == []
    qk.surgery.recouple_(model)
    assert torch.equal(run(), before)
    assert len(set(calls)) == 3
    assert {path: set(vars(m)) for path, m in model.named_modules()} == attributes
    assert state.keys() == model.state_dict().keys()


def test_a_stack_of_copies_of_a_decoupled_layer() -> None:
    one = decoupled(layer())
    with pytest.warns(UserWarning, match="enable_nested_tensor is True"):
        stack = nn.TransformerEncoder(one, 3).eval()
    x = inputs(dtype=torch.float32)
    with torch.no_grad():
        stack.layers[1].self_attn.self_score.v.zero_()
        out = x
        for each in stack.layers:
            out = each.norm1(out + expected(each.self_attn.double(), out.double())[0].float())
            out = each.norm2(out + each.linear2(each.linear1(out).relu()))
            each.self_attn.float()
        close(stack(x), out, 1e-5)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_a_decoupled_layer_in_a_stack_that_nests() -> None:
    """Surgery on a layer alone does not see the encoder around it, which then hands over nested tensors."""
    stack, x = encoder(3).eval(), inputs(dtype=torch.float32)
    decoupled(stack.layers[0])
    decoupled(stack.layers[2])
    assert stack.use_nested_tensor
    with torch.no_grad():
        nested = stack(x, src_key_padding_mask=PADDING)
        stack.use_nested_tensor = False
        plain = stack(x, src_key_padding_mask=PADDING)
    close(nested, plain.masked_fill(PADDING[..., None], 0.0), 1e-5)


def test_a_decoder_keeps_its_cross_attention() -> None:
    decoder = nn.TransformerDecoderLayer(WIDTH, HEADS, 16, dropout=0.0, batch_first=True, dtype=torch.float64)
    stock, model = copy.deepcopy(decoder), decoupled(decoder)
    assert type(model.multihead_attn) is nn.MultiheadAttention
    assert [n for n in model.state_dict() if n not in stock.state_dict()] == ["self_attn.self_score.v"]
    x, memory = inputs(), inputs(5)
    out = model(x, memory, tgt_mask=CAUSAL, tgt_is_causal=True)
    first = model.norm1(x + expected(model.self_attn, x, mask=CAUSAL)[0])
    second = model.norm2(first + model.multihead_attn(first, memory, memory, need_weights=False)[0])
    close(out, model.norm3(second + model.linear2(model.linear1(second).relu())))


# ---- what is done with a module ----------------------------------------------------------------------------


def test_copies_pickles_and_state_dicts() -> None:
    model, x = decoupled(encoder()).eval(), inputs(dtype=torch.float32)
    out = model(x, src_key_padding_mask=PADDING)
    copied = copy.deepcopy(model)
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    pickled = torch.load(buffer, weights_only=False)
    fresh = qk.surgery.decouple_(encoder(), init="zero").eval()
    fresh.load_state_dict(model.state_dict())
    for other in (copied, pickled, fresh):
        assert torch.equal(other(x, src_key_padding_mask=PADDING), out)
        with torch.no_grad():
            other.layers[1].self_attn.self_score.v.zero_()
        assert not torch.equal(other(x, src_key_padding_mask=PADDING), out)
        qk.surgery.recouple_(other)
        assert type(other.layers[0].self_attn) is nn.MultiheadAttention
    assert torch.equal(model(x, src_key_padding_mask=PADDING), out)


def test_a_changed_module_says_so() -> None:
    assert "ChangedMultiheadAttention(\n  kind='decoupled'" in repr(attention())
    model = torch.func.functional_call
    m, x = attention(), inputs()
    state = {name: 2 * value for name, value in m.named_parameters()}
    out = model(m, state, (x, x, x))[0]
    with torch.no_grad():
        for value in m.parameters():
            value.mul_(2)
    close(out, m(x, x, x)[0])


def test_a_state_dict_without_v_or_of_another_shape_is_refused() -> None:
    model = decoupled(encoder())
    state = model.state_dict()
    with pytest.raises(RuntimeError, match=r"Missing key.*layers\.0\.self_attn\.self_score\.v"):
        model.load_state_dict({n: v for n, v in state.items() if not n.endswith("self_score.v")})
    state["layers.1.self_attn.self_score.v"] = torch.zeros(HEADS, WIDTH + 1)
    with pytest.raises(RuntimeError, match=r"size mismatch for layers\.1\.self_attn\.self_score\.v"):
        model.load_state_dict(state)


def test_attaching_refuses_before_it_changes_anything() -> None:
    class Own(nn.MultiheadAttention):
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            return super().forward(*args, **kwargs)

    def refusal(module: nn.Module, text: str, score: SelfScore | None = None) -> None:
        before, kind = set(vars(module)), type(module)
        (site,) = sites.find(module)
        with pytest.raises(SurgeryError, match=text):
            mha.attach(site, score or SelfScore(HEADS, WIDTH))
        assert (set(vars(module)), type(module)) == (before, kind)

    refusal(Own(WIDTH, HEADS), "Own with a forward of its own")
    refusal(nn.MultiheadAttention(WIDTH, HEADS, kdim=5), "width 5 for queries of width 12: cross-attention")
    wrong = SelfScore(HEADS, WIDTH + 1)
    refusal(nn.MultiheadAttention(WIDTH, HEADS), r"v of shape \(4, 13\); expected \(4, 12\)", wrong)
    refusal(attention(), "changed already")
    (site,) = sites.find(nn.MultiheadAttention(WIDTH, HEADS))
    with pytest.raises(SurgeryError, match="is a MultiheadAttention; expected an attention that was changed"):
        mha.detach(site)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("autocast", [False, True])
def test_low_precision_stays_near(dtype: torch.dtype, autocast: bool) -> None:
    m, x = attention(), inputs()
    out, _ = expected(m, x, padding=PADDING, mask=CAUSAL)
    kept = torch.float32 if autocast else dtype
    m, x = m.to(kept), x.to(kept)
    for need in (True, False):
        with torch.autocast("cpu", dtype=dtype, enabled=autocast):
            low, weights = m(x, x, x, PADDING, need, CAUSAL)
        assert low.dtype == dtype
        assert weights is None or weights.shape == (BATCH, LENGTH, LENGTH)
        error = (low.double() - out).abs().max() / out.abs().max()
        assert error < 0.03


# of torch's own compiler, when it is first imported
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_compiled_equals_eager(backend: str) -> None:
    model, x = decoupled(encoder()).train(), inputs(dtype=torch.float32)
    compiled = torch.compile(model, fullgraph=True, backend=backend)
    for padding in (None, PADDING):
        one, other = (each(x, src_key_padding_mask=padding, is_causal=False) for each in (model, compiled))
        close(one, other, 1e-5)
        grads = [torch.autograd.grad(out.square().sum(), list(model.parameters())) for out in (one, other)]
        for mine, theirs in zip(*grads, strict=True):
            close(mine, theirs, 1e-4)


def test_gradients_per_sample_are_those_of_single_calls() -> None:
    m, x = attention(), inputs()
    parameters = dict(m.named_parameters())

    def loss(parameters: dict[str, Tensor], token: Tensor) -> Tensor:
        call = torch.func.functional_call(m, parameters, (token, token, token), {"need_weights": False})
        out: Tensor = call[0].square().sum()
        return out

    together = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(parameters, x)
    for i, sample in enumerate(x):
        alone = torch.autograd.grad(loss(parameters, sample), list(parameters.values()))
        for name, value in zip(parameters, alone, strict=True):
            close(together[name][i], value, 1e-11)


def test_exported_equals_eager() -> None:
    model, x = decoupled(encoder()).eval(), inputs(dtype=torch.float32)
    exported = torch.export.export(model, (x,), {"src_key_padding_mask": PADDING}, strict=False)
    close(exported.module()(x, src_key_padding_mask=PADDING), model(x, src_key_padding_mask=PADDING), 1e-6)


@pytest.mark.parametrize("reentrant", [True, False])
def test_gradient_checkpointing_gives_the_same_gradients(reentrant: bool) -> None:
    m, x = attention(), inputs()
    plain = torch.autograd.grad(m(x, x, x, need_weights=False)[0].square().sum(), list(m.parameters()))

    def run(t: Tensor) -> Tensor:
        out: Tensor = m(t, t, t, need_weights=False)[0]
        return out

    out = torch.utils.checkpoint.checkpoint(run, x.clone().requires_grad_(), use_reentrant=reentrant)
    out.square().sum().backward()
    for one, value in zip(plain, m.parameters(), strict=True):
        close(one, value.grad)


def test_parametrized_weights() -> None:
    class Twice(nn.Module):
        def forward(self, weight: Tensor) -> Tensor:
            return 2 * weight

    m, x = attention(), inputs()
    parametrize.register_parametrization(m, "in_proj_weight", Twice())
    close(m(x, x, x)[0], expected(m, x)[0])
    with pytest.raises(SurgeryError, match="has parametrized weights; undo that first"):
        qk.surgery.recouple_(m)
    close(m(x, x, x)[0], expected(m, x)[0])
    parametrize.remove_parametrizations(m, "in_proj_weight")
    close(m(x, x, x)[0], expected(m, x)[0])
    qk.surgery.recouple_(m)
    parametrize.register_parametrization(m, "in_proj_weight", Twice())
    with pytest.raises(SurgeryError, match="change its attention first, then parametrize"):
        qk.surgery.decouple_(m)


def test_split_weights_train_apart() -> None:
    model, x = decoupled(encoder()), inputs(dtype=torch.float32)
    before = model(x, src_key_padding_mask=PADDING)
    groups = qk.surgery.param_groups(model, lr=0.1, qk_lr_ratio=4.0, self_score_lr_ratio=2.0)
    assert torch.equal(model(x, src_key_padding_mask=PADDING), before)
    before.square().sum().backward()
    torch.optim.SGD(groups).step()
    trained = model(x, src_key_padding_mask=PADDING)
    assert not torch.allclose(trained, before, atol=1e-2)
    with torch.inference_mode():
        close(model.eval()(x, src_key_padding_mask=PADDING), trained, 1e-5)
    with pytest.raises(SurgeryError, match=r"undo that first \(`unsplit_` for param_groups\)"):
        qk.surgery.recouple_(model)
    qk.surgery.unsplit_(model)
    with torch.inference_mode():
        close(model(x, src_key_padding_mask=PADDING), trained, 1e-5)
    qk.surgery.recouple_(model)


def test_an_encoder_and_a_decoder() -> None:
    with pytest.warns(UserWarning, match="norm_first was True"):
        model = nn.Transformer(WIDTH, HEADS, 1, 2, 16, dropout=0.0, batch_first=True, norm_first=True)
    stock, model = copy.deepcopy(model), decoupled(model)
    assert sorted(n for n in model.state_dict() if n not in stock.state_dict()) == [
        "decoder.layers.0.self_attn.self_score.v",
        "decoder.layers.1.self_attn.self_score.v",
        "encoder.layers.0.self_attn.self_score.v",
    ]
    x, y = inputs(dtype=torch.float32), inputs(5, dtype=torch.float32)
    causal = torch.zeros(5, 5).masked_fill(CAUSAL[:5, :5], -math.inf)
    masks = {"src_key_padding_mask": PADDING, "memory_key_padding_mask": PADDING, "tgt_mask": causal}
    trained = model(x, y, **masks)
    with torch.inference_mode():
        close(model.eval()(x, y, **masks), trained, 1e-5)
        assert not torch.allclose(stock.eval()(x, y, **masks), trained, atol=1e-2)
    for gradient in torch.autograd.grad(trained.sum(), list(model.parameters())):
        assert bool(gradient.isfinite().all())


@pytest.mark.parametrize("batch_first", [True, False])
def test_a_fit_is_the_regression_of_the_old_self_scores(batch_first: bool) -> None:
    model, x = layer(dtype=torch.float64, batch_first=batch_first, norm_first=True), inputs()
    nn.init.normal_(model.self_attn.in_proj_bias)
    stock, m = copy.deepcopy(model), model.self_attn
    batch = {"src": x if batch_first else x.transpose(0, 1), "src_key_padding_mask": PADDING}
    with pytest.warns(UserWarning, match="12 tokens for 12 features"):
        qk.surgery.decouple_(model, init="fit", batch=batch)
    seen = model.norm1(x)[~PADDING]  # (tokens, d)
    q, k, _ = (seen @ m.in_proj_weight.T + m.in_proj_bias).unflatten(-1, (3, HEADS, -1)).unbind(1)
    squares, own = seen.square(), (q * k).sum(-1)  # (tokens, d), (tokens, H)
    normal = squares.T @ squares
    fits = [
        torch.linalg.solve(normal + strength * torch.diag(normal.diagonal()), squares.T @ own).T.detach()
        for strength in STRENGTHS
    ]
    for head, v in enumerate(m.self_score.v.detach()):  # every head has the penalty that serves it best
        assert min(float((v - each[head]).norm() / v.norm()) for each in fits) < 1e-6
    assert len(record.done(model, "decouple")["r2"][0]) == HEADS
    qk.surgery.recouple_(model)
    assert vars(m).keys() == vars(stock.self_attn).keys()


def test_a_fit_sees_what_every_layer_of_the_model_saw_before() -> None:
    model, x = encoder(dtype=torch.float64).eval(), inputs(70)
    for module in model.layers:
        nn.init.normal_(module.self_attn.in_proj_weight, std=0.5)
        nn.init.normal_(module.self_attn.in_proj_bias)
    stock, seen = copy.deepcopy(model), []
    last = stock.layers[-1].self_attn
    last.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    stock.train()(x)  # not by the fast path, which calls no module; there is no dropout
    qk.surgery.decouple_(model, init="fit", batch={"src": x})
    lone = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True, dtype=torch.float64)
    lone.load_state_dict(last.state_dict())
    # The fit of the layer by itself, on what it saw in the stock model.
    holder = nn.ModuleDict({"attention": lone})
    holder.forward = lambda x: lone(x, x, x)[0]
    qk.surgery.decouple_(holder, init="fit", batch={"x": seen[0]})
    close(model.layers[-1].self_attn.self_score.v, lone.self_score.v, 1e-9)


# ---- the relatives -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["plain", "both"])
@pytest.mark.parametrize("relative", ["exclusive", "no-diagonal"])
def test_relatives_take_the_same_place(kind: str, relative: str) -> None:
    m = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True, dtype=torch.float64, **KINDS[kind])
    for value in m.parameters():
        nn.init.normal_(value)
    (site,) = sites.find(m)
    x, mask = inputs(), CAUSAL
    weights = m(x, x, x, PADDING, attn_mask=mask, average_attn_weights=False)[1]
    before = m(x, x, x, PADDING, attn_mask=mask)
    mha.switch_on(site, relative)
    assert mha.switched(m) == relative
    with pytest.raises(SurgeryError, match="changed already"):
        mha.switch_on(site, relative)
    v = (
        (x @ m.in_proj_weight.chunk(3)[2].T + m.in_proj_bias.chunk(3)[2])
        .unflatten(-1, (HEADS, -1))
        .transpose(1, 2)
    )
    values = v
    if kind == "both":
        extra = m.bias_v.unflatten(-1, (HEADS, -1)).transpose(1, 2).expand(BATCH, -1, -1, -1)
        values = torch.cat([v, extra, torch.zeros_like(extra)], 2)
    if relative == "exclusive":
        y = weights @ values
        y = y - (y * v).sum(-1, keepdim=True) / v.square().sum(-1, keepdim=True) * v
    else:
        weights = weights.masked_fill(torch.eye(*weights.shape[2:], dtype=torch.bool), 0.0)
        weights = (weights / weights.sum(-1, keepdim=True)).nan_to_num(0.0)
        y = weights @ values
    for need in (True, False):
        out, seen = m(x, x, x, PADDING, need, mask, average_attn_weights=False)
        close(out, m.out_proj(y.transpose(1, 2).flatten(2)))
        if need:
            close(seen, weights)
    mha.switch_off(site)
    assert mha.switched(m) is None
    for one, other in zip(before, m(x, x, x, PADDING, attn_mask=mask), strict=True):
        assert torch.equal(one, other)
    with pytest.raises(
        SurgeryError, match="is no kind of attention; known: decoupled, exclusive, no-diagonal"
    ):
        mha.switch_on(site, "standard")  # type: ignore[arg-type]


def test_set_attention_in_a_stack() -> None:
    model, x = encoder().eval(), inputs(dtype=torch.float32)
    stock = copy.deepcopy(model)
    qk.surgery.set_attention_(model, "no-diagonal")
    assert not model.use_nested_tensor
    with torch.no_grad():
        out = model(x, src_key_padding_mask=PADDING)
        close(model.train()(x, src_key_padding_mask=PADDING), out, 1e-5)
        mask = torch.eye(LENGTH, dtype=torch.bool)
        close(stock.train()(x, mask=mask), model(x), 1e-5)
        assert not torch.allclose(stock(x), model(x), atol=1e-2)
    qk.surgery.set_attention_(model, "standard")
    assert model.use_nested_tensor
    assert type(model.layers[0].self_attn) is nn.MultiheadAttention
    assert torch.equal(model(x), stock(x))
