"""Live models: the scan of a model in memory is that of its file, and its sites hold its weights."""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import qkform as qk
from qkform import samples, sites
from qkform.errors import ConfigError, FormError, LayoutError, SourceError
from qkform.form import reference
from qkform.layouts.rules import Rule, families
from qkform.sites.naming import origins
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
    before = site.layer.form.w_q.copy()
    with torch.no_grad():
        model.encoder.layer[0].attention.self.query.weight.add_(1.0)
    assert np.array_equal(site.layer.form.w_q, before)
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
    found = origins(model, {n: tuple(p.shape) for n, p in parameters.items()})
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
        assert np.array_equal(site.w_q().detach(), site.layer.form.w_q)


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
    with pytest.raises(LayoutError, match=re.escape("--heads")):
        qk.scan(model)
