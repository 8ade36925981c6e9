"""Every family is verified against the model's own forward pass, and the page about them is current."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

import qkform as qk
from qkform.errors import QKFormError
from qkform.layouts.rules import families
from tests import truth
from tests.survey import page

PAGE = Path(__file__).parents[1] / "docs" / "families.md"
REMEDY = "python -m tests.survey --write docs/families.md"


@pytest.mark.parametrize("case", truth.CASES, ids=lambda case: case.name)
def test_scan_finds_what_the_model_computes_and_mutants_fail(case: truth.Case) -> None:
    verdict = truth.verify(case)
    assert verdict.problems == []
    assert verdict.differences.keys() == {layer.module for layer in verdict.layers} != set()
    assert max(verdict.differences.values()) <= truth.TOLERANCE
    assert verdict.unnoticed == {}
    for layer in verdict.layers:
        expected = [m for m in truth.MUTANTS if truth.applies(m, layer)]
        assert verdict.failed[layer.module] == expected
    written = PAGE.read_text(encoding="utf-8").splitlines()
    for row in truth.rows(verdict):
        assert row in written, f"docs/families.md is out of date: {REMEDY}"


def test_every_mutant_is_tried_somewhere() -> None:
    members = {case.member for case in truth.CASES}
    assert {"gpt2", "gpt_neox", "phi3"} <= members  # order: blocks, heads, grouped blocks
    assert {"llama", "qwen3", "gguf:llama"} <= members  # pairing


# families without a case here: the survey verifies them (python -m tests.survey), timm by names alone
SURVEYED = {"bloom", "codegen", "deberta", "deberta-v2", "falcon", "gpt_bigcode", "gpt_neo", "mpt", "timm"}


def test_no_family_counts_without_a_case() -> None:
    described_only = {name for name in families() if name.startswith("gguf:")} | SURVEYED
    assert set(families()) - described_only <= {case.member for case in truth.CASES} <= set(families())


def test_page_lists_the_cases_and_the_unverified() -> None:
    text = PAGE.read_text(encoding="utf-8")
    lines = [line for line in cases_of(text).splitlines() if line.startswith("| ")][1:]
    named = list(dict.fromkeys(line.split(" | ")[0].removeprefix("| ") for line in lines))
    assert named == [case.name for case in truth.CASES], REMEDY
    assert cases_of(text).endswith(truth.described()), REMEDY
    fixed = truth.INTRODUCTION.partition("{mutants}")[0]
    assert text.startswith(fixed), REMEDY


def cases_of(text: str) -> str:
    """The page without the survey's part."""
    return text[: text.index(page.INTRODUCTION.partition("{")[0])]


def test_gguf_with_one_side_reordered_fails() -> None:
    """The reordering of rows leaves W alone only because Q and K share it."""
    (case,) = (c for c in truth.CASES if c.name == "gguf:llama")
    one_sided = replace(case, write=lambda model, path: truth.gguf_llama(model, path, sides="q"))
    verdict = truth.verify(one_sided)
    assert min(verdict.differences.values()) > 0.01


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("bert", {"q": "key", "k": "query"}),
        ("bert", {"transposed": True}),
        ("gpt2", {"transposed": False}),
        ("gpt2", {"order": "heads x [q|k|v]"}),
        ("gpt_neox", {"order": "q|k|v"}),
        ("modernbert", {"order": "heads x [q|k|v]"}),
        ("llama", {"q": "k_proj", "k": "q_proj"}),
        ("phi3", {"order": "heads x [q|k|v]"}),
        ("t5", {"q": "k", "k": "q"}),
        ("bart", {"norm": "self_attn_layer_norm", "norm_kind": "layer"}),
        ("gemma", {"norm_kind": "rms"}),
        ("mistral", {"mask": "bidirectional"}),
        ("qwen3", {"qk_norm": ()}),
    ],
)
def test_a_wrong_rule_fails(name: str, change: dict[str, object], monkeypatch: pytest.MonkeyPatch) -> None:
    (case,) = (c for c in truth.CASES if c.name == name)
    right = families()
    wrong = replace(right[name], rules=tuple(replace(rule, **change) for rule in right[name].rules))
    monkeypatch.setattr("qkform.layouts.choose.families", lambda: {**right, name: wrong})
    try:
        problems = truth.verify(case).problems
    except QKFormError:
        return
    assert problems


def test_a_layer_the_rules_miss_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    (case,) = (c for c in truth.CASES if c.name == "llama")
    monkeypatch.setattr(truth.qk, "layers", lambda source, **options: list(qk_layers(source, **options))[:-1])
    assert any("attentions in the model" in problem for problem in truth.verify(case).problems)


def test_a_wrong_mask_or_norm_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    (case,) = (c for c in truth.CASES if c.name == "llama")

    def lying(source: Path, **options: object) -> list[object]:
        return [
            replace(
                a, mask="bidirectional", norm=a.norm.replace("input_", "post_attention_"), norm_kind="layer"
            )
            for a in qk_layers(source, **options)
        ]

    monkeypatch.setattr(truth.qk, "layers", lying)
    problems = truth.verify(case).problems
    assert sum("mask is" in p for p in problems) == 3
    assert sum("is not what the attention reads" in p for p in problems) == 3


qk_layers = qk.layers


def test_one_stray_module_does_not_make_a_model_of_torch_layers(tmp_path: Path) -> None:
    import numpy as np
    from safetensors.numpy import save_file

    square = np.eye(8, dtype=np.float32)
    tensors = {
        "encoder.0.att.to_q.weight": square,
        "encoder.0.att.to_k.weight": square,
        "head.attention.in_proj_weight": np.ones((24, 8), dtype=np.float32),
    }
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "unheard-of", "num_attention_heads": 2}))
    (scanned,) = qk.scan(tmp_path).models
    assert {row["module"] for row in scanned.rows} == {"encoder.0.att"}
    assert all("by_names" in row["flags"] for row in scanned.rows)
    assert [entry["module"] for entry in scanned.skipped] == ["head.attention"]
