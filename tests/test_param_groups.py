"""Groups by circuit, and fused weights split in place: same function, same files, and the training of separate ones."""

from __future__ import annotations

import copy
import io
import json
import pickle
import re
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import qkform as qk
from qkform import sites
from qkform.errors import SurgeryError
from qkform.surgery import circuits, collapse_, decouple_, describe_groups, param_groups, rebuilt, unsplit_
from qkform.surgery.split import is_split, parts, split_
from tests import truth

transformers = pytest.importorskip("transformers")

CASES = [case for case in truth.CASES if case.write is None]
SMALL: Mapping[str, Any] = {"vocab_size": 41}


def built(case: truth.Case) -> Any:
    return truth._torch_model(case.build, case.settings) if case.member == "torch" else truth.build(case)


def tiny(name: str, **settings: Any) -> Any:
    """A tiny model by name, freshly initialised, in float32 and without dropout."""
    truth.quiet()
    torch.manual_seed(0)
    quiet = {"hidden_dropout": 0.0, "attention_dropout": 0.0}
    t = transformers
    if name == "gpt2":
        return t.GPT2LMHeadModel(
            t.GPT2Config(
                **SMALL, n_embd=24, n_head=3, n_layer=2, n_positions=19, attn_pdrop=0.0, resid_pdrop=0.0,
                embd_pdrop=0.0, eos_token_id=0, bos_token_id=0, **settings,
            )
        )  # fmt: skip
    if name == "gpt_neox":
        return t.GPTNeoXForCausalLM(
            t.GPTNeoXConfig(
                **SMALL, hidden_size=24, num_attention_heads=3, num_hidden_layers=2, intermediate_size=20,
                max_position_embeddings=19, **quiet,
            )
        )  # fmt: skip
    if name == "bloom":
        return t.BloomForCausalLM(t.BloomConfig(**SMALL, hidden_size=24, n_head=3, n_layer=2, **quiet))
    if name == "falcon-7b":
        return t.FalconForCausalLM(
            t.FalconConfig(
                **SMALL, hidden_size=24, num_attention_heads=3, num_hidden_layers=2, alibi=False, **quiet
            )
        )
    if name == "falcon-40b":
        return t.FalconForCausalLM(
            t.FalconConfig(
                **SMALL, hidden_size=32, num_attention_heads=4, num_kv_heads=2, num_hidden_layers=2,
                new_decoder_architecture=True, **quiet,
            )
        )  # fmt: skip
    if name == "modernbert":
        return t.ModernBertForMaskedLM(
            t.ModernBertConfig(
                **SMALL, hidden_size=24, num_attention_heads=3, num_hidden_layers=2, intermediate_size=20,
                pad_token_id=0, cls_token_id=1, sep_token_id=2, bos_token_id=1, eos_token_id=2,
            )
        )  # fmt: skip
    if name == "phi3":
        return t.Phi3ForCausalLM(
            t.Phi3Config(
                **SMALL, hidden_size=24, num_attention_heads=6, num_key_value_heads=2, num_hidden_layers=2,
                intermediate_size=20, pad_token_id=0, eos_token_id=2, bos_token_id=1,
            )
        )  # fmt: skip
    if name == "bert":
        return t.BertForMaskedLM(
            t.BertConfig(
                **SMALL, hidden_size=24, num_attention_heads=3, num_hidden_layers=2, intermediate_size=20,
                hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
            )
        )  # fmt: skip
    if name == "mha":
        return nn.MultiheadAttention(24, 3, batch_first=True)
    assert name == "encoder"
    layer = nn.TransformerEncoderLayer(24, 3, 20, dropout=0.0, batch_first=True)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)


FUSED = ("gpt2", "gpt_neox", "bloom", "falcon-7b", "falcon-40b", "modernbert", "phi3", "mha", "encoder")
PRETRAINED = FUSED[:7]


def ids(batch: int = 3, length: int = 7) -> torch.Tensor:
    return torch.randint(3, 41, (batch, length), generator=torch.Generator().manual_seed(1))


def computed(model: Any) -> torch.Tensor:
    """What a tiny model computes, with gradients."""
    x = torch.randn(3, 7, 24, generator=torch.Generator().manual_seed(2))
    if isinstance(model, nn.MultiheadAttention):
        return model(x, x, x, need_weights=False)[0]
    if isinstance(model, nn.TransformerEncoder):
        return model(x)
    return model(input_ids=ids()).logits


def names_in(groups: Any, model: Any, start: str) -> set[str]:
    return {row["parameter"] for row in describe_groups(model, groups) if row["group"].startswith(start)}


# ---- which parameter is where ------------------------------------------------------------------------------


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_q_and_k_of_every_family_are_in_qk_and_each_attention_has_its_v_and_o(case: truth.Case) -> None:
    model = built(case)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    groups = param_groups(model, lr=1e-3, qk_lr_ratio=4.0, weight_decay=0.01)
    rows = {row["parameter"]: row for row in describe_groups(model, groups)}

    listed = [id(p) for group in groups for p in group["params"]]
    assert len(listed) == len(set(listed))
    assert set(listed) == {id(p) for p in model.parameters() if p.requires_grad}
    after = model.state_dict()
    assert list(after) == list(before) or set(after) == set(before)
    assert all(torch.equal(after[name], value) for name, value in before.items())

    ov = {name for name, row in rows.items() if row["group"].startswith("ov/")}
    for site in sites.find(model):
        for share in site.parameters():
            halves = parts(share.at.owner, share.at.attribute)
            name = share.name if halves is None else f"{_parts_of(share.name)}.qk"
            assert rows[name]["group"].startswith("qk/")
        around = site.path.rpartition(".")[0] if site.path.endswith(".self") else site.path
        mine = {name for name in ov if name.startswith(around and f"{around}.") and "bias" not in name}
        assert len(mine) == 2, f"{site.path}: V and O are {mine}"
    assert not any("norm" in name.lower() for name in ov)


def _parts_of(name: str) -> str:
    path, _, attribute = name.rpartition(".")
    return f"{path}.parametrizations.{attribute}".removeprefix(".")


def test_the_groups_of_a_fused_model_by_name() -> None:
    model = tiny("gpt2")
    groups = param_groups(model, lr=1e-3, qk_lr_ratio=4.0, weight_decay=0.02)
    assert [(g["name"], g["lr"], g["weight_decay"]) for g in groups] == [
        ("qk/decay", 4e-3, 0.005),
        ("qk/no_decay", 4e-3, 0.0),
        ("ov/decay", 1e-3, 0.02),
        ("ov/no_decay", 1e-3, 0.0),
        ("rest/decay", 1e-3, 0.02),
        ("rest/no_decay", 1e-3, 0.0),
    ]
    here = "transformer.h.1.attn"
    split = f"{here}.c_attn.parametrizations"
    assert names_in(groups, model, "qk/decay") == {
        n.replace("h.1", f"h.{i}") for n in (f"{split}.weight.qk",) for i in (0, 1)
    }
    assert f"{split}.bias.qk" in names_in(groups, model, "qk/no_decay")
    assert {f"{split}.weight.rest", f"{here}.c_proj.weight"} <= names_in(groups, model, "ov/decay")
    assert {f"{split}.bias.rest", f"{here}.c_proj.bias"} <= names_in(groups, model, "ov/no_decay")
    assert {"transformer.wte.weight", "transformer.wpe.weight"} <= names_in(groups, model, "rest/decay")
    assert "transformer.h.0.ln_1.weight" in names_in(groups, model, "rest/no_decay")
    assert sum(p is model.lm_head.weight for g in groups for p in g["params"]) == 1  # tied to wte


def test_decay_is_that_of_the_trainer() -> None:
    """The published rule, with norms of any class: GPT-2's ln_1 is a LayerNorm, LLaMA's norms are RMS norms."""
    from transformers import Trainer

    for name in ("gpt2", "bert", "modernbert", "phi3"):
        model = tiny(name)
        theirs = set(Trainer.get_decay_parameter_names(None, model))  # type: ignore[arg-type]
        groups = param_groups(model, lr=1e-3, weight_decay=0.1)
        ours = {row["parameter"] for row in describe_groups(model, groups) if row["weight_decay"]}
        assert ours == theirs & {n for n, _ in model.named_parameters()}, name


def test_decay_per_step_is_the_same_in_every_group_unless_asked_otherwise() -> None:
    model = tiny("bert")
    decays = [g for g in param_groups(model, lr=1e-3, qk_lr_ratio=7.0, weight_decay=0.1) if g["weight_decay"]]
    assert [g["lr"] * g["weight_decay"] for g in decays] == pytest.approx([1e-4] * 3, rel=1e-15)
    groups = param_groups(model, lr=1e-3, qk_lr_ratio=7.0, weight_decay=0.1, decoupled_decay=False)
    assert {g["weight_decay"] for g in groups if g["name"].endswith("/decay")} == {0.1}


def test_frozen_parameters_are_in_no_group_and_are_not_split() -> None:
    model = tiny("gpt2")
    model.transformer.h[0].requires_grad_(False)
    groups = param_groups(model, lr=1e-3, qk_lr_ratio=4.0)
    assert not any(name.startswith("transformer.h.0.") for name in names_in(groups, model, ""))
    assert not is_split(model.transformer.h[0].attn.c_attn)
    assert is_split(model.transformer.h[1].attn.c_attn)


@pytest.mark.parametrize("name", ["bert", "gpt2", "encoder"])
def test_the_self_score_has_a_group_and_a_rate(name: str) -> None:
    model = decouple_(tiny(name), init="diagonal")
    expected = computed(model).detach()
    groups = param_groups(model, lr=1e-3, qk_lr_ratio=4.0, self_score_lr_ratio=0.5, weight_decay=0.1)
    (group,) = (g for g in groups if g["name"].startswith("self_score"))
    assert (group["name"], group["lr"], group["weight_decay"]) == ("self_score/decay", 5e-4, 0.2)
    assert [tuple(p.shape) for p in group["params"]] == [(3, 24)] * 2
    assert names_in(groups, model, "qk")
    assert len([n for n in names_in(groups, model, "ov") if "bias" not in n]) == 4
    out = computed(model)
    assert torch.equal(out, expected)
    out.square().mean().backward()
    assert all(
        p.grad.any() for g in groups for p in g["params"] if g["name"] in ("self_score/decay", "qk/decay")
    )


def test_cross_attention_and_a_fused_key_and_value() -> None:
    model = tiny("gpt2", add_cross_attention=True)
    groups = param_groups(model, lr=1e-3, qk_lr_ratio=2.0)
    at = "transformer.h.0.crossattention"
    assert {f"{at}.q_attn.weight", f"{at}.c_attn.parametrizations.weight.qk"} <= names_in(groups, model, "qk")
    assert {f"{at}.c_attn.parametrizations.weight.rest", f"{at}.c_proj.weight"} <= names_in(
        groups, model, "ov"
    )


def test_separate_weights_with_one_fused_bias() -> None:
    model = nn.MultiheadAttention(24, 3, kdim=20, vdim=16)
    groups = param_groups(model, lr=1e-3, qk_lr_ratio=2.0)
    qk_names = {"q_proj_weight", "k_proj_weight", "parametrizations.in_proj_bias.qk"}
    assert names_in(groups, model, "qk") == qk_names
    rest = {"v_proj_weight", "parametrizations.in_proj_bias.rest", "out_proj.weight", "out_proj.bias"}
    assert names_in(groups, model, "ov") == rest


class Headwise(nn.Module):
    """An attention with W_Q, W_K, W_V, W_O per head, as TransformerLens has them."""

    def __init__(self) -> None:
        super().__init__()
        for name, shape in (("Q", (3, 8, 5)), ("K", (3, 8, 5)), ("V", (3, 8, 5)), ("O", (3, 5, 8))):
            setattr(self, f"W_{name}", nn.Parameter(torch.randn(shape)))
            setattr(self, f"b_{name}", nn.Parameter(torch.zeros(shape[::2] if name != "O" else 8)))


def test_weights_per_head() -> None:
    model = nn.ModuleDict({"attn": Headwise(), "mlp": nn.Linear(8, 8)})
    groups = param_groups(model, lr=1e-3, qk_lr_ratio=2.0, weight_decay=0.1)
    assert names_in(groups, model, "qk/decay") == {"attn.W_Q", "attn.W_K"}
    assert names_in(groups, model, "qk/no_decay") == {"attn.b_Q", "attn.b_K"}
    assert names_in(groups, model, "ov/decay") == {"attn.W_V", "attn.W_O"}
    assert names_in(groups, model, "ov/no_decay") == {"attn.b_V", "attn.b_O"}


class Adapted(nn.Module):
    """A frozen projection with a low-rank part, with the names that peft gives them."""

    def __init__(self, base: Any, inputs: int, outputs: int) -> None:
        super().__init__()
        self.base_layer = base.requires_grad_(False)
        self.lora_A = nn.ModuleDict({"default": nn.Linear(inputs, 2, bias=False)})
        self.lora_B = nn.ModuleDict({"default": nn.Linear(2, outputs, bias=False)})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base_layer(x) + self.lora_B["default"](self.lora_A["default"](x))


def test_an_adapter_learns_at_the_rate_of_what_it_adapts() -> None:
    model = tiny("bert")
    own = model.bert.encoder.layer[1].attention.self
    own.query, own.value = Adapted(own.query, 24, 24), Adapted(own.value, 24, 24)
    groups = param_groups(model, lr=1e-3, qk_lr_ratio=2.0)
    at = "bert.encoder.layer.1.attention.self"
    lora = {f"lora_{side}.default.weight" for side in "AB"}
    assert {n for n in names_in(groups, model, "qk") if "lora" in n} == {f"{at}.query.{n}" for n in lora}
    assert {n for n in names_in(groups, model, "ov") if "lora" in n} == {f"{at}.value.{n}" for n in lora}
    assert f"{at}.query.weight" not in names_in(groups, model, "")


def test_an_adapter_on_a_fused_weight_is_refused() -> None:
    model = tiny("gpt2")
    attention = model.transformer.h[1].attn
    attention.c_attn = Adapted(attention.c_attn, 24, 72)
    with pytest.raises(
        SurgeryError, match=r"h\.1\.attn\.c_attn\.\w+' holds Q, K and V and has an adapter.*merge"
    ):
        param_groups(model, lr=1e-3, qk_lr_ratio=2.0)
    assert not any(is_split(m) for m in model.modules())


@pytest.mark.parametrize("ov", [True, False])
def test_collapsed_circuits(ov: bool) -> None:
    model = collapse_(tiny("encoder"), ov=ov)
    groups = param_groups(model, lr=1e-3, qk_lr_ratio=2.0, weight_decay=0.1)
    names = {"qk/decay": {"W_QK"}, "qk/no_decay": {"b_K"}, "ov/no_decay": {"b_O"}}
    names["ov/decay"] = {"W_OV"} if ov else {"W_V", "W_O"}
    for group, its in names.items():
        assert names_in(groups, model, group) == {f"layers.{i}.self_attn.{n}" for i in (0, 1) for n in its}


@pytest.mark.parametrize("name", ["bert", "gpt2"])
def test_collapsed_circuits_of_hugging_face_models(name: str) -> None:
    model = collapse_(tiny(name))
    groups = param_groups(model, lr=1e-3, qk_lr_ratio=2.0)
    at, q, o = {
        "bert": ("bert.encoder.layer.1.attention", "self.query", "output.dense"),
        "gpt2": ("transformer.h.1.attn", "c_attn.query", "c_proj"),
    }[name]
    assert {f"{at}.{q}.weight", f"{at}.{q}.bias"} <= names_in(groups, model, "qk")
    assert {f"{at}.{o}.weight", f"{at}.{o}.bias"} <= names_in(groups, model, "ov")
    assert not {n for n in names_in(groups, model, "rest") if ".attn." in n or "query" in n}


def test_terms_of_the_score_that_are_no_q_and_k_are_left_in_the_rest() -> None:
    """DeBERTa's position projections are of the shape of an output projection, and are none."""
    truth.quiet()
    config = transformers.DebertaV2Config(
        **SMALL, hidden_size=24, num_attention_heads=3, num_hidden_layers=1, intermediate_size=20,
        relative_attention=True, pos_att_type=["c2p"],
    )  # fmt: skip
    model = transformers.DebertaV2Model(config)
    groups = param_groups(model, lr=1e-3, qk_lr_ratio=2.0)
    at = "encoder.layer.0.attention"
    assert {f"{at}.self.value_proj.weight", f"{at}.output.dense.weight"} <= names_in(groups, model, "ov")
    assert f"{at}.self.pos_key_proj.weight" in names_in(groups, model, "rest")


@pytest.mark.parametrize(
    ("name", "group"), [("mixer", "ov"), ("o_proj", "ov"), ("pos_proj", "rest"), ("gate", "rest")]
)
def test_an_output_projection_of_another_name_is_known_by_its_shape(name: str, group: str) -> None:
    """Where it is the only matrix left, and is not called a term of the score or a gate."""
    model = nn.Module()
    model.attn = nn.ModuleDict({n: nn.Linear(12, 12) for n in ("q_proj", "k_proj", "v_proj", name)})
    model.attn.num_heads = 3
    groups = param_groups(model, lr=1e-3, qk_lr_ratio=2.0)
    assert names_in(groups, model, "ov") >= {"attn.v_proj.weight", "attn.v_proj.bias"}
    assert f"attn.{name}.weight" in names_in(groups, model, group)


# ---- a split weight ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FUSED)
def test_a_split_model_computes_the_same_bit_for_bit(name: str) -> None:
    model = tiny(name)
    stock = copy.deepcopy(model)
    groups = param_groups(model, lr=1e-3, qk_lr_ratio=3.0)
    assert any(".parametrizations." in f".{n}" for n, _ in model.named_parameters())
    one, other = computed(stock), computed(model)
    assert torch.equal(one, other)
    one.square().mean().backward()
    other.square().mean().backward()
    grads = {n: p.grad for n, p in stock.named_parameters()}
    for module_path, module in model.named_modules():
        if is_split(module):
            for attribute, halves in module.parametrizations.items():
                whole = halves.cut(grads[f"{module_path}.{attribute}".removeprefix(".")])
                assert torch.equal(halves.qk.grad, whole[0])
                assert torch.equal(halves.rest.grad, whole[1])
    for training in (True, False):
        with torch.no_grad():
            assert torch.equal(computed(stock.train(training)), computed(model.train(training)))
    assert len([p for g in groups for p in g["params"]]) == len(list(model.parameters()))


@pytest.mark.parametrize("name", FUSED)
def test_a_split_model_scans_as_before_and_its_sites_give_gradients(name: str) -> None:
    model = tiny(name)
    options = {} if name not in ("mha", "encoder") else {"heads": 3}
    before = qk.scan(model, **options).models[0].rows
    param_groups(model, lr=1e-3, qk_lr_ratio=3.0)
    assert qk.scan(model, **options).models[0].rows == before
    for site in sites.find(model):
        halves = parts(site.shares["w_q"].at.owner, site.shares["w_q"].at.attribute)
        assert halves is not None
        halves.qk.grad = halves.rest.grad = None
        (site.w_q().sum() + 2 * site.w_k().sum()).backward()
        assert halves.qk.grad.sum().item() == pytest.approx(site.w_q().numel() + 2 * site.w_k().numel())
        assert halves.qk.numel() == site.w_q().numel() + site.w_k().numel()
        assert not halves.rest.grad.any()


@pytest.mark.parametrize("name", FUSED)
def test_splitting_twice_is_splitting_once_and_unsplitting_undoes_it(name: str) -> None:
    model = tiny(name)
    state = {n: p.detach().clone() for n, p in model.named_parameters()}
    classes = [type(m) for m in model.modules()]
    first = param_groups(model, lr=1e-3, qk_lr_ratio=3.0)
    again = param_groups(model, lr=1e-3, qk_lr_ratio=3.0)
    assert [[id(p) for p in g["params"]] for g in first] == [[id(p) for p in g["params"]] for g in again]
    unsplit_(model)
    assert [type(m) for m in model.modules()] == classes
    assert not any("parametrizations" in n for n, _ in model.named_modules())
    assert list(state) == [n for n, _ in model.named_parameters()]  # in the order it had
    assert all(torch.equal(state[n], p) for n, p in model.named_parameters())
    computed(model).sum().backward()


def test_a_class_that_others_put_before_ours_does_not_hide_the_stock_one() -> None:
    model = tiny("gpt2").eval()
    before, module = computed(model), model.transformer.h[0].attn.c_attn
    kind = type(module)
    param_groups(model, lr=1e-3, qk_lr_ratio=2.0)
    ours = type(module)
    module.__class__ = type("Sharded", (ours,), {})  # as fully_shard does
    unsplit_(model)
    assert type(module) is kind
    assert torch.equal(computed(model), before)


def test_unsplitting_puts_parameters_back_where_they_stood() -> None:
    model = tiny("gpt2")
    for block in model.transformer.h:
        block.attn.c_attn.bias.requires_grad_(False)  # so that the weight alone is split
    names = [n for n, _ in model.named_parameters()]
    param_groups(model, lr=1e-3, qk_lr_ratio=3.0)
    assert [n for n, _ in model.named_parameters()] != names
    assert [n for n, _ in unsplit_(model).named_parameters()] == names


def test_a_ratio_of_one_splits_nothing() -> None:
    model = tiny("gpt2")
    groups = param_groups(model, lr=1e-3, self_score_lr_ratio=2.0)
    assert not any(is_split(m) for m in model.modules())
    assert "transformer.h.0.attn.c_attn.weight" in names_in(groups, model, "qk/decay")


@pytest.mark.parametrize("name", PRETRAINED)
def test_files_of_a_split_model_are_those_of_the_stock_model(name: str, tmp_path: Path) -> None:
    from safetensors.torch import load_file

    model = tiny(name)
    model.save_pretrained(tmp_path / "stock")
    param_groups(model, lr=1e-3, qk_lr_ratio=3.0)
    model.save_pretrained(tmp_path / "split")
    stock, split = (load_file(tmp_path / kind / "model.safetensors") for kind in ("stock", "split"))
    assert stock.keys() == split.keys()
    assert all(torch.equal(stock[n], split[n]) for n in stock)
    configs = [json.loads((tmp_path / kind / "config.json").read_text()) for kind in ("stock", "split")]
    assert configs[0] == configs[1]
    again = type(model).from_pretrained(tmp_path / "split")
    assert torch.equal(computed(model.eval()), computed(again.eval()))
    assert qk.scan(tmp_path / "split").models[0].rows == qk.scan(tmp_path / "stock").models[0].rows


@pytest.mark.parametrize("name", FUSED)
@pytest.mark.parametrize("assign", [False, True], ids=["copied", "assigned"])
def test_a_stock_state_dict_loads_into_a_split_model_and_back(name: str, assign: bool) -> None:
    model, other = tiny(name), tiny(name)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.normal_()
    stock = {n: v.clone() for n, v in other.state_dict().items()}
    param_groups(model, lr=1e-3, qk_lr_ratio=3.0)
    assert list(model.state_dict().keys()) == list(stock) or model.state_dict().keys() == stock.keys()
    result = model.load_state_dict(stock, assign=assign)
    assert not result.missing_keys
    assert not result.unexpected_keys
    assert torch.equal(computed(other), computed(model))
    tiny(name).load_state_dict(model.state_dict())
    if assign:
        model.load_state_dict({n: v.double() for n, v in stock.items()}, assign=True)
        assert {p.dtype for p in model.parameters()} == {torch.float64}


def test_a_state_dict_that_does_not_fit_is_refused_under_the_stock_names() -> None:
    model = tiny("gpt2")
    param_groups(model, lr=1e-3, qk_lr_ratio=3.0)
    state = model.state_dict()
    name = "transformer.h.0.attn.c_attn.weight"
    with pytest.raises(RuntimeError, match=rf"Missing key.*{re.escape(name)}"):
        model.load_state_dict({n: v for n, v in state.items() if n != name})
    missing = model.load_state_dict({n: v for n, v in state.items() if n != name}, strict=False).missing_keys
    assert missing == [name]
    with pytest.raises(RuntimeError, match=rf"size mismatch for {re.escape(name)}.*\[24, 5\]"):
        model.load_state_dict({**state, name: torch.zeros(24, 5)})
    with pytest.raises(RuntimeError, match=r"Unexpected key.*c_attn\.parametrizations"):
        model.load_state_dict(
            {**state, "transformer.h.0.attn.c_attn.parametrizations.weight.qk": torch.zeros(3)}
        )


@pytest.mark.parametrize("name", ["gpt2", "gpt_neox", "mha", "encoder"])
def test_copies_and_pickles_of_a_split_model_are_models_of_their_own(name: str) -> None:
    model = tiny(name)
    param_groups(model, lr=1e-3, qk_lr_ratio=3.0)
    expected = computed(model).detach()
    stream = io.BytesIO()
    torch.save(model, stream)
    stream.seek(0)
    copies = [copy.deepcopy(model), pickle.loads(pickle.dumps(model)), torch.load(stream, weights_only=False)]  # noqa: S301
    for other in copies:
        assert torch.equal(computed(other), expected)
        assert not {id(p) for p in other.parameters()} & {id(p) for p in model.parameters()}
        assert [n for n, _ in other.named_parameters()] == [n for n, _ in model.named_parameters()]
        unsplit_(other)
    assert any(is_split(m) for m in model.modules())
    assert torch.equal(computed(model), expected)


@pytest.mark.parametrize(
    "name", ["gpt2", *(pytest.param(name, marks=pytest.mark.slow) for name in ("gpt_neox", "encoder"))]
)
def test_a_split_model_compiles_without_a_graph_break(name: str) -> None:
    torch._dynamo.reset()
    model = tiny(name)
    expected = computed(model).detach()
    param_groups(model, lr=1e-3, qk_lr_ratio=3.0)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    x = torch.randn(3, 7, 24, generator=torch.Generator().manual_seed(2))
    found = compiled(x) if name == "encoder" else compiled(input_ids=ids(), use_cache=False).logits
    assert torch.allclose(found, expected, atol=1e-6)
    found.square().sum().backward()
    for module in model.modules():
        if is_split(module):
            assert all(h.qk.grad.any() and h.rest.grad.any() for h in module.parametrizations.values())
    torch._dynamo.reset()


def test_types_and_gradient_checkpointing() -> None:
    model = tiny("gpt2")
    param_groups(model, lr=1e-3, qk_lr_ratio=3.0)
    model.train()
    computed(model).square().mean().backward()
    plain = {n: p.grad.clone() for n, p in model.named_parameters()}
    model.zero_grad()
    for block in model.transformer.h:
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)
    model(input_ids=ids(), use_cache=False).logits.square().mean().backward()
    assert all(torch.allclose(p.grad, plain[n], atol=1e-7) for n, p in model.named_parameters())
    assert model.double().transformer.h[0].attn.c_attn.weight.dtype == torch.float64


def test_a_pattern_of_rows_is_cut_and_joined() -> None:
    """Any choice of rows, along either side."""
    rng = np.random.default_rng(0)
    for rows in (2, 7, 12, 30):
        for _ in range(10):
            chosen = rng.random(rows) < 0.5
            if chosen.all() or not chosen.any():
                continue
            for dim, shape in ((0, (rows, 5)), (1, (5, rows)), (0, (rows,))):
                module = nn.Module()
                module.weight = nn.Parameter(torch.randn(shape))
                whole = module.weight.detach().clone()
                split_(module, module, "weight", chosen, dim)
                halves = parts(module, "weight")
                assert halves is not None
                kept = torch.from_numpy(np.flatnonzero(chosen))
                assert torch.equal(halves.qk, whole.index_select(dim, kept))
                assert torch.equal(module.weight, whole)
                assert module.weight.is_contiguous()


# ---- training ----------------------------------------------------------------------------------------------


class Apart(nn.Module):
    """Q, K and V as projections of their own, put together as the stock fused projection puts them out."""

    def __init__(self, fused: Any, heads: int, interleaved: bool) -> None:
        super().__init__()
        weight = fused.weight.detach() if isinstance(fused, nn.Linear) else fused.weight.detach().T
        self.heads, self.interleaved = heads, interleaved
        width = weight.shape[0] // 3
        for i, name in enumerate(("q", "k", "v")):
            own = nn.Linear(weight.shape[1], width)
            rows = (
                torch.arange(3 * width).view(heads, 3, -1)[:, i].reshape(-1)
                if interleaved
                else torch.arange(3 * width)[i * width : (i + 1) * width]
            )
            own.weight.data, own.bias.data = weight[rows].clone(), fused.bias.detach()[rows].clone()
            setattr(self, name, own)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made = [self.q(x), self.k(x), self.v(x)]
        if not self.interleaved:
            return torch.cat(made, -1)
        return torch.stack([m.unflatten(-1, (self.heads, -1)) for m in made], -2).flatten(-3)

    def fused(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The weight and bias in the order of the stock projection, (out, in) and (out,)."""
        weights, biases = ([getattr(getattr(self, n), p) for n in "qkv"] for p in ("weight", "bias"))
        if not self.interleaved:
            return torch.cat(weights), torch.cat(biases)
        return (
            torch.stack([w.unflatten(0, (self.heads, -1)) for w in weights], 1).flatten(0, 2),
            torch.stack([b.view(self.heads, -1) for b in biases], 1).reshape(-1),
        )


def _fused_modules(model: Any, name: str) -> Iterator[tuple[Any, str]]:
    if name == "gpt2":
        yield from ((block.attn, "c_attn") for block in model.transformer.h)
    else:
        yield from ((layer.attention, "query_key_value") for layer in model.gpt_neox.layers)


OPTIMIZERS: Mapping[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adamw": torch.optim.AdamW,
    "sgd": lambda groups: torch.optim.SGD(groups, momentum=0.9, lr=1.0),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("name", ["gpt2", "gpt_neox"])
def test_a_split_model_trains_as_one_with_separate_projections(
    name: str, optimizer: str, dtype: torch.dtype
) -> None:
    """50 steps, the rate of Q and K four times the others': losses and parameters agree, in float64 to 1e-11.

    In float32 losses agree to 1e-6. Adam divides rounding errors by the size of the gradient where that is small, so
    parameters agree to 1e-5 only (1e-6 here), and key biases do not count: softmax cancels what they add, their
    gradient is nothing but rounding error, and Adam takes whole steps along it.
    """
    steps, ratio, decay = 50, 4.0, 0.1
    lr = 1e-3 if optimizer == "adamw" else 2e-2
    tolerance = 1e-11 if dtype == torch.float64 else 1e-5 if optimizer == "adamw" else 1e-6
    split, apart = tiny(name).to(dtype), tiny(name).to(dtype)
    groups = param_groups(split, lr=lr, qk_lr_ratio=ratio, weight_decay=decay)
    fast, slow = [], []
    for module, attribute in _fused_modules(apart, name):
        setattr(module, attribute, Apart(getattr(module, attribute), 3, name == "gpt_neox"))
    for n, parameter in apart.named_parameters():
        (fast if re.search(r"\.(c_attn|query_key_value)\.[qk]\.", n) else slow).append((n, parameter))

    def decays(n: str) -> bool:
        return not ("bias" in n or "ln_" in n or "layernorm" in n or "layer_norm" in n)

    by_hand = [
        {"params": [p for n, p in some if decays(n) == kind], "lr": rate, "weight_decay": wd if kind else 0.0}
        for some, rate, wd in ((fast, lr * ratio, decay / ratio), (slow, lr, decay))
        for kind in (True, False)
    ]
    losses = []
    for model, its in ((split, groups), (apart, by_hand)):
        stepper = OPTIMIZERS[optimizer](its)
        history = []
        for step in range(steps):
            batch = torch.randint(3, 41, (4, 9), generator=torch.Generator().manual_seed(step % 5))
            loss = model(input_ids=batch, labels=batch).loss
            stepper.zero_grad()
            loss.backward()
            stepper.step()
            history.append(loss.item())
        losses.append(history)
    assert losses[0] == pytest.approx(losses[1], rel=0, abs=min(tolerance, 1e-6))
    assert losses[0][-1] < losses[0][0] - 0.1
    pairs = zip(_fused_modules(split, name), _fused_modules(apart, name), strict=True)
    for (module, attribute), (other, _) in pairs:
        weight, bias = getattr(other, attribute).fused()
        own = getattr(module, attribute)
        found = own.weight.T if name == "gpt2" else own.weight
        assert (found - weight).abs().max().item() < tolerance
        biases = (own.bias - bias).abs().view(*((3, 3, 8) if name == "gpt_neox" else (3, 24)))
        of_keys = 1 if name == "gpt_neox" else 0  # (heads, q k v, d_head), or (q k v, all)
        counted = torch.tensor([0, 1, 2] if optimizer == "sgd" or dtype == torch.float64 else [0, 2])
        assert biases.index_select(of_keys, counted).max().item() < tolerance
    named = dict(split.named_parameters())
    common = [n for n, _ in apart.named_parameters() if n in named]
    assert len(common) > 10
    assert (
        max((named[n] - p).abs().max().item() for n, p in apart.named_parameters() if n in named) < tolerance
    )


def test_a_rate_is_not_a_scaled_gradient_under_adam() -> None:
    """What the docstring says: a gradient times 4 leaves Adam's steps as they were, a rate times 4 does not."""
    start = tiny("bert")
    moved = {}
    for name, scale, ratio in (("plain", 1.0, 1.0), ("gradient", 4.0, 1.0), ("rate", 1.0, 4.0)):
        model = copy.deepcopy(start)
        stepper = torch.optim.Adam(param_groups(model, lr=1e-3, qk_lr_ratio=ratio), eps=1e-30)
        query = model.bert.encoder.layer[0].attention.self.query.weight
        query.register_hook(lambda g, scale=scale: g * scale)
        model(input_ids=ids(), labels=ids()).loss.backward()
        stepper.step()
        moved[name] = (query - start.bert.encoder.layer[0].attention.self.query.weight).detach()
    assert torch.allclose(moved["gradient"], moved["plain"], rtol=1e-4, atol=1e-8)
    assert torch.allclose(moved["rate"], 4 * moved["plain"], rtol=1e-3, atol=1e-8)


def test_an_interrupted_run_goes_on_where_it_was(tmp_path: Path) -> None:
    """Model and optimizer saved, built anew, loaded, and trained on: the run without a break, bit for bit."""

    def trained(model: Any, stepper: Any, steps: range) -> None:
        for step in steps:
            batch = torch.randint(3, 41, (2, 7), generator=torch.Generator().manual_seed(step))
            stepper.zero_grad()
            model(input_ids=batch, labels=batch).loss.backward()
            stepper.step()

    def fresh(model: Any) -> Any:
        return torch.optim.AdamW(param_groups(model, lr=1e-3, qk_lr_ratio=4.0, weight_decay=0.1))

    whole = tiny("gpt2")
    stepper = fresh(whole)
    trained(whole, stepper, range(3))
    whole.save_pretrained(tmp_path)
    torch.save(stepper.state_dict(), tmp_path / "optimizer.pt")
    trained(whole, stepper, range(3, 6))

    resumed = transformers.GPT2LMHeadModel.from_pretrained(tmp_path)
    stepper = fresh(resumed.train())
    stepper.load_state_dict(torch.load(tmp_path / "optimizer.pt"))
    trained(resumed, stepper, range(3, 6))
    assert all(torch.equal(p, q) for p, q in zip(whole.parameters(), resumed.parameters(), strict=True))


# ---- what cannot be done -----------------------------------------------------------------------------------


def test_a_model_without_attention_is_refused() -> None:
    with pytest.raises(SurgeryError, match="attention"):
        param_groups(nn.Sequential(nn.Linear(3, 3)), lr=1e-3)


@pytest.mark.parametrize("ratio", [0.0, -1.0, float("nan"), float("inf")])
def test_a_ratio_that_is_not_positive_is_refused(ratio: float) -> None:
    with pytest.raises(SurgeryError, match=r"qk_lr_ratio is .*requires_grad"):
        param_groups(tiny("mha"), lr=1e-3, qk_lr_ratio=ratio)


@pytest.mark.parametrize(
    "given", [{"lr": float("nan")}, {"lr": -1.0}, {"weight_decay": -0.1}, {"weight_decay": float("inf")}]
)
def test_a_rate_or_a_decay_that_is_none_is_refused(given: dict[str, float]) -> None:
    (name,) = given
    with pytest.raises(SurgeryError, match=f"^{name} is .*; expected a number from 0"):
        param_groups(tiny("bert"), **{"lr": 1e-3, **given})


@pytest.mark.parametrize(
    ("key", "value"),
    [("key", "value"), ("keys", "values"), ("Key", "Value"), ("k_proj", "v_proj"), ("KProj", "VProj"), ("Wk", "Wv"),
     ("w_k", "w_v"), ("K", "V"), ("wk", "wv"), ("key_proj", "value_proj"), ("kv", None), ("dense", None)],
)  # fmt: skip
def test_values_are_named_as_keys_are(key: str, value: str | None) -> None:
    assert circuits.value_name(key) == value
    assert rebuilt._named_value(f"a.{key}.weight") == (value and f"a.{value}.weight")
    assert rebuilt._named_value(f"a.{key}") == (value and f"a.{value}")


class DistributedDataParallel(nn.Module):
    """What the wrapper of torch looks like from outside."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module


def test_splitting_comes_before_wrapping() -> None:
    model = tiny("gpt2")
    with pytest.raises(
        SurgeryError, match=r"transformer\.h\.0\.attn\.c_attn\.weight: .*before it is wrapped"
    ):
        param_groups(DistributedDataParallel(model), lr=1e-3, qk_lr_ratio=2.0)
    assert not any(is_split(m) for m in model.modules())
    before = param_groups(model, lr=1e-3, qk_lr_ratio=2.0)
    after = param_groups(DistributedDataParallel(model), lr=1e-3, qk_lr_ratio=2.0)
    assert [[id(p) for p in g["params"]] for g in before] == [[id(p) for p in g["params"]] for g in after]


def test_a_fused_weight_that_is_tied_is_refused_and_nothing_is_left_split() -> None:
    model = nn.ModuleList([nn.MultiheadAttention(24, 3) for _ in range(3)])
    model[2].in_proj_weight = model[1].in_proj_weight
    with pytest.raises(SurgeryError, match=r"in_proj_weight.*tied"):
        param_groups(model, lr=1e-3, qk_lr_ratio=2.0)
    assert not any(is_split(m) for m in model.modules())
    param_groups(model, lr=1e-3)


def test_q_and_k_that_are_products_are_refused() -> None:
    truth.quiet()
    config = transformers.DeepseekV3Config(
        **SMALL, hidden_size=32, num_attention_heads=4, num_key_value_heads=4, num_hidden_layers=1,
        intermediate_size=20, first_k_dense_replace=1, q_lora_rank=8, kv_lora_rank=8, qk_rope_head_dim=4,
        qk_nope_head_dim=4, v_head_dim=8,
    )  # fmt: skip
    model = transformers.DeepseekV3Model(config)
    with pytest.raises(SurgeryError, match=r"layers\.0\.self_attn.*product"):
        param_groups(model, lr=1e-3, qk_lr_ratio=2.0)
    both = nn.ModuleDict({"one": tiny("gpt2"), "other": model})
    with pytest.raises(SurgeryError, match=r"other\.layers\.0\.self_attn.*product.*leave qk_lr_ratio at 1"):
        param_groups(both, lr=1e-3, qk_lr_ratio=2.0)
    assert not any(is_split(m) for m in both.modules())
    groups = param_groups(both, lr=1e-3)
    assert "other.layers.0.self_attn.q_b_proj.weight" in names_in(groups, both, "rest")


def test_a_parametrized_weight_is_refused() -> None:
    model = tiny("gpt2")
    torch.nn.utils.parametrizations.weight_norm(model.transformer.h[1].attn.c_attn, "weight")
    with pytest.raises(SurgeryError, match=r"transformer\.h\.1\.attn\.c_attn\.weight.*parametrization"):
        param_groups(model, lr=1e-3, qk_lr_ratio=2.0)
    assert not any(is_split(m) for m in model.modules())
