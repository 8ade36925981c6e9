"""Live models: the scan of a model in memory is that of its file, and its sites hold its weights."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from dataclasses import is_dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import qkform as qk
from qkform import samples, sites
from qkform.errors import ConfigError, FormError, LayoutError, SourceError
from qkform.form import reference
from qkform.layouts.rules import Rule, families
from qkform.sites.naming import origins
from qkform.sites.standing import above
from qkform.wrappers import WRAPPERS
from tests import truth

CASES = [case for case in truth.CASES if case.write is None]
PLACES = ("module", "component")  # of the live model: other names than in the file


def case_named(name: str) -> truth.Case:
    return next(case for case in truth.CASES if case.name == name)


def built(case: truth.Case) -> Any:
    return truth._torch_model(case.build, case.settings) if case.member == "torch" else truth.build(case)


def model_of(name: str) -> Any:
    return built(case_named(name))


def rows_of(source: Any, **options: Any) -> list[dict[str, Any]]:
    return [
        {k: v for k, v in row.items() if k not in PLACES} for row in qk.scan(source, **options).models[0].rows
    ]


def assert_same_scan(one: Any, other: Any, **options: Any) -> None:
    assert rows_of(one, **options) == rows_of(other)


def bert() -> Any:
    return model_of("bert")


# ---- what a scan says --------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_live_model_scans_as_its_file_does(case: truth.Case, tmp_path: Path) -> None:
    model = built(case)
    truth.save(case, model, tmp_path)
    filed, live = list(qk.layers(tmp_path, **case.options)), list(qk.layers(model))
    assert [layer.module for layer in live] == [truth.live_path(case, layer.module) for layer in filed]
    for f, a in zip(filed, live, strict=True):
        assert np.array_equal(f.form.w_q, a.form.w_q)
        assert np.array_equal(f.form.w_k, a.form.w_k)
        assert replace(f, module=a.module, component=a.component, q=a.q, k=a.k, norm=a.norm) == a
        assert a.component == "" or a.module.startswith(f"{a.component}.")
        model.get_submodule(a.module)
    assert rows_of(tmp_path, **case.options) == rows_of(model)
    filed_skips, live_skips = (
        len(qk.scan(s, signature="none", **o).models[0].skipped)
        for s, o in ((tmp_path, case.options), (model, {}))
    )
    assert filed_skips == live_skips


def test_many_types_are_walked() -> None:
    assert len({case.member for case in CASES}) >= 55


def test_the_real_sample_scans_alike_from_memory() -> None:
    transformers = pytest.importorskip("transformers")
    try:
        folder = samples.fetch("minilm")
    except SourceError as error:
        pytest.skip(f"sample:minilm is not to be had here: {error}")
    truth.quiet()
    model = transformers.AutoModel.from_pretrained(folder)
    (scores,) = qk.scan(model).models
    assert_same_scan("sample:minilm", model)
    assert scores.source == f"BertModel ({folder})"
    assert (scores.format, scores.model_type, scores.step) == ("live", "bert", None)
    assert scores.layers[0]["symmetry"] == pytest.approx(0.405, abs=5e-4)


def test_a_scan_changes_nothing(tmp_path: Path) -> None:
    model = model_of("gpt2").train()
    model.h[0].attn.c_attn.weight.grad = torch.ones_like(model.h[0].attn.c_attn.weight)
    state = {n: (t.clone(), t._version, t.data_ptr()) for n, t in model.state_dict(keep_vars=True).items()}
    attributes = {path: set(vars(m)) for path, m in model.named_modules()}
    qk.scan(model)
    sites.find(model)
    with torch.no_grad():
        qk.scan(model)
    assert model.training
    for name, tensor in model.state_dict(keep_vars=True).items():
        old, version, place = state[name]
        assert torch.equal(tensor, old)
        assert (tensor._version, tensor.data_ptr()) == (version, place)
        assert tensor.requires_grad == old.requires_grad
    assert bool((model.h[0].attn.c_attn.weight.grad == 1).all())
    assert attributes == {path: set(vars(m)) for path, m in model.named_modules()}


def test_a_form_is_a_snapshot() -> None:
    """What a layer has read does not follow the model when it trains on."""
    model = bert()
    (site, *_) = sites.find(model)
    layer = site.snapshot()
    before = layer.form.w_q.copy()
    with torch.no_grad():
        model.encoder.layer[0].attention.self.query.weight.add_(1.0)
    assert np.array_equal(layer.form.w_q, before)
    assert np.array_equal(site.form().w_q, site.w_q().detach())
    assert not np.array_equal(site.form().w_q, before)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_every_float_type_scans_as_its_file_does(dtype: torch.dtype, tmp_path: Path) -> None:
    model = bert().to(dtype)
    model.save_pretrained(tmp_path)
    assert_same_scan(tmp_path, model)
    layer = next(qk.layers(model))
    assert str(layer.form.w_q.dtype) == str(dtype).removeprefix("torch.")


def test_bytes_read_are_those_of_q_and_k() -> None:
    model = model_of("phi3")
    (scores,) = qk.scan(model, signature="none").models
    c = model.config
    rows = (c.num_attention_heads + c.num_key_value_heads) * c.head_dim
    assert scores.bytes_read == rows * c.hidden_size * 8 * c.num_hidden_layers


# ---- wrappers and parts ------------------------------------------------------------------------------------


class Wrapped(torch.nn.Module):
    """As DistributedDataParallel holds its model."""

    def __init__(self, module: Any) -> None:
        super().__init__()
        self.module = module


class Sharded(torch.nn.Module):
    def __init__(self, module: Any) -> None:
        super().__init__()
        self._fsdp_wrapped_module = module


def test_wrappers_leave_no_trace() -> None:
    model = bert()
    expected = qk.scan(model).models[0].rows
    compiled = torch.compile(model, backend="eager")
    for wrapped in (compiled, Wrapped(model), Wrapped(compiled), Sharded(Wrapped(model))):
        assert qk.scan(wrapped).models[0].rows == expected
    model.encoder.layer[1] = torch.compile(model.encoder.layer[1], backend="eager")
    model.encoder.layer[2] = Sharded(model.encoder.layer[2])
    assert qk.scan(model).models[0].rows == expected
    assert [s.path for s in sites.find(model)] == [f"encoder.layer.{i}.attention.self" for i in range(3)]


@pytest.mark.parametrize("wrapper", sorted(set(WRAPPERS) - {"base_layer"}))
def test_every_wrapper_leaves_no_trace(wrapper: str) -> None:
    """The names are those that `qkform.checkpoints` takes out of the names in files."""

    class Wrapping(torch.nn.Module):
        def __init__(self, module: Any) -> None:
            super().__init__()
            self.add_module(wrapper, module)

    model = bert()
    expected = qk.scan(model).models[0].rows
    assert qk.scan(Wrapping(model)).models[0].rows == expected
    model.encoder.layer[1] = Wrapping(model.encoder.layer[1])
    query = model.encoder.layer[2].attention.self.query
    model.encoder.layer[2].attention.self.query = Wrapping(query)
    assert qk.scan(model).models[0].rows == expected
    site = sites.find(model)[2]
    site.write_(w_q=torch.ones_like(site.w_q()))
    assert bool((query.weight == 1).all())


def test_a_module_called_module_is_no_wrapper_where_it_is_not_alone() -> None:
    model = Wrapped(torch.nn.MultiheadAttention(12, 3))
    assert [a.module for a in qk.layers(model)] == [""]
    model.head = torch.nn.Linear(2, 2)
    assert [a.module for a in qk.layers(model)] == ["module"]
    del model.head
    model.scale = torch.nn.Parameter(torch.ones(1))
    assert [a.module for a in qk.layers(model)] == ["module"]


def test_a_model_inside_a_module_is_found() -> None:
    class Classifier(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.backbone = model_of("vit")
            self.config = self.backbone.config
            self.pool = torch.nn.MultiheadAttention(24, 6)
            self.own = torch.nn.ModuleDict({"q_proj": torch.nn.Linear(24, 24)})

    model = Classifier()
    (scores,) = qk.scan(model).models
    assert [row["module"] for row in scores.layers] == [
        *(f"backbone.layers.{i}.attention" for i in range(3)),
        "pool",
    ]
    assert (scores.source, scores.model_type) == ("Classifier", "vit")
    assert [entry["module"] for entry in scores.skipped] == ["own"]
    alone = [{**r} for r in rows_of(model.backbone)]
    assert [r for r in rows_of(model) if r["d_head"] != 4][: len(alone)] == alone


@pytest.mark.parametrize(
    ("name", "inside", "path"),
    [
        ("bert", "encoder", "layer.1.attention.self"),
        ("bert", "encoder.layer.1", "attention.self"),
        ("bert", "encoder.layer.1.attention.self", ""),
        ("llama", "layers.1.self_attn", ""),
        ("llama, language head", "model", "layers.1.self_attn"),
    ],
)
def test_a_module_of_a_model_scans_alone(name: str, inside: str, path: str) -> None:
    model = model_of(name)
    part = model.get_submodule(inside)
    found = {layer.module: layer for layer in qk.layers(part)}
    whole = next(a for a in qk.layers(model) if a.module == ".".join(filter(None, (inside, path))))
    assert np.array_equal(found[path].form.w_q, whole.form.w_q)
    assert np.array_equal(found[path].form.w_k, whole.form.w_k)
    assert (found[path].mask, found[path].n_kv_heads) == (whole.mask, whole.n_kv_heads)


PAIR = {"vocab_size": 53, "d_model": 24, "encoder_layers": 2, "decoder_layers": 3, "encoder_ffn_dim": 20}
PAIR |= {"decoder_ffn_dim": 20, "encoder_attention_heads": 3, "decoder_attention_heads": 4, "pad_token_id": 0}
PAIRS = {
    "T5": {"vocab_size": 53, "d_model": 24, "d_kv": 6, "num_heads": 3, "d_ff": 20, "num_layers": 2}
    | {"num_decoder_layers": 3},
    "Whisper": PAIR | {"num_mel_bins": 5, "max_source_positions": 11, "eos_token_id": 2},
    "Bart": PAIR,
    "Marian": PAIR | {"decoder_start_token_id": 0},
}


def pair(name: str) -> Any:
    transformers = pytest.importorskip("transformers")
    truth.quiet()
    config = getattr(transformers, f"{name}Config")(**PAIRS[name])
    return getattr(transformers, f"{name}Model")(config).eval()


def assert_found_as_in(model: Any, part: Any, inside: str) -> None:
    """The attentions of a part given alone are those of the whole model."""
    whole = {a.path: a for a in sites.find(model) if a.path.startswith(f"{inside}.")}
    alone = {f"{inside}.{a.path}": a for a in sites.find(part)}
    assert list(alone) == list(whole)
    for path, site in alone.items():
        for side, share in site.shares.items():
            assert share.name == whole[path].shares[side].name.removeprefix(f"{inside}.")
        one, other = site.layer, whole[path].layer
        for fact in ("attention", "mask", "n_heads", "n_kv_heads", "layer", "norm_kind"):
            assert getattr(one, fact) == getattr(other, fact), (path, fact)
        assert site.module is whole[path].module
        form, expected = site.form(), whole[path].form()
        assert np.array_equal(form.w_q, expected.w_q)
        assert np.array_equal(form.w_k, expected.w_k)


@pytest.mark.parametrize("inside", ["encoder", "decoder"])
@pytest.mark.parametrize("name", sorted(PAIRS))
def test_an_encoder_or_a_decoder_alone_is_read_as_in_its_model(name: str, inside: str) -> None:
    model = pair(name)
    assert_found_as_in(model, model.get_submodule(inside), inside)


@pytest.mark.parametrize(
    ("name", "inside", "kinds"),
    [
        ("Whisper", "encoder.layers.1", ["self"]),
        ("Whisper", "decoder.layers.1", ["self", "cross"]),
        ("Bart", "decoder.layers", ["self", "cross"] * 3),
        ("Bart", "encoder.layers", ["self"] * 2),
        ("Whisper", "decoder.layers.0.self_attn", ["self"]),
    ],
)
def test_a_piece_of_a_decoder_has_the_forms_of_its_own(name: str, inside: str, kinds: list[str]) -> None:
    """Several attentions of one piece stand in one place of the family: none is taken for another."""
    model = pair(name)
    whole = {a.path: a for a in sites.find(model)}
    found = sites.find(model.get_submodule(inside))
    assert [site.layer.attention for site in found] == kinds
    for site in found:
        expected = whole[f"{inside}.{site.path}".removesuffix(".")]
        assert site.module is expected.module
        assert site.layer.mask == expected.layer.mask
        assert site.layer.n_heads == expected.layer.n_heads
        assert np.array_equal(site.form().w_q, expected.form().w_q)
        assert np.array_equal(site.form().w_k, expected.form().w_k)


def test_a_type_without_a_layout_is_read_by_the_models_inside_it() -> None:
    transformers = pytest.importorskip("transformers")

    class Config(transformers.PretrainedConfig):
        model_type = "unheard-of"

    class Outer(transformers.PreTrainedModel):
        config_class = Config

        def __init__(self, config: Any) -> None:
            super().__init__(config)
            self.inner = model_of("gpt2")
            self.pool = torch.nn.MultiheadAttention(12, 3)

    model = Outer(Config())
    (scores,) = qk.scan(model).models
    assert [row["module"] for row in scores.layers] == [*(f"inner.h.{i}.attn" for i in range(3)), "pool"]
    assert scores.model_type == "unheard-of"
    inner = rows_of(model.inner)
    assert rows_of(model)[: len(inner)] == inner
    del model.inner, model.pool
    model.extra = torch.nn.Linear(3, 3)
    with pytest.raises(LayoutError, match="no layout for model_type 'unheard-of'"):
        qk.scan(model)


def test_parts_without_attention_are_listed_with_the_reason() -> None:
    transformers = pytest.importorskip("transformers")
    outer = torch.nn.ModuleDict({"text": bert()})
    for name, kind in (("odd", "strange; type"), ("mixer", "mamba")):
        config = type("Config", (transformers.PretrainedConfig,), {"model_type": kind})
        inner = type("Inner", (transformers.PreTrainedModel,), {"config_class": config})(config())
        inner.extra = torch.nn.Linear(3, 3)
        outer[name] = inner
    (scores,) = qk.scan(outer).models
    assert len(scores.layers) == 3
    odd, mixer = scores.skipped
    assert odd == {"module": "odd", "reason": "no layout for model_type 'strange; type'"}
    assert mixer["module"] == "mixer"
    assert mixer["reason"].startswith("mamba has no softmax attention: ")


def test_where_a_module_stands_is_found_among_many_names() -> None:
    """The work does not grow with the number of experts, nor with that of kinds of modules."""
    attention = [f"{i}.self_attn.{side}_proj.weight" for i in range(60) for side in "qkvo"]
    experts = [f"{i}.mlp.experts.{j}.up_proj.weight" for i in range(60) for j in range(1700)]
    ends = [f"x{i}.y{i}.self_attn.weight" for i in range(100_000)]
    for config, names, start in (
        ({"model_type": "llama"}, attention + experts, "layers."),
        ({"model_type": "bert"}, [f"layer.{i}.attention.self.query.weight" for i in range(9)], "encoder."),
        ({"model_type": "gemma3"}, ends, ""),
        ({"model_type": "llama"}, ends, "layers.0.self_attn."),
        ({"model_type": "vit"}, ends, "encoder.layer.0.attention."),
    ):
        begin = time.process_time()
        assert above(config, names) == start
        assert time.process_time() - begin < 2.0


def test_two_models_in_memory_are_compared() -> None:
    one, other = bert(), bert()
    assert {row["relative_change"] for row in qk.diff(one, other).rows} == {0.0}
    with torch.no_grad():
        other.encoder.layer[1].attention.self.query.weight.mul_(2)
        other.encoder.layer[1].attention.self.query.bias.mul_(2)
    table = qk.diff(one, other)
    assert [row["relative_change"] for row in table.layers] == pytest.approx([0.0, 1.0, 0.0])
    assert [row["cosine"] for row in table.layers] == pytest.approx([1.0, 1.0, 1.0])
    assert (table.source_a, table.source_b) == ("BertModel", "BertModel")
    assert (table.only_in_a, table.only_in_b) == ([], [])


# ---- names in files ----------------------------------------------------------------------------------------

_SMALL = {
    "hidden_size": 24,
    "num_attention_heads": 3,
    "num_hidden_layers": 2,
    "intermediate_size": 20,
    "vocab_size": 40,
}
REARRANGED = {"NomicBertModel": "NomicBertConfig", "GteModel": "GteConfig", "MixtralModel": "MixtralConfig"}


@pytest.mark.parametrize("name", REARRANGED)
def test_tensors_of_the_file_are_explained_by_parameters(name: str, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    if not hasattr(transformers, name):
        pytest.skip(f"this version of transformers has no {name}")
    truth.quiet()
    model = getattr(transformers, name)(
        getattr(transformers, REARRANGED[name])(**_SMALL, num_key_value_heads=3)
    )
    parameters = dict(model.named_parameters())
    found, doubt = origins(model, {n: tuple(p.shape) for n, p in parameters.items()})
    assert doubt is None
    model.save_pretrained(tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    seen = 0
    for tensor_name, origin in found.items():
        if tensor_name not in stored:
            continue  # of experts: more than rows move
        rows = torch.cat([parameters[p].detach() for p in origin.parameters])
        rows = rows if origin.rows is None else rows[torch.from_numpy(origin.rows)]
        assert torch.equal(rows, stored[tensor_name])
        assert origin.shape == tuple(rows.shape)
        seen += origin.rows is not None
    assert seen > 0 or name == "MixtralModel"
    assert {n for n in stored if "experts" not in n} <= set(found)


def test_a_file_that_fuses_what_the_model_keeps_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    transformers = pytest.importorskip("transformers")
    if not hasattr(transformers, "NomicBertModel"):
        pytest.skip("this version of transformers has no NomicBert")
    truth.quiet()
    known = families()
    if "nomic_bert" not in known:
        rule = Rule("nomic_bert", "encoder.layers.{layer}.attn", fused="Wqkv")
        family = replace(known["bert"], model_type="nomic_bert", rules=(rule,), skips=())
        for place in ("choose", "rules"):
            monkeypatch.setattr(f"qkform.layouts.{place}.families", lambda: {**known, "nomic_bert": family})
    model = transformers.NomicBertModel(transformers.NomicBertConfig(**_SMALL))
    model.save_pretrained(tmp_path)
    assert_same_scan(tmp_path, model)
    found = sites.find(model)
    assert [site.path for site in found] == ["layers.0.self_attn", "layers.1.self_attn"]
    for site in found:
        assert site.module is model.get_submodule(site.path)
        assert [share.name for share in site.parameters()][:2] == [
            f"{site.path}.q_proj.weight",
            f"{site.path}.k_proj.weight",
        ]
        assert np.array_equal(site.w_q().detach(), site.form().w_q)


def no_longer(model: Any, state: Any) -> Any:
    raise ValueError("Cannot reverse the transform with TP or quantization")


def test_a_conversion_that_cannot_be_undone_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    loading = pytest.importorskip("transformers.core_model_loading")
    if not hasattr(loading, "revert_weight_conversion"):
        pytest.skip("this version of transformers converts nothing")
    model = bert()
    whole = qk.scan(model).models[0]
    assert whole.skipped == []
    told = "what its files call these weights and how they order them is not known"
    monkeypatch.setattr(loading, "revert_weight_conversion", no_longer)
    (scores,) = qk.scan(torch.nn.ModuleDict({"inner": model})).models
    assert [{**row, "module": "", "component": ""} for row in scores.rows] == [
        {**row, "module": "", "component": ""} for row in whole.rows
    ]
    (note,) = scores.skipped
    assert note["module"] == "inner"
    assert note["reason"].startswith(f"{told} (ValueError: Cannot reverse")
    assert sites.find(model).skipped[0]["module"] == "BertModel"

    def without(model: Any, state: Any) -> Any:
        raise loading.SkipParameters

    monkeypatch.setattr(loading, "revert_weight_conversion", without)
    assert qk.scan(model).models[0].skipped[0]["reason"].startswith(f"{told} (SkipParameters")
    monkeypatch.setattr(
        loading, "revert_weight_conversion", lambda model: {}
    )  # it wants other arguments by now
    assert qk.scan(model).models[0].skipped[0]["reason"].startswith(f"{told} (TypeError")
    monkeypatch.delattr(loading, "revert_weight_conversion")
    assert "has no revert_weight_conversion" in qk.scan(model).models[0].skipped[0]["reason"]


def test_faults_in_a_conversion_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    loading = pytest.importorskip("transformers.core_model_loading")

    def faulty(model: Any, state: Any) -> Any:
        raise AssertionError("a fault")

    monkeypatch.setattr(loading, "revert_weight_conversion", faulty)
    with pytest.raises(AssertionError, match="a fault"):
        qk.scan(bert())


def test_rows_that_cannot_be_followed_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """The names are known, and how their rows move is not."""
    loading = pytest.importorskip("transformers.core_model_loading")

    def partly(model: Any, state: dict[str, Any]) -> dict[str, Any]:
        if any(tensor.device.type != "meta" for tensor in state.values()):
            raise RuntimeError("only shapes")
        return {n: t.clone() if "layer.1.attention.self.query" in n else t for n, t in state.items()}

    monkeypatch.setattr(loading, "revert_weight_conversion", partly)
    (scores,) = qk.scan(bert()).models
    assert len(scores.layers) == 2
    reasons = [entry["reason"] for entry in scores.skipped]
    assert any("how is not known (RuntimeError: only shapes): left out" in reason for reason in reasons)


def test_a_fused_weight_read_by_its_name_in_memory_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """The names of the file fit nothing here, so that an order was taken by other names than those it is known for."""
    loading = pytest.importorskip("transformers.core_model_loading")
    for name, notes in (("gpt2", 1), ("bert", 0)):
        model = model_of(name)
        expected = qk.scan(model).models[0].rows
        monkeypatch.setattr(
            loading,
            "revert_weight_conversion",
            lambda model, state: {f"strange{i}": t for i, t in enumerate(state.values())},
        )
        (scores,) = qk.scan(model).models
        assert scores.rows == expected
        reasons = [e["reason"] for e in scores.skipped]
        assert sum("the order of its fused weights" in reason for reason in reasons) == notes
        monkeypatch.undo()


# ---- torch's own attention ---------------------------------------------------------------------------------


def encoder(layers: int = 2, heads: int = 3, d: int = 18) -> torch.nn.TransformerEncoder:
    torch.manual_seed(1)
    layer = torch.nn.TransformerEncoderLayer(d, heads, 20, batch_first=True)
    return torch.nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)


def test_torch_modules_need_no_flags() -> None:
    model = encoder()
    rows = qk.scan(model).heads
    assert len(rows) == 6
    for row in rows:
        w = model.layers[row["layer"]].self_attn.in_proj_weight.detach().double().numpy()
        q, k = (w[start : start + 18].reshape(3, 6, 18)[row["head"]] for start in (0, 18))
        assert row["symmetry"] == pytest.approx(reference.symmetry(q.T @ k), abs=1e-5)


def test_a_whole_transformer() -> None:
    torch.manual_seed(2)
    model = torch.nn.Transformer(16, 4, 2, 1, 20, batch_first=True)
    (scores,) = qk.scan(model).models
    found = {row["module"]: row["attention"] for row in scores.layers}
    assert found == {
        "encoder.layers.0.self_attn": "self",
        "encoder.layers.1.self_attn": "self",
        "decoder.layers.0.self_attn": "self",
        "decoder.layers.0.multihead_attn": "cross",
    }
    assert scores.skipped == []


def test_modules_with_other_head_counts_and_extra_keys() -> None:
    class Mixed(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one = torch.nn.MultiheadAttention(12, 3, add_bias_kv=True)
            self.two = torch.nn.MultiheadAttention(12, 4, bias=False)
            self.far = torch.nn.MultiheadAttention(12, 2, kdim=7, vdim=5)

    layers = {layer.module: layer for layer in qk.layers(Mixed())}
    heads = {path: (a.n_heads, a.d_head, a.flags, a.attention) for path, a in layers.items()}
    assert heads == {
        "one": (3, 4, ("add_bias_kv",), "self"),
        "two": (4, 3, (), "self"),
        "far": (2, 6, (), "cross"),
    }
    assert layers["far"].form.w_k.shape == (2, 7, 6)
    assert layers["two"].form.b_q is None


def test_one_module_in_several_places_is_one_layer() -> None:
    layer = torch.nn.TransformerEncoderLayer(12, 3, 20)
    model = torch.nn.ModuleDict({"layers": torch.nn.ModuleList([layer, layer, layer])})
    (row,) = qk.scan(model).layers
    assert (row["layer"], row["shared_by"]) == (0, [0, 1, 2])


def test_a_parametrized_weight_is_read_as_it_acts() -> None:
    model = encoder(1)
    attention = model.layers[0].self_attn

    class Double(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return 2 * x

    (before,) = qk.scan(model).layers
    torch.nn.utils.parametrize.register_parametrization(attention, "in_proj_weight", Double())
    (after,) = qk.scan(model).layers
    assert after["norm"] == pytest.approx(4 * before["norm"])
    (site,) = sites.find(model)
    with pytest.raises(SourceError, match=r"in_proj_weight' is parametrized"):
        site.write_(w_q=torch.zeros(3, 18, 6))


# ---- weights per head --------------------------------------------------------------------------------------


class HeadAttention(torch.nn.Module):
    """The public names and shapes of a hooked transformer's attention."""

    def __init__(self, weights: dict[str, torch.Tensor]) -> None:
        super().__init__()
        for name, value in weights.items():
            self.register_parameter(name, torch.nn.Parameter(value))

    @property
    def W_K(self) -> torch.Tensor:  # grouped keys, repeated
        return self._W_K.repeat_interleave(len(self.W_Q) // len(self._W_K), 0)


class Block(torch.nn.Module):
    def __init__(self, weights: dict[str, torch.Tensor]) -> None:
        super().__init__()
        grouped = len(weights["W_K"]) != len(weights["W_Q"])
        if grouped:
            weights = {f"_{n}" if n.endswith("_K") else n: w for n, w in weights.items()}
            self.attn = HeadAttention(weights)
        else:
            self.attn = torch.nn.Module()
            for name, value in weights.items():
                self.attn.register_parameter(name, torch.nn.Parameter(value))


class Hooked(torch.nn.Module):
    def __init__(self, model: Any) -> None:
        super().__init__()
        self.cfg = SimpleNamespace(model_name="tiny", attention_dir="causal")
        self.blocks = torch.nn.ModuleList(Block(weights) for weights in headwise(model))

    @property
    def W_Q(self) -> torch.Tensor:
        raise AssertionError("stacking all layers takes the memory of all layers")


def headwise(model: Any) -> list[dict[str, torch.Tensor]]:
    """The weights of a Hugging Face model, per layer and head."""
    out = []
    for layer in qk.layers(model):
        form = layer.form
        weights = {"W_Q": form.w_q, "W_K": form.w_k, "b_Q": form.b_q, "b_K": form.b_k}
        out.append({n: torch.tensor(w) for n, w in weights.items() if w is not None})
    return out


def scores_of(source: Any) -> list[dict[str, Any]]:
    taken = (
        "layer",
        "head",
        "kv_head",
        "mask",
        "symmetry",
        "symmetry_z",
        "directionality",
        "norm",
        "bias_share",
    )
    return [{name: row[name] for name in taken} for row in qk.scan(source).rows]


def assert_close(found: list[dict[str, Any]], expected: list[dict[str, Any]]) -> None:
    """Equal but for the last digits: the weights lie in memory in another order."""
    for row, other in zip(found, expected, strict=True):
        for name, value in other.items():
            assert row[name] == (pytest.approx(value, rel=1e-9) if isinstance(value, float) else value)


@pytest.mark.parametrize("name", ["gpt2", "llama", "qwen2"])
def test_weights_per_head_scan_as_the_model_they_were_made_from(name: str) -> None:
    model = model_of(name)
    hooked = Hooked(model)
    (scores,) = qk.scan(hooked).models
    assert_close(scores_of(hooked), scores_of(model))
    assert scores.source == "Hooked (tiny)"
    assert [row["module"] for row in scores.layers] == [f"blocks.{i}.attn" for i in range(3)]
    for site, weights in zip(sites.find(hooked), headwise(model), strict=True):
        assert torch.equal(site.w_k(), weights["W_K"])


@pytest.mark.parametrize("kind", ["blocks", "stacked", "stacked numpy"])
def test_objects_that_are_no_modules(kind: str) -> None:
    model = model_of("gpt2")
    layers = headwise(model)
    stacked = {name: torch.stack([w[name] for w in layers]) for name in layers[0]}
    thing = {
        "blocks": SimpleNamespace(blocks=[SimpleNamespace(attn=SimpleNamespace(**w)) for w in layers]),
        "stacked": SimpleNamespace(**stacked),
        "stacked numpy": SimpleNamespace(**{n: w.numpy() for n, w in stacked.items()}),
    }[kind]
    found = scores_of(thing)
    assert {row["mask"] for row in found} == {"unknown"}
    assert_close(found, [{**row, "mask": "unknown"} for row in scores_of(model)])
    with pytest.raises(SourceError, match="no torch module: its weights can be scanned, not changed"):
        sites.find(thing)


def test_weights_per_head_that_contradict_each_other() -> None:
    eye = np.ones((2, 3, 6, 4))
    with pytest.raises(ConfigError, match=r"W_K \(2, 6, 4\); expected \(n_heads, d_model, d_head\)"):
        qk.scan(SimpleNamespace(W_Q=eye, W_K=eye[:, :2]))
    with pytest.raises(ConfigError, match=r"b_Q has shape \(3, 5\)"):
        qk.scan(SimpleNamespace(W_Q=eye, W_K=eye, b_Q=np.ones((2, 3, 5))))


# ---- what cannot be read -----------------------------------------------------------------------------------


def test_other_objects_are_refused() -> None:
    for thing in (42, None, np.ones((3, 3)), {"a": 1}):
        with pytest.raises(SourceError, match=r"a source is a path.*a torch module.*W_Q and W_K"):
            qk.scan(thing)
    with pytest.raises(SourceError, match="a BertModel in memory has no revisions"):
        qk.scan(bert(), revision="main")
    with pytest.raises(LayoutError, match=r"Linear has no config.*no matrix|Matrices that may be meant"):
        qk.scan(torch.nn.Linear(3, 4))


def test_parameters_without_numbers_are_named() -> None:
    with torch.device("meta"):
        model = encoder(1)
    with pytest.raises(SourceError, match=r"layers\.0\.self_attn\.in_proj_weight.*meta device"):
        qk.scan(model)


class Packed(torch.Tensor):
    pass


def _packed(weight: torch.Tensor) -> Any:
    return torch.nn.Parameter(weight.detach().as_subclass(Packed), requires_grad=False)


def _eight_bit(weight: torch.Tensor) -> Any:
    return torch.nn.Parameter(weight.detach().to(torch.float8_e4m3fn), requires_grad=False)


def _four_bit(weight: torch.Tensor) -> Any:
    return torch.nn.Parameter(torch.zeros(weight.numel() // 2, 1, dtype=torch.uint8), requires_grad=False)


def _gathered_away(weight: torch.Tensor) -> Any:
    parameter = torch.nn.Parameter(torch.empty(0))
    parameter.ds_id, parameter.ds_shape = 7, weight.shape
    return parameter


def _shard(weight: torch.Tensor) -> Any:
    return torch.nn.Parameter(weight.detach().reshape(-1)[:5])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_packed, "it is a Packed, a quantised or wrapped tensor; dequantise"),
        (_eight_bit, "float8_e4m3fn, quantised weights; dequantise"),
        (_four_bit, r"holds torch\.uint8, quantised weights; dequantise"),
        (_gathered_away, r"DeepSpeed ZeRO-3; gather it first"),
        (_shard, r"under FSDP scan inside"),
    ],
)
def test_quantised_and_sharded_parameters_are_named(change: Any, message: str) -> None:
    model = bert()
    query = model.encoder.layer[1].attention.self.query
    query.weight = change(query.weight)
    with pytest.raises(SourceError, match=rf"layer\.1\.attention\.self\.query\.weight.*{message}"):
        qk.scan(model)


class Odd(torch.nn.Module):
    """What it offers beside its modules cannot be asked for."""

    def __init__(self, **modules: Any) -> None:
        super().__init__()
        for name, module in modules.items():
            self.add_module(name, module)

    def _fails(self) -> Any:
        raise RuntimeError("not set up")

    config = cfg = num_heads = W_Q = blocks = is_quantized = property(_fails)


def test_properties_that_raise_are_not_asked_again() -> None:
    (scores,) = qk.scan(Odd(inner=torch.nn.MultiheadAttention(12, 3))).models
    assert ([row["module"] for row in scores.layers], scores.source) == (["inner"], "Odd")
    names = Odd(q_proj=torch.nn.Linear(12, 12), k_proj=torch.nn.Linear(12, 12))
    names.n_heads = 3
    (site,) = sites.find(Odd(self_attn=names))
    assert (site.path, site.layer.n_heads) == ("self_attn", 3)

    class Stack:
        W_K = np.ones((3, 6, 2))
        cfg = property(Odd._fails)

    thing = Stack()
    thing.W_Q = thing.W_K
    assert len(qk.scan(thing).layers) == 1
    Stack.W_Q = property(Odd._fails)
    with pytest.raises(SourceError, match="W_Q of a Stack cannot be read: RuntimeError: not set up"):
        qk.scan(Stack())


def test_parametrizations_that_raise_are_named_where_they_count() -> None:
    class Fails(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            raise RuntimeError("not on this device")

    model = encoder(1)
    expected = rows_of(model)
    register = torch.nn.utils.parametrize.register_parametrization
    register(model.layers[0].linear1, "weight", Fails(), unsafe=True)
    assert rows_of(model) == expected
    register(model.layers[0].self_attn, "in_proj_weight", Fails(), unsafe=True)
    with pytest.raises(SourceError, match=r"self_attn\.in_proj_weight'.* RuntimeError: not on this device"):
        qk.scan(model)


def test_parameters_without_a_shape_elsewhere_do_no_harm() -> None:
    model = Odd(attn=torch.nn.MultiheadAttention(12, 3), later=torch.nn.LazyLinear(4))
    assert len(qk.scan(model).layers) == 1
    names = torch.nn.ModuleDict({"q_proj": torch.nn.LazyLinear(12), "k_proj": torch.nn.Linear(12, 12)})
    with pytest.raises(SourceError, match=r"q_proj\.weight': it has no shape yet; run the model once"):
        qk.scan(Odd(self_attn=names), heads=3)


@pytest.mark.parametrize("name", ["bert", "llama", "gpt2"])
def test_a_config_of_no_heads_is_named(name: str) -> None:
    model = model_of(name)
    model.config.num_attention_heads = 0
    with pytest.raises(ConfigError, match=r"config: (num_attention_heads|n_head) is 0; expected a positive"):
        qk.scan(model)


def test_modules_of_no_heads_are_named() -> None:
    model = encoder(1)
    model.layers[0].self_attn.num_heads = 0
    with pytest.raises(ConfigError, match="num_heads is 0; expected a positive"):
        qk.scan(model)
    names = torch.nn.ModuleDict({"q_proj": torch.nn.Linear(12, 12), "k_proj": torch.nn.Linear(12, 12)})
    names.n_heads = 0
    with pytest.raises(LayoutError, match="pass heads="):
        qk.scan(Odd(self_attn=names))


def test_lists_of_parameters() -> None:
    def listed() -> torch.nn.ParameterList:
        return torch.nn.ParameterList([torch.nn.Parameter(torch.randn(12, 12)) for _ in range(2)])

    model = Odd(attn=torch.nn.MultiheadAttention(12, 3), extra=listed())
    assert [row["module"] for row in qk.scan(model).layers] == ["attn"]
    with pytest.raises(LayoutError, match=r"Matrices that may be meant: k_proj\.0 \(12, 12\)"):
        qk.scan(Odd(q_proj=listed(), k_proj=listed()))


@pytest.mark.parametrize(
    ("weights", "reason"),
    [
        ({"W_Q": (3, 12, 4)}, r"it has W_Q \(3, 12, 4\) and no W_K; expected both as \(n_heads"),
        ({"W_K": (3, 12, 4)}, r"it has no W_Q and W_K \(3, 12, 4\)"),
        ({"W_Q": (3, 12, 4), "W_K": (12, 4)}, r"it has W_Q \(3, 12, 4\) and W_K \(12, 4\)"),
    ],
)
def test_half_an_attention_is_named(weights: dict[str, tuple[int, ...]], reason: str) -> None:
    values = {name: torch.randn(shape) for name, shape in weights.items()}
    half, whole = HeadAttention(values), HeadAttention({n: torch.randn(3, 12, 4) for n in ("W_Q", "W_K")})
    with pytest.raises(
        LayoutError, match=f"HeadAttention: no attention was found. The model is none: {reason}"
    ):
        qk.scan(half)
    (scores,) = qk.scan(torch.nn.ModuleDict({"a": half, "b": whole})).models
    assert [row["module"] for row in scores.layers] == ["b"]
    (entry,) = scores.skipped
    assert entry["module"] == "a"
    assert re.match(reason, entry["reason"])
    with pytest.raises(SourceError, match=f"a SimpleNamespace is no attention that can be scanned: {reason}"):
        qk.scan(SimpleNamespace(**values))


def test_tied_queries_and_keys() -> None:
    """One weight for both sides, in two modules or in one: W is symmetric, and it cannot be written apart."""
    for tie in ("weight", "module"):
        model = bert()
        attention = model.encoder.layer[1].attention.self
        if tie == "weight":
            attention.key.weight, attention.key.bias = attention.query.weight, attention.query.bias
        else:
            attention.key = attention.query
        (scores,) = qk.scan(model).models
        assert scores.skipped == []
        assert [row["module"] for row in scores.layers] == [
            f"encoder.layer.{i}.attention.self" for i in range(3)
        ]
        assert {round(row["symmetry"], 9) for row in scores.heads if row["layer"] == 1} == {1.0}
        site = sites.find(model)[1]
        new = torch.randn_like(site.w_q())
        with pytest.raises(
            FormError, match=r"w_q and w_k of encoder\.layer\.1.* are one parameter, 'encoder"
        ):
            site.write_(w_q=new, w_k=new + 1)
        assert not torch.equal(site.w_q(), new)
        site.write_(w_q=new, w_k=new)
        assert torch.equal(site.w_k(), new)


def test_shared_modules_of_a_model(tmp_path: Path) -> None:
    """An attention that two layers share is one layer, and the count says that one is missing."""
    model = bert()
    model.encoder.layer[1].attention.self = model.encoder.layer[0].attention.self
    (scores,) = qk.scan(model).models
    assert [(row["layer"], row["shared_by"]) for row in scores.layers] == [(0, [0, 1]), (2, None)]
    assert [entry["module"] for entry in scores.skipped] == ["encoder.layer"]
    model = bert()
    for i in (1, 2):
        model.encoder.layer[i].attention.self.query.weight = model.encoder.layer[
            0
        ].attention.self.query.weight
    (scores,) = qk.scan(model).models
    assert (len(scores.layers), scores.skipped) == (3, [])


def test_adapters_are_refused_where_they_change_q_or_k() -> None:
    class Adapted(torch.nn.Module):
        def __init__(self, base: Any) -> None:
            super().__init__()
            self.base_layer = base
            self.lora_A = torch.nn.Linear(base.in_features, 2)

    model = bert()
    expected = rows_of(model)
    attention = model.encoder.layer[1].attention.self
    attention.value = Adapted(attention.value)
    assert rows_of(model) == expected
    attention.key = Adapted(attention.key)
    with pytest.raises(SourceError, match=r"self\.key\.weight'.*an adapter adds to it; merge it first"):
        qk.scan(model)


def test_sharded_tensors_are_gathered(tmp_path: Path) -> None:
    if not torch.distributed.is_available():
        pytest.skip("this torch has no torch.distributed")
    from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

    torch.distributed.init_process_group("gloo", f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    try:
        model = encoder(1)
        (before,) = qk.scan(model).layers
        mesh = init_device_mesh("cpu", (1,))
        attention = model.layers[0].self_attn
        attention.in_proj_weight = torch.nn.Parameter(
            distribute_tensor(attention.in_proj_weight, mesh, [Shard(0)])
        )
        (after,) = qk.scan(model).layers
        assert after == before
        with pytest.raises(SourceError, match=r"in_proj_weight' is sharded"):
            sites.find(model)[0].write_(w_q=torch.zeros(3, 18, 6))
    finally:
        torch.distributed.destroy_process_group()


def test_nothing_is_imported_that_the_model_did_not_bring() -> None:
    code = """
import sys, types, numpy as np, qkform as qk
w = np.random.default_rng(0).normal(size=(2, 3, 8, 4))
assert len(qk.scan(types.SimpleNamespace(W_Q=w, W_K=w)).layers) == 2
try: qk.scan(object())
except qk.errors.SourceError: pass
assert not {"torch", "transformers"} & set(sys.modules)
import torch
qk.scan(torch.nn.MultiheadAttention(8, 2))
assert "transformers" not in sys.modules
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr


# ---- sites -------------------------------------------------------------------------------------------------

WRITTEN = ["bert", "gpt2", "gpt_neox", "llama", "phi3", "modernbert", "bert, decoder with cross-attention"]
WRITTEN += [
    "gpt2, cross-attention",
    "torch, TransformerEncoder",
    "torch, MultiheadAttention with kdim",
    "vit",
]


@pytest.mark.parametrize("name", WRITTEN)
def test_what_is_written_is_there_and_nothing_else_changed(name: str) -> None:
    model = model_of(name)
    found = sites.find(model)
    assert not found.skipped
    assert [site.path for site in found] == [layer.module for layer in qk.layers(model)]
    old = {n: p.detach().clone() for n, p in model.named_parameters()}
    touched = {n: torch.zeros_like(p, dtype=torch.bool) for n, p in model.named_parameters()}
    for site in found:
        a = site.layer
        w_q, w_k = torch.randn(a.n_heads, a.d_model, a.d_head), torch.randn(site.w_k().shape)
        given = {"w_q": w_q.double(), "w_k": w_k.double().numpy()}
        for side, bias in (("b_q", site.b_q()), ("b_k", site.b_k())):
            given |= {} if bias is None else {side: torch.randn(bias.shape).double()}
        site.write_(**given)
        for side, value in given.items():
            assert np.array_equal(getattr(site, side)().detach(), value)
        form = site.form()
        assert np.array_equal(form.w_q, given["w_q"])
        assert np.array_equal(form.w_k, given["w_k"])
        if "b_k" in given:
            assert np.array_equal(form.b_k, given["b_k"])
        for share in site.parameters():
            assert share.parameter is model.get_parameter(share.name)
            where = touched[share.name] if share.dim == 0 else touched[share.name].T
            where[torch.from_numpy(share.rows.reshape(-1))] = True
    for n, p in model.named_parameters():
        assert torch.equal(p[~touched[n]], old[n][~touched[n]])
        assert bool((p[touched[n]] != old[n][touched[n]]).all())
        assert p.requires_grad


@pytest.mark.parametrize("name", ["bert", "gpt2", "phi3", "gpt_neox", "torch, TransformerEncoder"])
def test_weights_are_differentiable_functions_of_the_parameters(name: str) -> None:
    model = model_of(name)
    site = sites.find(model)[1]
    (site.w_q() ** 2).sum().backward()
    share = site.parameters()[0]
    grad = share.parameter.grad if share.dim == 0 else share.parameter.grad.T
    rows = share.rows.reshape(-1)
    expected = torch.zeros_like(grad)
    stored = share.parameter.detach() if share.dim == 0 else share.parameter.detach().T
    expected[rows] = 2 * stored[rows]
    assert torch.equal(grad, expected)


@pytest.mark.parametrize(
    ("name", "view"), [("bert", True), ("gpt2", True), ("phi3", True), ("gpt_neox", False)]
)
def test_rows_that_follow_each_other_are_a_view(name: str, view: bool) -> None:
    site = sites.find(model_of(name))[0]
    share = site.parameters()[0]
    inside = share.parameter.untyped_storage().data_ptr() == site.w_q().untyped_storage().data_ptr()
    assert (inside, share.span is not None) == (view, view)


def test_row_ranges_of_fused_weights() -> None:
    model = model_of("phi3")
    c = model.config
    q, k = sites.find(model)[0].parameters()
    width, kv_width = c.num_attention_heads * c.head_dim, c.num_key_value_heads * c.head_dim
    assert (q.span, k.span) == (slice(0, width), slice(width, width + kv_width))
    assert q.name == k.name == "layers.0.self_attn.qkv_proj.weight"
    assert {s.dim for s in sites.find(model_of("gpt2"))[0].parameters() if s.side[0] == "w"} == {1}


def test_writing_checks_everything_first() -> None:
    site = sites.find(model_of("llama"))[0]
    before = site.w_q().detach().clone()
    good = torch.zeros_like(before)
    with pytest.raises(FormError, match=r"w_k of layers\.0\.self_attn has shape \(1, 2, 3\); expected \(3, "):
        site.write_(w_q=good, w_k=torch.zeros(1, 2, 3))
    with pytest.raises(FormError, match=r"w_q of layers\.0\.self_attn has shape"):
        site.write_(w_q=good.transpose(1, 2))
    with pytest.raises(FormError, match="has no b_q"):
        site.write_(w_q=good, b_q=torch.zeros(4, 10))
    assert torch.equal(site.w_q(), before)


def test_a_site_may_write_its_own_view() -> None:
    """W_Q := W_K of a fused weight, and heads in another order: what is read is what is being written."""
    site = sites.find(model_of("gpt2"))[0]
    w_q, w_k = site.w_q().detach().clone(), site.w_k().detach().clone()
    site.write_(w_q=site.w_k(), w_k=site.w_q())
    assert torch.equal(site.w_q(), w_k)
    assert torch.equal(site.w_k(), w_q)
    site.write_(w_q=site.w_q().flip(0))
    assert torch.equal(site.w_q(), w_k.flip(0))


def dataclasses_of_sites() -> list[type]:
    modules = [m for name, m in sys.modules.items() if name.startswith("qkform.sites.")]
    every = {v for m in modules for v in vars(m).values() if is_dataclass(v) and isinstance(v, type)}
    return sorted((c for c in every if c.__module__.startswith("qkform.sites.")), key=lambda c: c.__name__)


def test_what_holds_arrays_and_modules_is_equal_to_itself_alone() -> None:
    named = {c.__name__ for c in dataclasses_of_sites()}
    assert named >= {"Share", "Site", "Sites", "Origin", "LiveTensor", "Parameter", "Tree", "Part"}
    for kind in dataclasses_of_sites():
        assert (kind.__eq__, kind.__hash__) == (object.__eq__, object.__hash__), kind


def test_sites_are_keys() -> None:
    model = model_of("phi3")
    found, again = sites.find(model), sites.find(model)
    assert found[0] != again[0]
    assert found[0] == found[0]
    assert found.index(found[1]) == 1
    assert again[0] not in found
    of = {site: i for i, site in enumerate(found)} | dict.fromkeys(found[0].parameters(), -1)
    assert [of[site] for site in found] == [0, 1, 2]
    assert found != again
    assert len({found, again}) == 2


def test_the_layer_of_a_site_has_no_weights() -> None:
    site = sites.find(bert())[0]
    with pytest.raises(FormError, match=r"layer\.0\.attention\.self: .*ask site\.form\(\)"):
        site.layer.form  # noqa: B018
    assert "form" not in vars(site.layer)
    site.form()
    assert "form" not in vars(site.layer)
    layer = site.snapshot()
    assert layer == site.layer
    assert np.array_equal(layer.form.w_k, site.form().w_k)
    assert np.array_equal(layer.form_with(bias=True).w_k, site.snapshot().form_with(bias=True).w_k)


def _new_query(model: Any) -> None:
    attention = model.encoder.layer[1].attention.self
    attention.query = torch.nn.Linear(24, 24)


def _new_attention(model: Any) -> None:
    attention = model.encoder.layer[1].attention
    attention.self = bert().encoder.layer[1].attention.self


def _around_the_same(model: Any) -> None:
    """The same projections in another attention."""
    old = model.encoder.layer[1].attention.self
    model.encoder.layer[1].attention.self = torch.nn.ModuleDict(dict(old.named_children()))


def _new_layer(model: Any) -> None:
    model.encoder.layer[1] = bert().encoder.layer[1]


def _no_layer(model: Any) -> None:
    del model.encoder.layer[1:]


@pytest.mark.parametrize(
    "change", [_new_query, _new_attention, _around_the_same, _new_layer, _no_layer], ids=lambda f: f.__name__
)
def test_sites_of_replaced_modules_are_refused(change: Any) -> None:
    model = bert()
    site, read = sites.find(model)[1], list(qk.layers(model))[1]
    old, before = site.parameters()[0].parameter, site.w_q().detach().clone()
    change(model)
    message = r"the model has (another \w+|nothing) at 'encoder\.layer\.1\..*look at the model again"
    uses = {
        "w_q": site.w_q,
        "w_k": site.w_k,
        "b_q": site.b_q,
        "form": site.form,
        "snapshot": lambda: site.snapshot().form,
        "write_": lambda: site.write_(w_q=torch.zeros_like(before)),
        "parameters": lambda: [share.parameter for share in site.parameters()],
    }
    if change is _new_query:
        for side in ("w_k", "b_k"):
            getattr(site, side)()  # the keys are still there
        del uses["w_k"]
    if change is not _around_the_same:  # a layer reads weights, whatever is around them
        uses["layers"] = lambda: read.form
    for use in uses.values():
        with pytest.raises(SourceError, match=message):
            use()
    assert torch.equal(old.detach(), before.transpose(1, 2).reshape(24, 24))
    if change is _around_the_same:
        return
    for new in [s for s in sites.find(model) if s.path == site.path]:
        new.write_(w_q=before.to(new.w_q().dtype))
        assert torch.equal(new.w_q(), before.to(new.w_q().dtype))


def test_sites_follow_what_is_the_same_module() -> None:
    """New values, a new parameter of the shape, and wrappers that came later."""
    model = bert()
    site = sites.find(model)[1]
    query = site.module.query
    query.weight = torch.nn.Parameter(torch.ones(24, 24))
    model.encoder.layer[1] = torch.compile(model.encoder.layer[1], backend="eager")
    site.module.key = Sharded(site.module.key)
    assert bool((site.w_q() == 1).all())
    site.write_(w_q=torch.zeros_like(site.w_q()), w_k=torch.zeros_like(site.w_k()))
    assert bool((query.weight == 0).all())
    assert (site.form().w_k == 0).all()


def test_sites_of_changed_parameters_are_refused() -> None:
    model = bert()
    site = sites.find(model)[1]
    site.module.query.weight = torch.nn.Parameter(torch.ones(48, 24))
    for use in (site.w_q, site.form, lambda: site.write_(w_q=torch.zeros(4, 24, 6))):
        with pytest.raises(
            SourceError, match=r"query\.weight': it had shape \(24, 24\) and now has \(48, 24\)"
        ):
            use()
    adapter = torch.nn.Module()
    adapter.base_layer = site.module.key
    site.module.key = adapter
    for use in (site.w_k, site.form, lambda: site.write_(w_k=torch.zeros(4, 24, 6))):
        with pytest.raises(
            SourceError, match=r"has got an adapter since it was found; merge it first|had shape"
        ):
            use()


def test_names_by_hand() -> None:
    torch.manual_seed(0)
    model = torch.nn.ModuleDict({"deep": torch.nn.ModuleList()})
    for _ in range(2):
        model["deep"].append(
            torch.nn.ModuleDict({"ask": torch.nn.Linear(8, 8), "tell": torch.nn.Linear(8, 8)})
        )
    with pytest.raises(LayoutError, match="Matrices that may be meant"):
        qk.scan(model)
    names = {"q": "deep.{layer}.ask.weight", "k": "deep.{layer}.tell.weight", "heads": 2}
    assert len(qk.scan(model, **names).layers) == 2
    assert [site.path for site in sites.find(model, **names)] == ["deep.0", "deep.1"]


def test_heads_are_read_off_the_modules(tmp_path: Path) -> None:
    """A model of plain torch modules with names that a family knows, and no config."""

    class Attention(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.n_heads = 4
            self.q_proj, self.k_proj, self.v_proj = (torch.nn.Linear(12, 12) for _ in range(3))

    layers = [torch.nn.ModuleDict({"self_attn": Attention()}) for _ in range(2)]
    model = torch.nn.ModuleDict({"layers": torch.nn.ModuleList(layers)})
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    assert_same_scan(tmp_path, model, heads=4)
    model["layers"][1]["self_attn"].n_heads = 3
    with pytest.raises(LayoutError, match=re.escape("heads=")):
        qk.scan(model)


# ---- models that do not keep to what is usual ---------------------------------------------------------------------


@pytest.mark.parametrize(
    "given",
    [
        {"heads": True},
        {"heads": "4"},
        {"heads": 4.0},
        {"gamma": "x"},
        {"gamma": True},
        {"q": 5, "k": 5},
        {"k": b"x"},
        {"bias": "no"},
        {"download": 1.5},
        {"token": 5},
    ],
)
def test_arguments_of_another_type_are_refused_in_words(given):
    (name, value), *_ = given.items()
    with pytest.raises(ConfigError, match=rf"^{name} (is {value!r}|must be text)"):
        qk.scan(nn.MultiheadAttention(32, 4), **given)


def test_flags_may_be_numpys():
    table = qk.scan(nn.MultiheadAttention(32, 4), bias=np.True_, gamma=np.float32(2), heads=np.int64(4))
    assert len(table.heads) == 4


def test_properties_that_raise_are_absent_or_told():
    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.MultiheadAttention(32, 4)

        @property
        def config(self):
            raise RuntimeError("not configured")

        @property
        def num_heads(self):
            raise RuntimeError("nor counted")

    assert len(qk.scan(Odd()).heads) == 4

    class Config:
        model_type = "bert"

        def to_dict(self):
            raise RuntimeError("no dict")

    model = nn.Sequential(nn.MultiheadAttention(32, 4))
    model.config = Config()
    with pytest.raises(SourceError, match="config of a Sequential cannot be read: RuntimeError: no dict"):
        qk.scan(model)


@pytest.mark.parametrize("heads", [[4], {}, "4", 4.0, None])
def test_heads_of_a_module_that_are_no_number(heads):
    model = nn.Sequential(nn.MultiheadAttention(32, 4))
    model[0].num_heads = heads
    with pytest.raises(ConfigError, match=r"^0: num_heads is "):
        qk.scan(model)


@pytest.mark.parametrize("side", [0, 1, 2])
@pytest.mark.parametrize("names", [("W_Q",), ("W_K",), ("W_Q", "W_K")])
def test_per_head_weights_with_a_side_of_length_0(side, names):
    thing = type("Attention", (), {})()
    thing.W_Q = thing.W_K = np.ones((2, 32, 8))
    shape = [2, 32, 8]
    shape[side] = 0
    for name in names:
        setattr(thing, name, np.ones(shape))
    with pytest.raises(ConfigError, match="no side of length 0"):
        qk.scan(thing)


def test_stacks_of_different_lengths():
    thing = type("Attention", (), {})()
    thing.W_Q, thing.W_K = np.ones((2, 2, 32, 8)), np.ones((1, 2, 32, 8))
    with pytest.raises(ConfigError, match="W_Q has 2 layers and W_K 1"):
        qk.scan(thing)


def test_an_error_of_the_model_itself_has_no_empty_place_in_front():
    with pytest.raises(
        SourceError, match=r"^cannot read parameter 'in_proj_weight': it is on the meta device"
    ):
        qk.scan(nn.MultiheadAttention(32, 4).to("meta"))
