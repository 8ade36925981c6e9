"""The self score has the scale of the others: a model whose W is diagonal is not changed by `decouple_`."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers

from qkform import sites
from qkform.surgery import decouple_

TEXT = {
    "vocab_size": 31,
    "hidden_size": 12,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "intermediate_size": 16,
}
PLAIN = {"attention_probs_dropout_prob": 0.0, "hidden_dropout_prob": 0.0}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "bert": ("BertModel", TEXT | PLAIN),
    "esm": ("EsmModel", TEXT | PLAIN | {"pad_token_id": 0, "mask_token_id": 30, "position_embedding_type": "rotary"}),
    "esm without rotation": (
        "EsmModel", TEXT | PLAIN | {"pad_token_id": 0, "mask_token_id": 30, "position_embedding_type": "absolute"}
    ),
    "opt": ("OPTModel", TEXT | {"ffn_dim": 16, "word_embed_proj_dim": 12, "dropout": 0.0, "attention_dropout": 0.0}),
    "llama": ("LlamaModel", TEXT),
    "gpt-neox": ("GPTNeoXModel", TEXT | {"rotary_pct": 0.5}),
    "t5": ("T5EncoderModel", {
        "vocab_size": 31, "d_model": 12, "d_kv": 4, "num_heads": 3, "d_ff": 16, "num_layers": 2, "dropout_rate": 0.0,
    }),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:.*learned bias of position")
@pytest.mark.parametrize("name", MODELS)
def test_a_diagonal_form_is_its_own_diagonal(name: str) -> None:
    model_class, settings = MODELS[name]
    torch.manual_seed(0)
    found = getattr(transformers, model_class)
    model = found(found.config_class(**settings)).double().eval()
    for site in sites.find(model):
        heads, d_model, d_head = site.w_q().shape
        picked = (
            torch.eye(d_model).reshape(d_model, heads, d_head).transpose(0, 1)
        )  # each head sees features of its own
        site.write_(w_q=2 * picked * torch.rand(d_model, 1), w_k=2 * picked * torch.rand(d_model, 1))
        for bias in (site.b_q(), site.b_k()):
            if bias is not None:
                bias.detach().zero_()
    tokens = torch.randint(1, 30, (2, 7))
    with torch.no_grad():
        before = model(input_ids=tokens)[0]
        after = decouple_(model)(input_ids=tokens)[0]
        torch.testing.assert_close(after, before, rtol=1e-6, atol=1e-6)  # cosines and sines are float32
        for module in model.modules():
            if hasattr(module, "self_score"):
                module.self_score.v.mul_(2)
        assert (model(input_ids=tokens)[0] - before).abs().max() > 1e-3
