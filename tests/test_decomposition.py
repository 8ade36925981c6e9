"""`decompose`: the gradient of W_qk as a sum over pairs of tokens, held against autograd."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from qkform import sites
from qkform.dynamics import decompose
from tests import truth

transformers = pytest.importorskip("transformers")
truth.quiet()

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
    "hidden_size": 14,
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
