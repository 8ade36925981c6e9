"""`decompose`: the gradient of W_qk as a sum over pairs of tokens, held against autograd."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from qkform import dynamics, sites, surgery
from qkform.dynamics import Decomposition, decompose
from qkform.dynamics.capture import observe
from qkform.errors import DynamicsError, SourceError
from tests import test_decouple_families as families_
from tests import truth

transformers = pytest.importorskip("transformers")
truth.quiet()

families = pytest.mark.parametrize("family", families_.FAMILIES, ids=lambda family: family.name)
VOCABULARY = 31
BERT = {
    "vocab_size": VOCABULARY,
    "hidden_size": 15,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "intermediate_size": 11,
    "max_position_embeddings": 16,
}
GPT2 = {"vocab_size": VOCABULARY, "n_embd": 15, "n_layer": 2, "n_head": 3, "n_positions": 16}
VIT = {
    "hidden_size": 15,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "intermediate_size": 11,
    "image_size": 12,
    "patch_size": 4,
    "num_labels": 5,
}
LLAMA = {
    "vocab_size": VOCABULARY,
    "hidden_size": 18,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "intermediate_size": 11,
}
TOKENS = torch.randint(3, VOCABULARY, (3, 7), generator=torch.Generator().manual_seed(5))
PADDING = torch.tensor([[1] * 7, [1] * 4 + [0] * 3, [1] * 6 + [0]])  # 0 is padding


class Encoder(nn.Module):  # type: ignore[misc]
    """nn.TransformerEncoder with a readout, as people write it."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(15, 3, 11, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.readout = nn.Linear(15, VOCABULARY)

    def forward(self, x: Tensor, labels: Tensor, padding: Tensor | None = None) -> dict[str, Tensor]:
        logits = self.readout(self.encoder(x, src_key_padding_mask=padding))
        return {
            "loss": nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100)
        }


def labels() -> Tensor:
    return TOKENS.masked_fill(PADDING == 0, -100)


def built(name: str) -> tuple[Any, dict[str, Any]]:
    """A tiny model in float64 with weights that matter, biases among them, and a batch of it."""
    torch.manual_seed(0)
    text = {"input_ids": TOKENS, "attention_mask": PADDING, "labels": labels()}
    if name == "bert":
        model, batch = transformers.BertForMaskedLM(transformers.BertConfig(**BERT)), text
    elif name == "gpt2":
        model, batch = transformers.GPT2LMHeadModel(transformers.GPT2Config(**GPT2)), text
    elif name == "llama":
        model, batch = transformers.LlamaForCausalLM(transformers.LlamaConfig(**LLAMA)), text
    elif name == "vit":
        model = transformers.ViTForImageClassification(transformers.ViTConfig(**VIT))
        batch = {"pixel_values": torch.randn(3, 3, 12, 12).double(), "labels": torch.tensor([1, 4, 0])}
    else:
        model = Encoder()
        batch = {"x": torch.randn(3, 7, 15).double(), "labels": labels(), "padding": PADDING == 0}
    model = model.double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(0.4 * torch.randn_like(parameter) + (1.0 if parameter.ndim == 1 else 0.0))
    return model.eval(), batch


def gradients(model: Any, batch: dict[str, Any]) -> list[tuple[Tensor, Tensor]]:
    """dL/d[W_Q; b_Q] (n_heads, d_model + 1, d_head) and dL/d[W_K; b_K] of every self-attention, by autograd."""
    model = copy.deepcopy(model)
    model.zero_grad()
    output = model(**batch)
    output["loss"].backward()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(0.0 if parameter.grad is None else parameter.grad)
    return [
        (with_bias(site.w_q(), site.b_q()).detach(), with_bias(site.w_k(), site.b_k()).detach())
        for site in sites.find(model)
        if site.layer.attention == "self"
    ]


def with_bias(weight: Tensor, bias: Tensor | None) -> Tensor:
    bias = torch.zeros_like(weight[:, 0]) if bias is None else bias
    return torch.cat([weight, bias[:, None]], 1)


def close(found: Tensor, expected: Tensor, tolerance: float = 1e-10) -> None:
    assert found.shape == expected.shape
    error = ((found - expected).norm() / expected.norm()).item()
    assert error <= tolerance, f"relative error {error:.1e}"


@pytest.mark.parametrize("name", ["bert", "gpt2", "vit", "encoder"])
def test_gamma_gives_the_gradients_of_both_factors(name: str) -> None:
    model, batch = built(name)
    found = decompose(model, batch)
    expected = gradients(model, batch)
    assert [layer.module for layer in found] == [site.path for site in sites.find(model)]
    for layer, site, (query, key) in zip(found, sites.find(model), expected, strict=True):
        assert layer.direct
        w_q, w_k = with_bias(site.w_q(), site.b_q()), with_bias(site.w_k(), site.b_k())
        close(layer.extended() @ w_k, query)
        close(layer.extended().mT @ w_q, key)
        close(layer.gamma @ site.w_k(), query[:, :-1])  # rows of beta sum to 0: b_K does not matter


# ---- the oracle: a zero matrix dW added to the scores of an eager attention --------------------------------


class Oracle:
    """Attention with scale * x dW x^T added to the scores, as an implementation that transformers calls."""

    name = "qkform_tests_dw"

    def __init__(self, model: Any, scale: float | None) -> None:
        self.scale = scale
        self.x: dict[int, Tensor] = {}
        self.dw: dict[int, Tensor] = {}
        self.seen: dict[int, tuple[Tensor, Tensor]] = {}  # queries and keys as they enter
        for site in sites.find(model):
            if site.layer.attention == "self":
                h, d = site.layer.n_heads, site.layer.d_model
                self.dw[id(site.module)] = torch.zeros(h, d, d, dtype=torch.float64, requires_grad=True)
                site.shares["w_q"].at.owner.register_forward_pre_hook(self._reader(site.module))

    def _reader(self, module: Any) -> Any:
        def read(projection: Any, args: tuple[Any, ...]) -> None:
            self.x[id(module)] = args[0]

        return read

    def __call__(
        self, module, query, key, value, attention_mask, scaling=None, is_causal=None, **kwargs
    ) -> Any:
        groups = query.shape[1] // key.shape[1]
        n, m, scaling = query.shape[2], key.shape[2], query.shape[-1] ** -0.5 if scaling is None else scaling
        if query.requires_grad:
            query.retain_grad()
        self.seen[id(module)] = query, key.repeat_interleave(groups, 1)
        scores = scaling * query @ key.repeat_interleave(groups, 1).mT
        if id(module) in self.dw:
            x = self.x[id(module)]
            scale = query.shape[-1] ** -0.5 if self.scale is None else self.scale
            scores = scores + scale * torch.einsum("bid,hde,bje->bhij", x, self.dw[id(module)], x)
        if kwargs.get("position_bias") is not None:
            scores = scores + kwargs["position_bias"]
        if attention_mask is not None:
            scores = scores.masked_fill(~attention_mask, -torch.inf)
        elif (getattr(module, "is_causal", True) if is_causal is None else is_causal) and n > 1:
            scores = scores.masked_fill(torch.ones(n, m, dtype=torch.bool).triu(1), -torch.inf)
        weights = torch.where(scores.isneginf().all(-1, keepdim=True), 0.0, scores.softmax(-1))
        return (weights @ value.repeat_interleave(groups, 1)).transpose(1, 2), None


@contextmanager
def oracle_of(model: Any, scale: float | None = None) -> Iterator[tuple[Any, Oracle]]:
    """A copy of the model whose attention is the oracle's."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    model = copy.deepcopy(model)
    oracle = Oracle(model, scale)
    AttentionInterface.register(Oracle.name, oracle)
    AttentionMaskInterface.register(Oracle.name, sdpa_mask)
    try:
        model.set_attn_implementation(Oracle.name)
        yield model, oracle
    finally:
        del AttentionInterface._global_mapping[Oracle.name]
        del AttentionMaskInterface._global_mapping[Oracle.name]


def exact(model: Any) -> Any:
    """The model in float64; root mean square norms too, which families compute in float32 whatever the model is in."""
    for module in model.modules():
        if type(module).__name__.endswith("RMSNorm"):
            module.forward = partial(_rms_norm, module, 1.0 if "Gemma" in type(module).__name__ else 0.0)
    return model.double()


def _rms_norm(module: Any, offset: float, x: Tensor) -> Tensor:
    eps = getattr(module, "eps", getattr(module, "variance_epsilon", None))
    return (offset + module.weight) * x * (x.square().mean(-1, keepdim=True) + eps).rsqrt()


def square(output: Any) -> Tensor:
    return output.logits.square().mean()


def double(batch: dict[str, Any]) -> dict[str, Any]:
    return {k: v.double() if isinstance(v, Tensor) and v.is_floating_point() else v for k, v in batch.items()}


@families
def test_gamma_is_the_gradient_of_a_matrix_added_to_the_scores(family: families_.Family) -> None:
    model = exact(families_.built(family))
    batch = double(families_.inputs(family))
    if family.pads:
        batch["attention_mask"] = torch.ones(2, 9, dtype=torch.long)
        batch["attention_mask"][1, 6:] = 0
    found = decompose(model, batch, loss_fn=square)
    with oracle_of(model, family.scale) as (plain, oracle):
        square(plain(**batch)).backward()
        modules = {site.path: site.module for site in sites.find(plain) if site.layer.attention == "self"}
    assert [layer.module for layer in found] == list(modules)
    turned = family.name in (
        *("modernbert", "modernbert-decoder", "llama", "mistral", "qwen2", "qwen3", "gemma"),
        *("gpt-neox", "phi"),
    )
    for layer in found:
        close(layer.gamma, oracle.dw[id(modules[layer.module])].grad)
        assert layer.direct == (not turned)


@pytest.mark.parametrize("name", ["llama", "qwen3", "t5", "bert"])
def test_beta_is_what_moves_a_rotated_query(name: str) -> None:
    """dL/dq_i = sum_j beta_ij k_j, with keys as they meet the query; for norms on queries too, after them."""
    family = families_.BY_NAME[name]
    model, batch = exact(families_.built(family)), families_.inputs(family)
    found = decompose(model, batch, loss_fn=square, beta=True)
    with oracle_of(model, family.scale) as (plain, oracle):
        square(plain(**batch)).backward()
        modules = {site.path: site.module for site in sites.find(plain)}
    for layer in found:
        query, key = oracle.seen[id(modules[layer.module])]
        close(layer.beta @ key, query.grad)


@pytest.mark.parametrize("positions", ["rotary", "absolute"])
def test_queries_that_are_scaled_before_their_rotation(positions: str) -> None:
    """ESM multiplies its queries by 1 / sqrt(d_head) and says nothing of it."""
    settings = BERT | {
        "position_embedding_type": positions,
        "pad_token_id": 1,
        "mask_token_id": 2,
        "num_attention_heads": 3,
    }
    if positions == "rotary":
        settings |= {"hidden_size": 18}
    torch.manual_seed(0)
    model = transformers.EsmForMaskedLM(transformers.EsmConfig(**settings)).double().eval()
    batch = {"input_ids": TOKENS, "labels": labels()}
    found = decompose(model, batch)
    with oracle_of(model) as (plain, oracle):
        plain(**batch).loss.backward()
    for layer, expected in zip(found, oracle.dw.values(), strict=True):
        close(layer.gamma, expected.grad)
        assert layer.direct == (positions == "absolute")


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_padding_on_the_left(name: str) -> None:
    model, batch = built(name)
    padding = PADDING.flip(1)
    batch |= {"attention_mask": padding, "labels": TOKENS}  # labels on padded tokens too, which see nothing
    with oracle_of(model) as (plain, oracle):
        plain(**batch).loss.backward()
    for layer, expected in zip(decompose(model, batch, beta=True), oracle.dw.values(), strict=True):
        close(layer.gamma, expected.grad, 1e-6 if name == "llama" else 1e-10)  # its norms are in float32
        assert not layer.beta.masked_select((padding == 0)[:, None, None]).any()


def test_models_of_several_parts() -> None:
    text = {"vocab_size": VOCABULARY, "max_position_embeddings": 16, "eos_token_id": 2}
    sizes = {"num_hidden_layers": 1, "num_attention_heads": 3, "intermediate_size": 11}
    config = transformers.CLIPConfig(
        text_config=text | sizes | {"hidden_size": 12},
        vision_config=sizes | {"hidden_size": 15, "image_size": 12, "patch_size": 4},
        projection_dim=8,
    )
    torch.manual_seed(0)
    model = transformers.CLIPModel(config).double().eval()
    pixels = torch.randn(3, 3, 12, 12, dtype=torch.float64)
    batch = {"input_ids": TOKENS, "attention_mask": PADDING, "pixel_values": pixels, "return_loss": True}
    expected = dict(zip((site.path for site in sites.find(model)), gradients(model, batch), strict=True))
    found = decompose(model, batch)
    assert {layer.module for layer in found} == expected.keys()
    for layer in found:
        site = next(site for site in sites.find(model) if site.path == layer.module)
        close(layer.gamma @ site.w_k(), expected[layer.module][0][:, :-1])


# ---- what beta is ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["bert", "gpt2", "llama", "vit", "encoder"])
def test_rows_of_beta_sum_to_zero_and_masked_pairs_have_none(name: str) -> None:
    model, batch = built(name)
    for layer in decompose(model, batch, beta=True):
        beta = layer.beta
        assert beta is not None
        assert beta.abs().max() > 1e-6
        assert beta.sum(-1).abs().max() <= 1e-12
        assert beta.sum(-2).abs().max() > 1e-6
        if name != "vit":
            padded = (PADDING == 0)[:, None, None]
            assert not beta.masked_select(padded).any()
        if name in ("gpt2", "llama"):
            future = torch.ones(7, 7, dtype=torch.bool).triu(1)
            assert not beta.masked_select(future).any()
            assert not beta[:, :, 0].any()  # the first token has no choice


@pytest.mark.parametrize("name", ["bert", "llama", "encoder"])
def test_the_sums_are_those_of_the_pairs(name: str) -> None:
    """Pair by pair, as the formulas say: gamma, its parts, and what a token brings in both roles."""
    model, batch = built(name)
    seen: list[Tensor] = []
    sites_ = sites.find(model)
    at = sites_[1].shares["w_q"].at.owner
    handle = (sites_[1].module if name == "encoder" else at).register_forward_pre_hook(
        lambda module, args: seen.append(args[0].detach())
    )
    layer = decompose(model, batch, beta=True)[1]
    handle.remove()
    x, beta = seen[0], layer.beta
    assert beta is not None
    pairs = torch.einsum("bhij,bid,bje->bhijde", beta, x, x)
    own = torch.eye(7, dtype=torch.bool)[..., None, None]
    close(layer.gamma, pairs.sum((0, 2, 3)), 1e-12)
    close(layer.gamma_diagonal, (pairs * own).sum((0, 2, 3)), 1e-12)
    close(layer.gamma_off_diagonal, (pairs * ~own).sum((0, 2, 3)), 1e-12)
    close(layer.as_prediction, pairs.sum(3).flatten(3).norm(dim=-1), 1e-12)
    close(layer.as_context, pairs.sum(2).flatten(3).norm(dim=-1), 1e-12)
    close(layer.key_sum, torch.einsum("bhij,bjd->hd", beta, x), 1e-12)
    assert layer.query_sum.abs().max() <= 1e-12
    assert layer.total.abs().max() <= 1e-12
    skew = layer.gamma_diagonal - layer.gamma_diagonal.mT
    assert skew.abs().max() <= 1e-14 * layer.gamma_diagonal.abs().max()
    # the formulas of a form's scores, against those of the pairs
    gram = x[0] @ x[0].mT
    single = decompose(model, {k: v[:1] for k, v in batch.items()}, beta=True)[1]
    b = single.beta[0]
    trace, size = b @ gram @ b @ gram, b @ gram @ b.mT @ gram
    expected = trace.diagonal(0, -2, -1).sum(-1) / size.diagonal(0, -2, -1).sum(-1)
    close(single.form().symmetry(), expected)
    gamma = layer.gamma
    close(layer.row_energy(), layer.form().row_norms() ** 2)
    close(layer.column_energy(), layer.form().column_norms() ** 2)
    close(layer.row_energy().sum(-1), gamma.square().sum((1, 2)))


def test_one_causal_sequence_of_orthonormal_tokens_has_the_symmetry_of_its_diagonal() -> None:
    """E3: only i = j survives in tr(beta beta), whatever the data."""
    torch.manual_seed(3)
    attention = nn.MultiheadAttention(7, 1, bias=False, batch_first=True).double()
    model = Masked(attention)
    x = torch.linalg.qr(torch.randn(7, 7, dtype=torch.float64))[0][None, :5]
    (layer,) = decompose(model, {"x": x}, loss_fn=lambda y: (y**3).sum(), beta=True)
    beta = layer.beta[0, 0]
    close(layer.form().symmetry(), (beta.diagonal().square().sum() / beta.square().sum())[None])


class Masked(nn.Module):  # type: ignore[misc]
    """One attention with a mask of its own."""

    def __init__(self, attention: nn.Module, kind: str = "bool") -> None:
        super().__init__()
        self.attention, self.kind = attention, kind

    def forward(self, x: Tensor) -> Tensor:
        n = x.shape[-2 if self.attention.batch_first or x.ndim == 2 else 0]
        mask = torch.ones(n, n, dtype=torch.bool).triu(1)
        if self.kind == "float":
            mask = torch.zeros(n, n, dtype=x.dtype).masked_fill(mask, -torch.inf) + 0.3 * torch.eye(n)
        elif self.kind == "heads":
            heads = self.attention.num_heads
            mask = mask.expand(heads * (x.shape[0] if self.attention.batch_first else x.shape[1]), n, n)
        return self.attention(x, x, x, attn_mask=mask, need_weights=False)[0]


@families
def test_the_weights_are_those_that_the_model_computes(family: families_.Family) -> None:
    model = families_.built(family).double()
    batch = double(families_.inputs(family))
    before = state_of(model)
    found = observe(model, batch)
    assert same(state_of(model), before)
    model.set_attn_implementation("eager")
    with torch.no_grad():
        output = model(**batch, output_attentions=True)
    both = [output.get(name) for name in ("attentions", "encoder_attentions", "decoder_attentions")]
    expected = [weights for given in both if given for weights in given]
    assert len(found) == len(expected)
    for each, weights in zip(found, expected, strict=True):
        ((_, _, seen, open_),) = each.calls[0].weights()
        assert (seen - weights).abs().max() <= 1e-6
        assert not seen.masked_select(~open_).any()
        assert (seen.sum(-1) - 1).abs().max() <= 1e-12


def changed(change: Any, model: Any, *given: Any) -> Any:
    """The model after surgery, without the warning of what its dropout will cost in training."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*attention dropout")
        return change(model, *given)


# ---- other scores ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["bert", "gpt2", "vit", "encoder", "llama"])
def test_a_decoupled_model_gives_the_diagonal_to_v(name: str) -> None:
    model, batch = built(name)
    model = changed(surgery.decouple_, model)
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if parameter_name.endswith("self_score.v"):
                parameter.copy_(0.3 * torch.randn_like(parameter))
    found = decompose(model, batch, beta=True)
    expected = gradients(model, batch)
    trained = copy.deepcopy(model)
    trained(**batch)["loss"].backward()
    for layer, site, (query, key) in zip(found, sites.find(model), expected, strict=True):
        assert layer.decoupled
        assert torch.equal(layer.gamma, layer.gamma_off_diagonal)
        close(
            layer.gamma_diagonal.diagonal(0, 1, 2), trained.get_parameter(f"{layer.module}.self_score.v").grad
        )
        assert layer.beta.sum(-1).abs().max() <= 1e-12
        if name != "llama":
            close(layer.extended() @ with_bias(site.w_k(), site.b_k()), query)
            close(layer.extended().mT @ with_bias(site.w_q(), site.b_q()), key)


@pytest.mark.parametrize("kind", ["no-diagonal", "exclusive"])
@pytest.mark.parametrize("name", ["bert", "gpt2", "encoder"])
def test_relatives_of_attention_are_told_apart(name: str, kind: Any) -> None:
    model, batch = built(name)
    model = changed(surgery.set_attention_, model, kind)
    for layer, site, (query, key) in zip(
        decompose(model, batch), sites.find(model), gradients(model, batch), strict=True
    ):
        close(layer.extended() @ with_bias(site.w_k(), site.b_k()), query)
        close(layer.extended().mT @ with_bias(site.w_q(), site.b_q()), key)
        assert bool(layer.gamma_diagonal.any()) == (kind == "exclusive")


@pytest.mark.parametrize("qk", ["collapsed", "factorized"])
@pytest.mark.parametrize("ov", ["collapsed", "factorized"])
def test_circuits_as_parameters_have_gamma_as_their_gradient(qk: Any, ov: Any) -> None:
    torch.manual_seed(2)
    attention = surgery.CircuitAttention(
        7, 3, qk=qk, ov=ov, d_head=2, bias=True, causal=True, scale=0.7
    ).double()
    with torch.no_grad():
        for parameter in attention.parameters():
            parameter.normal_()
    model, x = nn.Sequential(attention), torch.randn(2, 5, 7, dtype=torch.float64)

    def loss(output: Any) -> Tensor:
        return (output[0] ** 2).sum()

    (layer,) = decompose(model, {"input": x}, loss_fn=loss, beta=True)
    loss(model(x)).backward()
    if qk == "collapsed":
        close(layer.gamma, attention.W_QK.grad)
        close(layer.key_sum, attention.b_K.grad)
    else:
        close(layer.gamma @ attention.W_K, attention.W_Q.grad)
        whole = layer.extended().mT @ torch.cat([attention.W_Q, attention.b_Q[:, None]], 1)
        close(whole[:, :-1], attention.W_K.grad)
    assert not layer.beta.masked_select(torch.ones(5, 5, dtype=torch.bool).triu(1)).any()


@pytest.mark.parametrize("circuit", ["collapsed", "factorized"])
def test_a_mask_for_every_head_of_a_circuit(circuit: Any) -> None:
    attention = surgery.CircuitAttention(6, 2, qk=circuit, d_head=3).double()
    model, x = Own(attention), torch.randn(2, 4, 6, dtype=torch.float64)
    closed = torch.rand(2, 2, 4, 4) < 0.4
    closed[..., 0] = False
    found = [
        decompose(model, {"x": x, "mask": mask}, loss_fn=lambda y: (y**3).sum(), beta=True)[0].beta
        for mask in (closed, closed.flatten(0, 1))
    ]
    assert torch.equal(*found)
    assert not found[0].masked_select(closed).any()


class Own(nn.Module):  # type: ignore[misc]
    """One attention with the mask that is given."""

    def __init__(self, attention: nn.Module) -> None:
        super().__init__()
        self.attention = attention

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return self.attention(x, attn_mask=mask)[0]


@pytest.mark.parametrize("kind", ["bool", "float", "heads"])
@pytest.mark.parametrize("batch_first", [True, False])
def test_masks_and_layouts_of_torch_attention(kind: str, batch_first: bool) -> None:
    torch.manual_seed(4)
    attention = nn.MultiheadAttention(9, 3, batch_first=batch_first).double()
    nn.init.normal_(attention.in_proj_bias)
    model = Masked(attention, kind)
    x = torch.randn(2, 5, 9, dtype=torch.float64)
    x = x if batch_first else x.transpose(0, 1)
    (layer,) = decompose(model, {"x": x}, loss_fn=lambda y: (y**3).sum())
    (model(x) ** 3).sum().backward()
    with torch.no_grad():
        w_q, w_k = (w.T.unflatten(1, (3, 3)).transpose(0, 1) for w in attention.in_proj_weight.chunk(3)[:2])
        grads = [w.T.unflatten(1, (3, 3)).transpose(0, 1) for w in attention.in_proj_weight.grad.chunk(3)[:2]]
        b_q = attention.in_proj_bias[:9].reshape(3, 1, 3)
    close(layer.gamma @ w_k, grads[0])
    close((layer.extended().mT @ torch.cat([w_q, b_q], 1))[:, :-1], grads[1])


def test_an_attention_that_runs_twice_has_the_sum_over_its_calls() -> None:
    torch.manual_seed(0)
    config = transformers.AlbertConfig(**BERT, embedding_size=6, num_hidden_groups=1)
    model = transformers.AlbertForMaskedLM(config).double().eval()
    batch = {"input_ids": TOKENS, "attention_mask": PADDING, "labels": labels()}
    (layer,) = decompose(model, batch, beta=True)
    ((query, key),) = gradients(model, batch)
    (site,) = sites.find(model)
    close(layer.gamma @ site.w_k(), query[:, :-1])
    close(layer.gamma.mT @ site.w_q(), key[:, :-1])  # biases are 0
    assert layer.beta.shape == (6, 3, 7, 7)
    assert not layer.beta[:3].equal(layer.beta[3:])


# ---- how it is computed ------------------------------------------------------------------------------------


@pytest.mark.parametrize("together", [1, 30, 200])
@pytest.mark.parametrize("name", ["gpt2", "encoder"])
def test_parts_make_the_same_sums(name: str, together: int, monkeypatch: Any) -> None:
    from qkform.dynamics import calls

    model, batch = built(name)
    whole = decompose(model, batch, beta=True)
    monkeypatch.setattr(calls, "TOGETHER", together)
    for found, expected in zip(decompose(model, batch, beta=True), whole, strict=True):
        for field in fields(Decomposition):
            value, other = getattr(found, field.name), getattr(expected, field.name)
            if isinstance(value, Tensor):
                assert torch.allclose(value, other, rtol=1e-12, atol=1e-15), field.name
            else:
                assert value == other


def test_nothing_as_large_as_all_pairs_times_features_is_made() -> None:
    model, _ = built("gpt2")
    tokens = torch.randint(0, VOCABULARY, (2, 16))
    largest = Largest()
    with largest:
        decompose(model, {"input_ids": tokens, "labels": tokens})
    assert 0 < largest.numel <= max(2 * 3 * 16 * 16, 2 * 16 * 45, 3 * 15 * 15, 2 * 16 * 60)


class Largest(TorchDispatchMode):  # type: ignore[misc]
    """The size of the largest tensor that any operation makes."""

    numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.numel = max([self.numel, *(t.numel() for t in tree_leaves(out) if isinstance(t, Tensor))])
        return out


def test_sums_in_float64_are_more_accurate() -> None:
    model, batch = built("gpt2")
    exact = decompose(model, batch)
    model = model.float()
    rough = decompose(model, batch)
    fine = decompose(model, batch, dtype=torch.float64)
    for e, r, f in zip(exact, rough, fine, strict=True):
        assert (r.gamma.dtype, f.gamma.dtype) == (torch.float32, torch.float64)
        close(r.gamma.double(), e.gamma, 1e-4)
        close(f.gamma, e.gamma, 1e-4)
    close(rough[0].gamma.double(), fine[0].gamma, 1e-5)
    with pytest.raises(AssertionError):
        close(rough[0].gamma.double(), fine[0].gamma, 1e-10)


def test_half_precision_models_are_computed_in_float32() -> None:
    model, batch = built("llama")
    exact = decompose(model, batch)
    for layer, expected in zip(decompose(model.to(torch.bfloat16), batch), exact, strict=True):
        assert layer.gamma.dtype == torch.float32
        close(layer.gamma.double(), expected.gamma, 0.2)


# ---- the model is left as it was ---------------------------------------------------------------------------


def state_of(model: Any) -> dict[str, Any]:
    config = getattr(model, "config", None)
    return {
        "values": {name: value.clone() for name, value in model.state_dict().items()},
        "grads": {n: None if p.grad is None else p.grad.clone() for n, p in model.named_parameters()},
        "learns": {n: p.requires_grad for n, p in model.named_parameters()},
        "modes": [m.training for m in model.modules()],
        "hooks": [
            (len(m._forward_pre_hooks), len(m._forward_hooks), len(m._forward_hooks_with_kwargs))
            for m in model.modules()
        ],
        "attributes": [sorted(vars(m)) for m in model.modules()],
        "nested": [getattr(m, "use_nested_tensor", None) for m in model.modules()],
        "config": None if config is None else (config.to_dict(), config._attn_implementation),
        "random": torch.get_rng_state(),
    }


def same(one: Any, other: Any) -> bool:
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    return torch.equal(one, other) if isinstance(one, Tensor) else bool(one == other)


@pytest.mark.parametrize("name", ["bert", "gpt2", "llama", "vit", "encoder"])
@pytest.mark.parametrize("fails", [None, "loss", "backward"])
def test_the_model_is_left_as_it_was(name: str, fails: str | None) -> None:
    model, batch = built(name)
    model(**batch)["loss"].backward()
    model.train()
    list(model.modules())[3].eval()
    before = state_of(model)

    def loss(output: Any) -> Tensor:
        torch.rand(3)
        if fails == "loss":
            raise KeyError("no such output")
        return output["loss"].detach() if fails == "backward" else output["loss"]

    if fails is None:
        decompose(model, batch, loss_fn=loss)
    else:
        with pytest.raises(KeyError if fails == "loss" else DynamicsError):
            decompose(model, batch, loss_fn=loss)
    assert same(state_of(model), before)


def test_dropout_has_no_part_in_it() -> None:
    model, batch = built("gpt2")  # with the dropout of its family, 0.1
    expected = decompose(model, batch)
    model.train()
    for layer, other in zip(decompose(model, batch), expected, strict=True):
        assert torch.equal(layer.gamma, other.gamma)


@pytest.mark.parametrize("name", ["bert", "encoder"])
def test_a_frozen_model_has_the_same_gamma(name: str) -> None:
    model, batch = built(name)
    expected = decompose(model, batch)
    model.requires_grad_(False)
    with torch.no_grad():
        found = decompose(model, batch)
    for layer, other in zip(found, expected, strict=True):
        close(layer.gamma, other.gamma, 1e-14)
        assert not layer.gamma.requires_grad


@pytest.mark.parametrize("name", ["bert", "gpt2", "llama", "vit"])
def test_eager_models_have_the_same_gamma(name: str) -> None:
    model, batch = built(name)
    expected = decompose(model, batch)
    model.set_attn_implementation("eager")
    for layer, other in zip(decompose(model, batch), expected, strict=True):
        close(layer.gamma, other.gamma, 1e-12)


def test_wrapped_models_are_seen_through() -> None:
    model, batch = built("bert")
    expected = decompose(model, batch)
    found = decompose(nn.DataParallel(model), batch)
    assert [layer.module for layer in found] == [layer.module for layer in expected]
    assert torch.equal(found[0].gamma, expected[0].gamma)


@pytest.mark.parametrize("name", ["bert", "llama", "encoder"])
def test_sharded_models_have_the_same_gamma(name: str, tmp_path: Path) -> None:
    if not torch.distributed.is_available():
        pytest.skip("this torch has no torch.distributed")
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import init_device_mesh

    model, batch = built(name)
    expected = decompose(model, batch)
    torch.distributed.init_process_group("gloo", f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        stack = {"bert": "bert.encoder.layer", "llama": "model.layers", "encoder": "encoder.layers"}[name]
        for part in (*model.get_submodule(stack), model):
            fully_shard(part, mesh=mesh)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "FSDP2-wrapped module")  # a view of the embeddings
            found = decompose(model, batch)
    finally:
        torch.distributed.destroy_process_group()
    for layer, other in zip(found, expected, strict=True):
        close(layer.gamma, other.gamma, 1e-13)
        assert (layer.module, layer.direct) == (other.module, other.direct)


def test_checkpointed_models_have_the_same_gamma() -> None:
    model, batch = built("llama")
    expected = decompose(model, batch)
    model.activation_checkpointing_enable()
    model.train()
    for layer, other in zip(decompose(model, batch), expected, strict=True):
        assert torch.equal(layer.gamma, other.gamma)


def test_a_forward_pass_that_checkpoints_repeat_counts_once() -> None:
    class Checkpointed(Masked):
        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(lambda x: super(Checkpointed, self).forward(x) ** 3, x, use_reentrant=False)

    torch.manual_seed(0)
    attention = nn.MultiheadAttention(6, 2, batch_first=True).double()
    x = torch.randn(2, 5, 6, dtype=torch.float64)
    (expected,) = decompose(Masked(attention), {"x": x}, loss_fn=lambda y: (y**3).sum())
    (found,) = decompose(Checkpointed(attention), {"x": x}, loss_fn=torch.sum)
    close(found.gamma, expected.gamma, 1e-14)


# ---- which attentions, and what is refused -----------------------------------------------------------------


def test_modules_choose_the_attentions() -> None:
    model, batch = built("llama")
    path = "model.layers.1.self_attn"
    (layer,) = decompose(model, batch, modules=[path])
    assert layer.module == path
    assert torch.equal(layer.gamma, decompose(model, batch)[1].gamma)
    with pytest.raises(DynamicsError, match="no self-attention at 'elsewhere'; there are "):
        decompose(model, batch, modules=["elsewhere"])


def test_an_attention_that_the_loss_does_not_see_has_gamma_zero() -> None:
    model, batch = built("bert")
    found = decompose(
        model, batch | {"output_hidden_states": True}, loss_fn=lambda y: (y.hidden_states[1] ** 3).sum()
    )
    assert found[0].gamma.any()
    assert not found[1].gamma.any()
    assert found[1].form().symmetry().isnan().all()


def test_a_batch_without_labels_is_refused() -> None:
    model, batch = built("bert")
    del batch["labels"]
    with pytest.raises(DynamicsError, match="put the labels into the batch, or give loss_fn="):
        decompose(model, batch)
    assert len(decompose(model, batch, loss_fn=square)) == 2


@pytest.mark.parametrize(
    ("loss_fn", "message"),
    [
        (lambda y: y.logits, r"the loss is \(3, 7, 31\)"),
        (lambda y: 1.0, "the loss is float"),
        (lambda y: y.loss.detach(), "does not depend on any attention"),
    ],
)
def test_losses_that_are_none(loss_fn: Any, message: str) -> None:
    model, batch = built("bert")
    with pytest.raises(DynamicsError, match=message):
        decompose(model, batch, loss_fn=loss_fn)


def test_models_and_batches_that_are_none() -> None:
    model, batch = built("bert")
    with pytest.raises(DynamicsError, match="batch is a Tensor; it is a mapping"):
        decompose(model, TOKENS)
    with pytest.raises(DynamicsError, match="Linear has no self-attention that is known"):
        decompose(nn.Linear(3, 3), batch)
    with pytest.raises(SourceError):
        decompose(3, batch)


def test_scores_of_another_kind_are_refused() -> None:
    capped = {"attn_logit_softcapping": 3.0, "query_pre_attn_scalar": 4, "attn_implementation": "eager"}
    model = transformers.Gemma2ForCausalLM(transformers.Gemma2Config(**LLAMA, **capped)).double()
    before = state_of(model)
    with pytest.raises(DynamicsError, match="changes its scores by 'softcap'"):
        decompose(model, {"input_ids": TOKENS, "labels": TOKENS})
    assert same(state_of(model), before)
    attention = nn.MultiheadAttention(6, 2, add_bias_kv=True, batch_first=True)
    with pytest.raises(DynamicsError, match="keys of no token"):
        decompose(Masked(attention), {"x": torch.zeros(1, 3, 6)}, loss_fn=torch.sum)


def test_attentions_whose_scores_cannot_be_seen() -> None:
    config = transformers.BloomConfig(vocab_size=VOCABULARY, hidden_size=12, n_layer=1, n_head=2)
    with pytest.raises(
        DynamicsError, match=r"transformer\.h\.0\.self_attention: a BloomAttention is neither"
    ):
        decompose(transformers.BloomForCausalLM(config), {"input_ids": TOKENS, "labels": TOKENS})
    model, batch = built("bert")
    model.bert.encoder.layer[1].attention.self.forward = lambda x, *args, **kwargs: (
        model.bert.encoder.layer[1].attention.self.query(x),
        None,
    )
    with pytest.raises(
        DynamicsError, match="does not call its attention through transformers' AttentionInterface"
    ):
        decompose(model, batch)


def test_keys_from_a_cache_are_refused() -> None:
    model, _ = built("llama")
    with torch.no_grad():
        past = model(input_ids=TOKENS, use_cache=True).past_key_values
    with pytest.raises(DynamicsError, match="14 keys for 7 tokens: give a batch without a cache"):
        decompose(model, {"input_ids": TOKENS, "labels": TOKENS, families_.past_name(): past})


# ---- under other circumstances -------------------------------------------------------------------------------


def test_autocast_of_the_caller_is_for_the_model_alone() -> None:
    model, batch = built("bert")
    expected = decompose(model, batch)  # in float64, which autocast leaves alone
    with torch.autocast("cpu", torch.bfloat16):
        found = decompose(model, batch)
    model = model.float()
    plain = decompose(model, batch)
    for each, other, exact_ in zip(found, plain, expected, strict=True):
        close(each.gamma, exact_.gamma)
        close(other.gamma.double(), exact_.gamma, 1e-3)

    with torch.autocast("cpu", torch.bfloat16):
        rows = [d.beta.sum(-1).abs().max() for d in decompose(model, batch, beta=True)]
        size = [d.beta.abs().max() for d in decompose(model, batch, beta=True)]
    assert all(r < 1e-5 * s for r, s in zip(rows, size, strict=True))


def test_tensors_of_inference_mode() -> None:
    model, batch = built("gpt2")
    expected = decompose(model, batch)
    with torch.inference_mode():
        found = decompose(model, {name: value.clone() for name, value in batch.items()})
        made = transformers.GPT2LMHeadModel(transformers.GPT2Config(**GPT2))
    for each, other in zip(found, expected, strict=True):
        assert torch.equal(each.gamma, other.gamma)
    with pytest.raises(DynamicsError, match="made in inference mode"):
        decompose(made, batch)


def test_a_model_without_values_is_refused() -> None:
    with torch.device("meta"):
        model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**GPT2))
    with pytest.raises(DynamicsError, match="meta device and has no values"):
        decompose(model, built("gpt2")[1])


class _InPlace(nn.Module):  # type: ignore[misc]
    """Changes the output of its attention in place."""

    def __init__(self, change: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.attention = nn.MultiheadAttention(6, 2, batch_first=True, dtype=torch.float64)
        self.change = change

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        out = self.attention(x, x, x, attn_mask=mask)[0]
        return out.mul_(3.0) if self.change else out * 3.0


def cube(output: Tensor) -> Tensor:
    return output.pow(3).mean()


@pytest.mark.parametrize("learns", [True, False])
def test_an_output_that_is_changed_in_place_has_its_own_gradient(learns: bool) -> None:
    x = torch.randn(2, 5, 6, dtype=torch.float64)
    one, other = (
        decompose(_InPlace(change).requires_grad_(learns), {"x": x}, loss_fn=cube)[0]
        for change in (True, False)
    )
    assert one.gamma.abs().max() > 1e-3
    close(one.gamma, other.gamma)


@pytest.mark.parametrize("low", [-1e4, -1e9, torch.finfo(torch.float64).min, -torch.inf])
def test_a_low_float_mask_closes_keys(low: float) -> None:
    """As people write masks: what is closed has no part in the null of `conflict`, nor in beta."""
    module = _InPlace(False)
    x, closed = torch.randn(2, 5, 6, dtype=torch.float64), torch.ones(5, 5, dtype=torch.bool).triu(1)
    expected = dynamics.conflict(module, {"x": x, "mask": closed}, loss_fn=cube, permutations=3)[0]
    mask = torch.zeros(5, 5, dtype=torch.float64).masked_fill(closed, low)
    found = dynamics.conflict(module, {"x": x, "mask": mask}, loss_fn=cube, permutations=3)[0]
    for name in ("cosine", "null_closed", "null"):
        close(getattr(found, name), getattr(expected, name))


def test_threads_come_one_after_the_other() -> None:
    model, batch = built("gpt2")
    model.train()
    before, expected = state_of(model), decompose(model, batch)
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda _: decompose(model, batch), range(8)))
    assert same(state_of(model), before)
    for each in found:
        assert all(torch.equal(d.gamma, e.gamma) for d, e in zip(each, expected, strict=True))


def test_a_call_within_a_call_is_refused() -> None:
    model, batch = built("gpt2")

    def loss(output: Any) -> Tensor:
        return decompose(model, batch)[0].gamma.sum()

    before = state_of(model)
    with pytest.raises(DynamicsError, match="while another call"):
        decompose(model, batch, loss_fn=loss)
    assert same(state_of(model), before)
    decompose(model, batch)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"dtype": torch.float16}, "dtype is torch.float16; it is torch.float32 or"),
        ({"dtype": "float64"}, "dtype is 'float64'"),
        ({"modules": "transformer.h.0.attn"}, "it is a list of paths"),
        ({"modules": 3}, "it is a list of paths"),
        ({"loss_fn": 3}, "loss_fn is a int"),
    ],
)
def test_arguments_that_are_none(given: dict[str, Any], words: str) -> None:
    with pytest.raises(DynamicsError, match=words):
        decompose(*built("gpt2"), **given)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"permutations": 2.5}, "permutations is 2.5"),
        ({"permutations": True}, "permutations is True"),
        ({"seed": "1"}, "seed is '1'"),
        ({"seed": 2**70}, "seed is"),
    ],
)
def test_arguments_of_conflict_that_are_none(given: dict[str, Any], words: str) -> None:
    with pytest.raises(DynamicsError, match=words):
        dynamics.conflict(*built("gpt2"), **given)
    with pytest.raises(DynamicsError, match="holds a list; give results"):
        dynamics.fraction_negative([[]])  # type: ignore[list-item]


def test_compiled_parts_of_a_model_are_seen() -> None:
    model, batch = built("bert")
    expected = decompose(model, batch)
    for layer in model.bert.encoder.layer:
        layer.compile(backend="eager")
    with torch.no_grad():
        model(**batch)
    for each, other in zip(decompose(model, batch), expected, strict=True):
        close(each.gamma, other.gamma)


def test_a_batch_without_tokens_is_refused() -> None:
    model, batch = built("gpt2")
    with pytest.raises(DynamicsError, match="there is no token in it"):
        decompose(model, {name: value[:0] for name, value in batch.items()})
    with pytest.raises(DynamicsError, match="names are strings"):
        decompose(model, {1: 2})  # type: ignore[dict-item]
