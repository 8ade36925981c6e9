"""The survey of model types: it recovers what it should, notices what is wrong, and its record is current."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

import qkform as qk
from qkform.layouts.rules import families
from tests.survey import attentions, page, verify, walk
from tests.test_families import PAGE, REMEDY

RECORD = page.read()
SURVEYED = [name for name, r in RECORD.items() if r["status"] == verify.VERIFIED]
SPREAD = SURVEYED[::24]  # these in every run, the rest in `make test-all`


@pytest.mark.parametrize(
    "model_type", [n if n in SPREAD else pytest.param(n, marks=pytest.mark.slow) for n in SURVEYED]
)
def test_every_attention_of_a_model_type_is_found_and_mutants_fail(model_type: str) -> None:
    result = verify.examine(model_type)
    assert (result["status"], result["reason"]) == (verify.VERIFIED, "")
    assert page.recorded({model_type: result})[model_type] == RECORD[model_type], REMEDY
    assert result["unnoticed"] == []
    assert result["mutants"]["swap"] == result["mutants"]["transposition"] == len(result["components"]) > 0


def test_page_holds_the_record() -> None:
    assert PAGE.read_text(encoding="utf-8").endswith(page.section(RECORD)), REMEDY


def test_every_model_type_is_in_the_record() -> None:
    assert sorted(RECORD) == walk.model_types()
    assert all(r["status"] == verify.VERIFIED or r["reason"] for r in RECORD.values())


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"q": "k_proj", "k": "q_proj"}, "k_proj"),
        ({"mask": "bidirectional"}, "mask is"),
        ({"norm_kind": "layer"}, "is not of kind"),
        ({"norm": "post_attention_layernorm"}, "is not what the attention reads"),
        ({"qk_norm": ()}, "query and key norms"),
    ],
)
def test_a_wrong_rule_is_a_problem(
    change: dict[str, Any], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = families()
    wrong = replace(right["qwen3"], rules=tuple(replace(rule, **change) for rule in right["qwen3"].rules))
    monkeypatch.setattr("qkform.layouts.choose.families", lambda: {**right, "qwen3": wrong})
    result = verify.examine("qwen3")
    assert result["status"] == verify.NOT_YET
    assert said in result["reason"]


def test_a_layer_that_qkform_misses_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    layers: Callable[..., Any] = qk.layers
    monkeypatch.setattr(verify.qk, "layers", lambda source, **o: list(layers(source, **o))[:-1])
    result = verify.examine("bert")
    assert result["status"] == verify.NOT_YET
    assert "not found by qkform" in result["reason"]


class Fused(torch.nn.Module):
    """Heads one after the other, each with its k, q and v, scaled and offset before they are multiplied."""

    def __init__(self, heads: int, d_model: int, d_head: int) -> None:
        super().__init__()
        self.heads = heads
        self.kqv = torch.nn.Linear(d_model, 3 * heads * d_head, dtype=torch.float64)
        self.out = torch.nn.Linear(heads * d_head, d_model, dtype=torch.float64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, t, _ = x.shape
        k, q, v = self.kqv(x).view(b, t, self.heads, 3, -1).permute(3, 0, 2, 1, 4)
        scores = torch.einsum("bhqd,bhkd->bhqk", q * 0.5 + 1.0, k)
        p = (scores + torch.full((t, t), -torch.inf).triu(1)).softmax(-1)
        return self.out((p @ v).transpose(1, 2).reshape(b, t, -1))


def test_rows_of_heads_are_recovered_from_any_order() -> None:
    model = Fused(3, 10, 4)
    x = torch.randn(2, 7, 10, dtype=torch.float64)
    with verify.watchable():
        reading = attentions.read(model, lambda: model(x))
    (found,) = reading.attentions
    weight = model.kqv.weight.detach().numpy().reshape(3, 3, 4, 10)  # (heads, kqv, d_head, d_model)
    form = np.einsum("hdi,hdj->hij", weight[:, 1], weight[:, 0])
    assert np.abs(found.matrix - form).max() < 1e-14
    assert np.array_equal(found.q.bias(), model.kqv.bias.detach().numpy().reshape(3, 3, 4)[:, 1])
    assert (found.attention, found.mask, found.q.offset, found.k.offset) == ("self", "causal", True, False)
    assert found.q.scale == pytest.approx(0.5)


class Sharing(Fused):
    """Six query heads on three key heads, query head h on key head h mod 3, and a norm on the keys."""

    def __init__(self) -> None:
        super().__init__(3, 10, 4)
        self.q = torch.nn.Linear(10, 24, dtype=torch.float64)
        self.k_norm = torch.nn.RMSNorm(4, dtype=torch.float64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, t, _ = x.shape
        k, _, v = self.kqv(x).view(b, t, 3, 3, 4).permute(3, 0, 2, 1, 4)
        q = self.q(x).view(b, t, 6, 4).transpose(1, 2)
        p = torch.nn.functional.scaled_dot_product_attention(
            q, self.k_norm(k).repeat(1, 2, 1, 1), v.repeat(1, 2, 1, 1)
        )
        return self.out(p[:, :3].transpose(1, 2).reshape(b, t, -1))


def test_pairs_and_norms_of_heads_are_recovered() -> None:
    model = Sharing()
    x = torch.randn(2, 7, 10, dtype=torch.float64)
    with verify.watchable():
        reading = attentions.read(model, lambda: model(x))
    (found,) = reading.attentions
    assert found.pairs == [0, 1, 2, 0, 1, 2]
    assert (found.normed, found.mask, len(found.k.rows)) == (True, "bidirectional", 3)


class Squared(Fused):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, t, _ = x.shape
        k, q, v = self.kqv(x).view(b, t, self.heads, 3, -1).permute(3, 0, 2, 1, 4)
        return self.out(((q * q @ k.transpose(-1, -2)).softmax(-1) @ v).transpose(1, 2).reshape(b, t, -1))


def test_queries_that_are_no_plain_output_are_not_read() -> None:
    model = Squared(3, 10, 4)
    x = torch.randn(2, 7, 10, dtype=torch.float64)
    with verify.watchable():
        reading = attentions.read(model, lambda: model(x))
    assert reading.attentions == []
    assert "not a plain output" in reading.failures[0].reason or "not linear" in reading.failures[0].reason


def test_a_type_that_fails_or_takes_too_long_does_not_stop_the_walk() -> None:
    names = ["bert", "no-such-type", "distilbert"]
    found = {r["model_type"]: r for r in walk.results(names, 1)}
    assert [found[n]["status"] for n in names] == [verify.VERIFIED, verify.NOT_YET, verify.VERIFIED]
    (late,) = walk.results(["bert"], 1, seconds=0.0)
    assert late["reason"] == "took more than 0 seconds"
