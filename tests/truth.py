"""The truth test of the families: what qkform reads from a file, held against what the model itself computes.

For each `Case` a tiny random Hugging Face model is built in float64, with odd sizes, and saved. Its
attentions report the queries, keys and probabilities of its own forward pass (a function registered in
transformers' AttentionInterface), with rotary turned to angle 0 and query/key norms taken out. From these
the form of every head is recovered by least squares on the layer's input, each query head paired with the
key head that reproduces the model's probabilities. Then the saved file is opened with qkform, and
everything it says is compared: forms, biases, counts, mask, norm. Each layer is then read wrongly in every
way that applies, and the comparison must notice.

    python -m tests.truth [REGEX]
"""

from __future__ import annotations

import argparse
import contextlib
import math
import re
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np

import qkform as qk
from qkform.checkpoints import open_checkpoint
from qkform.errors import QKFormError
from qkform.form import BilinearForm, reference
from qkform.layouts import AttentionLayer
from qkform.layouts import layer as layer_module
from qkform.layouts.order import WHOLE, cut, parsed
from qkform.layouts.rules import families

TOLERANCE = 1e-8  # relative, float64
STABLE = 1e-10  # differences below this depend on the machine, and are reported as this
Array = np.ndarray[Any, Any]
Names = tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Case:
    """One model to verify. `names` turns paths in the file into paths in the live model (by regex)."""

    name: str
    member: str  # model_type in the family files
    build: str  # class in transformers
    config: str
    settings: Mapping[str, Any]
    feed: str = "ids"  # see FEEDS
    names: Names = ()
    q_scaled: bool = False  # the model scales its queries before it hands them over, by d_head**-0.5
    skipped: tuple[str, ...] = ()  # modules that qkform is expected to list as not scored
    stored: Names = ()  # renames tensors in the saved file, to what older versions wrote
    own_names: bool = False  # save under the names of the live model
    write: Callable[[Any, Path], None] | None = None  # write the file in another way
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Truth:
    """One attention as the model computed it."""

    path: str  # of its module in the live model
    order: list[int]  # its places in the order of all calls of its kind
    attention: str
    mask: str
    matrix: Array  # (n_heads, d_q, d_k)
    b_q: Array  # (n_heads, d_head)
    b_k: Array  # (n_kv_heads, d_head)


@dataclass
class Verdict:
    case: Case
    layers: list[AttentionLayer] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    differences: dict[str, float] = field(default_factory=dict)  # module -> largest relative difference
    failed: dict[str, list[str]] = field(default_factory=dict)  # module -> mutants noticed there
    unnoticed: dict[str, list[str]] = field(default_factory=dict)  # module -> mutants that apply and passed


# ---- the model ---------------------------------------------------------------------------------------------


def quiet() -> None:
    """transformers reports every save and every odd token id of a tiny config."""
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()


def build(case: Case) -> Any:
    import torch
    import transformers

    quiet()
    torch.manual_seed(sum(case.name.encode()))
    config = getattr(transformers, case.config)(**case.settings)
    model = getattr(transformers, case.build)._from_config(
        config, attn_implementation=_interface(), experts_implementation="eager"
    )
    model = model.double().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "embed" in name and parameter.ndim >= 2:
                parameter.normal_()  # different enough that tokens are still distinct in the last layer
            elif parameter.ndim >= 2:
                parameter.normal_(0, 0.8 / math.sqrt(parameter[0].numel()))
            elif parameter.ndim == 1 and _in_norm(model, name):
                # LayerNorm alone spans d_model - 1 directions; a bias that leaves its plane gives the last
                parameter.uniform_(0.5, 1.5) if name.endswith("weight") else parameter.normal_(0.5, 0.5)
            elif parameter.ndim == 1:
                parameter.normal_(0, 0.5)
    return model


def _in_norm(model: Any, parameter: str) -> bool:
    return is_norm(model.get_submodule(parameter.rpartition(".")[0]))


def is_norm(module: Any) -> bool:
    return "Norm" in type(module).__name__


def neutralise(model: Any) -> set[str]:
    """Rotary at angle 0 (every position is 0), no norm on queries and keys; returns where there was one."""
    import torch

    def angle_zero(module: Any, args: Any, output: Any) -> Any:
        return torch.ones_like(output[0]), torch.zeros_like(output[1])

    normed = set()
    for path, module in list(model.named_modules()):
        if "RotaryEmbedding" in type(module).__name__:
            module.register_forward_hook(angle_zero)
        for name in ("q_norm", "k_norm", "q_layernorm", "k_layernorm"):
            if isinstance(getattr(module, name, None), torch.nn.Module):
                setattr(module, name, torch.nn.Identity())
                normed.add(path)
    return normed


def without_biases(model: Any) -> None:
    import torch

    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias") and not _in_norm(model, name):
                parameter.zero_()


def _ids(config: Any, seed: int = 0, batch: int = 7, length: int = 12) -> Any:
    import torch

    generator = torch.Generator().manual_seed(seed)
    return torch.randint(7, config.vocab_size, (batch, length), generator=generator)


def _random(*shape: int) -> Any:
    import torch

    return torch.randn(*shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64)


def _pixels(config: Any, batch: int = 24) -> Any:
    return _random(batch, 3, config.image_size, config.image_size)


def _with_images(config: Any) -> dict[str, Any]:
    ids = _ids(config.text_config, batch=24)
    ids[:, 3 : 3 + config.mm_tokens_per_image] = config.image_token_id
    return {"input_ids": ids, "pixel_values": _pixels(config.vision_config)}


FEEDS: Mapping[str, Callable[[Any], dict[str, Any]]] = {
    "ids": lambda c: {"input_ids": _ids(c)},
    "ids, encoder states": lambda c: {
        "input_ids": _ids(c),
        "encoder_hidden_states": _random(7, 9, c.hidden_size),
    },
    "ids, decoder ids": lambda c: {"input_ids": _ids(c), "decoder_input_ids": _ids(c, 1, length=11)},
    "sound, decoder ids": lambda c: {
        "input_features": _random(7, c.num_mel_bins, 2 * c.max_source_positions),
        "decoder_input_ids": _ids(c, 1, length=11),
    },
    "pixels": lambda c: {"pixel_values": _pixels(c)},
    "ids, pixels": lambda c: {
        "input_ids": _ids(c.text_config, batch=24),
        "pixel_values": _pixels(c.vision_config),
    },
    "ids with images": _with_images,
}


# ---- what it computes --------------------------------------------------------------------------------------


@dataclass
class Call:
    """One call of an attention: what went in, and what its own code made of it."""

    module: Any
    x: Any  # (batch, queries, d_model), the module's input
    query: Any  # (batch, n_heads, queries, d_head)
    key: Any  # (batch, n_kv_heads, keys, d_head)
    probabilities: Any  # (batch, n_heads, queries, keys) of the stock attention
    scores: Callable[[Any, Any], Any]  # (q, k) of paired heads -> masked scores
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]


class Recorder:
    """Watches one forward pass: attention calls in order, and inputs and outputs of every module."""

    current: Recorder | None = None

    def __init__(self, model: Any) -> None:
        self.model, self.calls = model, list[Call]()
        self.inputs: dict[Any, list[tuple[tuple[Any, ...], Mapping[str, Any]]]] = {}
        self.outputs: dict[Any, list[Any]] = {}

    @contextlib.contextmanager
    def watching(self) -> Iterator[Recorder]:
        def before(module: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
            self.inputs.setdefault(module, []).append((args, kwargs))

        def after(module: Any, args: Any, output: Any) -> None:
            self.outputs.setdefault(module, []).append(_first(output))

        hooks = [m.register_forward_pre_hook(before, with_kwargs=True) for m in self.model.modules()]
        hooks += [m.register_forward_hook(after) for m in self.model.modules()]
        Recorder.current = self
        try:
            yield self
        finally:
            Recorder.current = None
            for hook in hooks:
                hook.remove()


def _first(output: Any) -> Any:
    if hasattr(output, "last_hidden_state"):
        return output.last_hidden_state
    return output[0] if isinstance(output, tuple) else output


def _input(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    return args[0] if args else kwargs["hidden_states"]


def _stock(module: Any) -> Any:
    return sys.modules[type(module).__module__].eager_attention_forward


def _report(module: Any, query: Any, key: Any, value: Any, attention_mask: Any = None, **kwargs: Any) -> Any:
    """The registered attention: the modeling file's own, and a note of what it was given."""
    output = _stock(module)(module, query, key, value, attention_mask, **kwargs)
    recorder = Recorder.current
    if recorder is not None:
        scale = kwargs.get("scaling")
        scale = query.shape[-1] ** -0.5 if scale is None else scale

        def scores(q: Any, k: Any) -> Any:
            s = scale * (q @ k.transpose(-1, -2))
            if kwargs.get("softcap"):
                s = kwargs["softcap"] * (s / kwargs["softcap"]).tanh()
            for extra in (kwargs.get("position_bias"), attention_mask):
                if extra is not None:
                    s = s + extra
            return s

        args, given = recorder.inputs[module][-1]
        call = Call(module, _input(args, given), query, key, output[1], scores, args, given)
        recorder.calls.append(call)
    return output


@cache
def _interface() -> str:
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, eager_mask
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    ALL_ATTENTION_FUNCTIONS.register("truth", _report)
    ALL_MASK_ATTENTION_FUNCTIONS.register("truth", eager_mask)
    return "truth"


def forward(model: Any, inputs: Mapping[str, Any]) -> tuple[Recorder, Any]:
    """A recorded forward pass, and the encoder's output where there is one."""
    import inspect

    import torch

    cacheless = {"use_cache": False} if "use_cache" in inspect.signature(model.forward).parameters else {}
    # Some rotary embeddings turn queries and keys in single precision: here float() stays float64.
    double = patch.object(torch.Tensor, "float", torch.Tensor.double)
    with torch.no_grad(), double, Recorder(model).watching() as recorder:
        output = model(**inputs, **cacheless)
    memory = inputs.get("encoder_hidden_states", getattr(output, "encoder_last_hidden_state", None))
    return recorder, memory


def truths(model: Any, inputs: Mapping[str, Any], q_scaled: bool) -> tuple[list[Truth], Recorder]:
    """Every attention of the model, from two passes: with biases (for them), and without (for the forms)."""
    biased, biased_memory = forward(model, inputs)
    without_biases(model)
    plain, memory = forward(model, inputs)
    paths = {module: path for path, module in model.named_modules()}
    found: dict[Any, Truth] = {}
    places: dict[tuple[str, Any], int] = {}
    for call, with_bias in zip(plain.calls, biased.calls, strict=True):
        crossed = memory is not None and _was_given(call, memory)
        attention = "cross" if crossed else "self"
        stack = re.split(r"\.\d+\.", paths[call.module] + ".", maxsplit=1)[0]
        place = places.get((stack, crossed), 0)
        places[stack, crossed] = place + 1
        if call.module in found:
            found[call.module].order.append(place)
            continue
        scale = call.query.shape[-1] ** -0.5 if q_scaled else 1.0
        keys_from, biased_keys_from = (memory, biased_memory) if crossed else (call.x, with_bias.x)
        w_q = recovered(call.x, call.query) / scale
        w_k = recovered(keys_from, call.key)
        pair = pairing(call)
        found[call.module] = Truth(
            path=paths[call.module],
            order=[place],
            attention=attention,
            mask=mask(call, memory if crossed else None),
            matrix=np.stack([w_q[h] @ w_k[g].T for h, g in enumerate(pair)]),
            b_q=_rest(with_bias.x, with_bias.query, w_q * scale) / scale,
            b_k=_rest(biased_keys_from, with_bias.key, w_k),
        )
    return list(found.values()), plain


def _was_given(call: Call, memory: Any) -> bool:
    import torch

    given = [*call.args[1:], *(v for k, v in call.kwargs.items() if k != "hidden_states")]
    return any(
        isinstance(v, torch.Tensor) and v.shape == memory.shape and bool((v == memory).all()) for v in given
    )


def recovered(x: Any, projected: Any) -> Array:
    """(heads, d_model, d_head): the projection of each head, by least squares on inputs that span d_model."""
    inputs = x.reshape(-1, x.shape[-1]).numpy()  # (tokens, d_model)
    values = np.linalg.svd(inputs, compute_uv=False)
    if len(inputs) < inputs.shape[1] or values[-1] < 1e-5 * values[0]:
        raise AssertionError(f"the inputs {inputs.shape} do not span d_model: singular values {values}")
    out = []
    for head in range(projected.shape[1]):
        target = projected[:, head].reshape(len(inputs), -1).numpy()
        weight = np.linalg.lstsq(inputs, target, rcond=None)[0]
        residual = np.linalg.norm(inputs @ weight - target) / np.linalg.norm(target)
        if residual > TOLERANCE:
            raise AssertionError(f"head {head} is not linear in the input: residual {residual:.1e}")
        out.append(weight)
    return np.stack(out)


def _rest(x: Any, projected: Any, weight: Array) -> Array:
    """(heads, d_head): what is left of a projection beside x W, the same for every token."""
    rest = projected.numpy() - np.einsum("btd,hde->bhte", x.numpy(), weight)  # (B, H, T, d_head)
    if np.ptp(rest, axis=(0, 2)).max() > TOLERANCE * 100:
        raise AssertionError("what the projections add to x W differs from token to token")
    return rest.mean(axis=(0, 2))


def pairing(call: Call) -> list[int]:
    """The key head of each query head: the one that reproduces the model's own probabilities."""
    n, g = call.query.shape[1], call.key.shape[1]
    out = []
    for h in range(n):
        errors = []
        for key_head in range(g):
            # every head's scores are formed, so that masks and position biases with a head axis fit
            scores = call.scores(call.query, call.key[:, key_head : key_head + 1])
            p = scores[:, h].softmax(-1)
            errors.append(float((p - call.probabilities[:, h]).abs().max()))
        best = int(np.argmin(errors))
        if errors[best] > 1e-5 or any(e < 1e-3 for i, e in enumerate(errors) if i != best):
            raise AssertionError(f"query head {h} has no one key head: probabilities differ by {errors}")
        out.append(best)
    return out


def mask(call: Call, memory: Any) -> str:
    """Whether the last key can change the output at the first position: the module is called again."""
    import torch

    changed = (call.x if memory is None else memory).clone()
    changed[:, -1] += 1.0 + torch.arange(changed.shape[-1]) % 3
    original = call.x if memory is None else memory

    def swap(value: Any) -> Any:
        same = (
            isinstance(value, torch.Tensor)
            and value.shape == original.shape
            and bool((value == original).all())
        )
        return changed if same else value

    with torch.no_grad():
        before = _first(call.module(*call.args, **call.kwargs))
        after = _first(
            call.module(*(swap(a) for a in call.args), **{k: swap(v) for k, v in call.kwargs.items()})
        )
    moved = float((before[:, 0] - after[:, 0]).abs().max())
    if float((before[:, -1] - after[:, -1]).abs().max()) == 0.0:
        raise AssertionError("the last token does not change the last output")
    return "causal" if moved == 0.0 else "bidirectional"


# ---- the comparison ----------------------------------------------------------------------------------------


def difference(layer: AttentionLayer, truth: Truth) -> float:
    """The largest relative difference between a scanned layer and the truth; infinite where shapes differ."""
    form = layer.form
    matrices = np.asarray(form.matrix())
    if matrices.shape != truth.matrix.shape:
        return math.inf
    found = [_relative(m, t) for m, t in zip(matrices, truth.matrix, strict=True)]
    found.append(_relative(np.asarray(form.total().matrix())[0], truth.matrix.sum(0)))
    for gamma in (1.0, 2.0):
        directed = [reference.directionality(w, gamma) for w in truth.matrix]
        found.append(float(np.abs(form.directionality(gamma) - directed).max()))
    if truth.attention == "self":
        found.append(float(np.abs(form.symmetry() - [reference.symmetry(w) for w in truth.matrix]).max()))
    for bias, true_bias in ((form.b_q, truth.b_q), (form.b_k, truth.b_k)):
        mine = np.zeros_like(true_bias) if bias is None else np.asarray(bias)
        found.append(math.inf if mine.shape != true_bias.shape else float(np.abs(mine - true_bias).max()))
    return max(found)


def _relative(mine: Array, true: Array) -> float:
    return float(np.linalg.norm(mine - true) / np.linalg.norm(true))


def live_path(case: Case, path: str) -> str:
    for pattern, live in case.names:
        path = re.sub(pattern, live, path)
    return path


def compare(
    case: Case, source: Path, found: Sequence[Truth], recorder: Recorder | None, normed: set[str]
) -> Verdict:
    """Everything that qkform says about the file, against the truth; then the mutants."""
    verdict = Verdict(case, layers=list(qk.layers(source, **case.options)))
    problem = verdict.problems.append
    checkpoint = open_checkpoint(source)
    by_path = {truth.path: truth for truth in found}
    seen = [live_path(case, layer.module) for layer in verdict.layers]
    if sorted(seen) != sorted(by_path):
        problem(f"layers found {sorted(seen)}, attentions in the model {sorted(by_path)}")
    for layer, path in zip(verdict.layers, seen, strict=True):
        truth = by_path.get(path)
        if truth is None:
            continue
        verdict.differences[layer.module] = off = difference(layer, truth)
        if not off <= TOLERANCE:
            problem(f"{layer.module}: differs by {off:.1e}")
        n, d = truth.matrix.shape[:2]
        claims = {
            "attention": (layer.attention, truth.attention),
            "mask": (
                layer.mask,
                "unknown" if case.member == "torch" and layer.mask == "unknown" else truth.mask,
            ),
            "n_heads, n_kv_heads": ((layer.n_heads, layer.n_kv_heads), (n, len(truth.b_k))),
            "d_model, d_head": ((layer.d_model, layer.d_head), (d, truth.b_q.shape[1])),
            "layer": (list(layer.shared_by or [layer.layer]), truth.order),
            "flags": (layer.flags, ("qk_norm",) if path in normed else ()),
            "component": (any(f".{t}".startswith(f".{layer.component}") for t in checkpoint.tensors), True),
            "module": (any(t.startswith(layer.module) for t in checkpoint.tensors), True),
        }
        for what, (mine, true) in claims.items():
            if mine != true:
                problem(f"{layer.module}: {what} is {mine!r}, the model says {true!r}")
        if recorder is not None:
            wrong = norm_problem(case, layer, path, recorder, checkpoint)
            if wrong:
                problem(f"{layer.module}: {wrong}")
        for mutant in filter(lambda m: applies(m, layer), MUTANTS):
            noticed = verdict.failed if fails(mutant, layer, truth) else verdict.unnoticed
            noticed.setdefault(layer.module, []).append(mutant)
    (scanned,) = qk.scan(source, signature="none", **case.options).models
    skipped = sorted(entry["module"] for entry in scanned.skipped)
    if skipped != sorted(case.skipped):
        problem(f"skipped: {scanned.skipped}, expected {case.skipped}")
    return verdict


def norm_problem(
    case: Case, layer: AttentionLayer, path: str, recorder: Recorder, checkpoint: Any
) -> str | None:
    """What is wrong with `norm` and `norm_kind`, None where they hold."""
    model = recorder.model
    module = model.get_submodule(path)
    inputs = [_input(*given) for given in recorder.inputs[module]]
    if layer.norm is None:
        if layer.norm_kind not in ("post", "none"):
            return f"norm_kind is {layer.norm_kind!r} without a norm"
        block = model.get_submodule(re.match(r".*\d(?=\.)", path)[0])
        return (
            None
            if _is_residual(recorder, block, inputs[0])
            else "no norm is named, and the input is not the residual"
        )
    if f"{layer.norm}.weight" not in checkpoint.tensors:
        return f"there is no {layer.norm}.weight in the file"
    live = live_path(case, layer.norm)
    norm = model.get_submodule(live)
    if not any(_equal(out, x) for out in recorder.outputs[norm] for x in inputs):
        return f"the output of {live} is not what the attention reads"
    x = _input(*recorder.inputs[norm][0]).numpy()
    gain = np.asarray(checkpoint.read(f"{layer.norm}.weight"))
    eps = next(getattr(norm, n) for n in ("eps", "variance_epsilon", "epsilon") if hasattr(norm, n))
    centred = x - x.mean(-1, keepdims=True) if layer.norm_kind == "layer" else x
    expected = centred / np.sqrt((centred**2).mean(-1, keepdims=True) + eps)
    expected = expected * (1.0 + gain if layer.norm_kind == "rms, gain 1 + weight" else gain)
    if f"{layer.norm}.bias" in checkpoint.tensors:
        expected = expected + checkpoint.read(f"{layer.norm}.bias")
    off = _relative(expected, recorder.outputs[norm][0].numpy())
    return None if off < 1e-5 else f"{live} is not of kind {layer.norm_kind!r}: off by {off:.1e}"


def _equal(a: Any, b: Any) -> bool:
    return a.shape == b.shape and bool((a - b).abs().max() <= 1e-12 * b.abs().max())


def _is_residual(recorder: Recorder, block: Any, x: Any) -> bool:
    """x is the block's own input, or something of the block is added to x before a norm."""
    import torch

    if any(_equal(_input(*given), x) for given in recorder.inputs[block]):
        return True
    inside = list(block.modules())
    outputs = [o for m in inside for o in recorder.outputs.get(m, ()) if isinstance(o, torch.Tensor)]
    sums = [_input(*given) for m in inside if is_norm(m) for given in recorder.inputs.get(m, ())]
    return any(o.shape == x.shape == s.shape and _equal(s - x, o) for s in sums for o in outputs)


# ---- mutants -----------------------------------------------------------------------------------------------

MUTANTS: Mapping[str, str] = {
    "swap": "Q and K exchanged",
    "pairing": "query head h reads key head h mod G, not h // (H / G)",
    "transposition": "stored (in, out) read as (out, in), or the other way round",
    "order": "a fused weight cut in the other order: blocks for heads, heads for blocks, v before k",
}


def applies(mutant: str, layer: AttentionLayer) -> bool:
    match mutant:
        case "pairing":
            return 1 < layer.n_kv_heads < layer.n_heads
        case "order":
            return "|" in layer.q.part + layer.k.part
    return True


def fails(mutant: str, layer: AttentionLayer, truth: Truth) -> bool:
    """Whether the comparison notices a mutant: a difference, or an error on the way."""
    fresh = replace(layer)
    try:
        with mutated(mutant):
            if mutant == "transposition":
                q, k = (replace(s, transposed=not s.transposed) for s in (layer.q, layer.k))
                fresh = replace(layer, q=q, k=k)
            return not difference(fresh, truth) <= TOLERANCE
    except (QKFormError, ValueError):
        return True


@contextlib.contextmanager
def mutated(mutant: str) -> Iterator[None]:
    match mutant:
        case "swap":
            with patch.object(layer_module, "BilinearForm", _swapped):
                yield
        case "pairing":
            with patch.object(BilinearForm, "kv_head", lambda self, head: head % self.n_kv_heads):
                yield
        case "order":
            with patch.object(AttentionLayer, "_take", _other_order):
                yield
        case _:
            yield


def _swapped(w_q: Array, w_k: Array, *, b_q: Array | None, b_k: Array | None) -> BilinearForm:
    group = len(w_q) // len(w_k)
    bias = None if b_k is None else np.repeat(b_k, group, 0)
    return BilinearForm(np.repeat(w_k, group, 0), w_q, b_q=bias, b_k=b_q)


def _other_order(self: AttentionLayer, weight: Array, stored: Any, heads: int) -> Array:
    """Repeated pieces read as blocks; blocks as repeated pieces, or from the other end."""
    if stored.part == WHOLE:
        return weight.reshape(heads, -1, weight.shape[1])
    sizes = self._sizes(stored)
    right = cut(stored.part, sizes)
    if right.repeats > 1:
        start = right.start * right.repeats
        rows = weight[start : start + right.rows * right.repeats]
    elif self.n_kv_heads > 1 and set(parsed(stored.order)[1]) <= {"q", "k", "v"}:
        rows = cut(stored.part.replace(stored.order, f"groups x [{stored.order}]"), sizes).of(weight)
    else:
        end = len(weight) - right.start
        rows = weight[end - right.rows : end]
    return rows.reshape(heads, -1, weight.shape[1])


# ---- files of other kinds ----------------------------------------------------------------------------------


def multihead_truths(model: Any) -> list[Truth]:
    """The forms of nn.MultiheadAttention modules, from the probabilities of their own forward.

    log p_ij is x_i W x_j^T / sqrt(d_head) up to a constant per row, which goes with the mean over j.
    """
    import torch

    found, place = [], {"self": 0, "cross": 0}
    for path, module in model.named_modules():
        if not isinstance(module, torch.nn.MultiheadAttention):
            continue
        attention = "self" if path.endswith("self_attn") or not path else "cross"
        attention = "cross" if module.kdim != module.embed_dim else attention
        x = _random(1, 90, module.embed_dim) / 2
        y = _random(1, 90, module.kdim + 1)[..., 1:] / 2 if attention == "cross" else x
        values = y if module.vdim == module.kdim else _random(1, 90, module.vdim)
        with torch.no_grad():
            p = module(x, y, values, need_weights=True, average_attn_weights=False)[1][0]  # (H, T, S)
        scores = np.log(p.numpy())
        scores -= scores.mean(-1, keepdims=True)
        keys = y[0].numpy() - y[0].numpy().mean(0)
        matrix = np.linalg.pinv(x[0].numpy()) @ scores @ np.linalg.pinv(keys).T * math.sqrt(module.head_dim)
        if _relative(x[0].numpy() @ matrix @ keys.T / math.sqrt(module.head_dim), scores) > TOLERANCE:
            raise AssertionError(f"{path}: log p is not bilinear in the inputs")
        zeros = np.zeros((module.num_heads, module.head_dim))
        found.append(Truth(path, [place[attention]], attention, "bidirectional", matrix, zeros, zeros))
        place[attention] += 1
    return found


def _torch_model(kind: str, settings: Mapping[str, Any]) -> Any:
    """A torch module with random weights and no biases: they cannot be told apart from the probabilities."""
    import torch

    torch.manual_seed(5)
    single = getattr(torch.nn, kind)(**settings, batch_first=True, dtype=torch.float64)
    match kind:
        case "TransformerEncoderLayer":
            single = torch.nn.TransformerEncoder(single, 3, enable_nested_tensor=False)
        case "TransformerDecoderLayer":
            single = torch.nn.TransformerDecoder(single, 2)
    with torch.no_grad():
        for name, parameter in single.named_parameters():
            if parameter.ndim == 2:
                parameter.normal_(0, 0.2)
            elif name.endswith("bias"):
                parameter.zero_()
    return single.eval()


def write_gguf(
    path: Path, arch: str, config: Any, tensors: Mapping[str, Array], *, head_dim: int | None = None
) -> None:
    """A GGUF file with the metadata and names of the public converter, in float64."""
    import gguf

    writer = gguf.GGUFWriter(path, arch)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_embedding_length(config.hidden_size)
    writer.add_head_count(config.num_attention_heads)
    if hasattr(config, "num_key_value_heads"):
        writer.add_head_count_kv(config.num_key_value_heads)
    if head_dim is not None:
        writer.add_key_length(head_dim)
    if arch == "bert":
        writer.add_causal_attention(False)
    for name, tensor in tensors.items():
        writer.add_tensor(name, np.ascontiguousarray(tensor))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def gguf_tensors(model: Any, names: Names) -> dict[str, Array]:
    """The tensors of a model whose names match, under their GGUF names."""
    out = {}
    for name, tensor in model.state_dict().items():
        for pattern, new in names:
            if re.fullmatch(pattern, name):
                out[re.sub(pattern, new, name)] = tensor.numpy()
    return out


_GGUF_SEPARATE = (
    (r"layers\.(\d+)\.self_attn\.([qk])_proj\.(weight|bias)", r"blk.\1.attn_\2.\3"),
    (r"layers\.(\d+)\.input_layernorm\.weight", r"blk.\1.attn_norm.weight"),
)


def interleaved(rows: Array, heads: int) -> Array:
    """Rows of each head reordered from two halves to pairs, as llama's rotary wants them in GGUF."""
    halves = rows.reshape(heads, 2, len(rows) // heads // 2, *rows.shape[1:])
    return halves.swapaxes(1, 2).reshape(rows.shape)


def gguf_llama(model: Any, path: Path, *, sides: str = "qk") -> None:
    """`sides` says which projections are reordered; the converter does both."""
    config, tensors = model.config, gguf_tensors(model, _GGUF_SEPARATE)
    heads = {"q": config.num_attention_heads, "k": config.num_key_value_heads}
    for name in tensors:
        side = name.split(".")[2].removeprefix("attn_")
        if side in sides:
            tensors[name] = interleaved(tensors[name], heads[side])
    write_gguf(path, "llama", config, tensors, head_dim=config.head_dim)


def gguf_qwen2(model: Any, path: Path) -> None:
    write_gguf(path, "qwen2", model.config, gguf_tensors(model, _GGUF_SEPARATE))


def gguf_gemma(model: Any, path: Path) -> None:
    """The converter adds the 1 of Gemma's 1 + weight to the stored norm."""
    tensors = gguf_tensors(model, _GGUF_SEPARATE)
    tensors = {name: t + 1.0 if "norm" in name else t for name, t in tensors.items()}
    write_gguf(path, "gemma", model.config, tensors, head_dim=model.config.head_dim)


def gguf_gpt2(model: Any, path: Path) -> None:
    names = (
        (r"h\.(\d+)\.attn\.c_attn\.(weight|bias)", r"blk.\1.attn_qkv.\2"),
        (r"h\.(\d+)\.ln_1\.(weight|bias)", r"blk.\1.attn_norm.\2"),
    )
    tensors = gguf_tensors(model, names)
    tensors = {name: t.T if t.ndim == 2 else t for name, t in tensors.items()}
    write_gguf(path, "gpt2", model.config, tensors)


def gguf_phi3(model: Any, path: Path) -> None:
    names = (
        (r"layers\.(\d+)\.self_attn\.qkv_proj\.weight", r"blk.\1.attn_qkv.weight"),
        (r"layers\.(\d+)\.input_layernorm\.weight", r"blk.\1.attn_norm.weight"),
    )
    write_gguf(path, "phi3", model.config, gguf_tensors(model, names))


def gguf_bert(model: Any, path: Path) -> None:
    names = (
        (r"encoder\.layer\.(\d+)\.attention\.self\.query\.(weight|bias)", r"blk.\1.attn_q.\2"),
        (r"encoder\.layer\.(\d+)\.attention\.self\.key\.(weight|bias)", r"blk.\1.attn_k.\2"),
        (
            r"encoder\.layer\.(\d+)\.attention\.output\.LayerNorm\.(weight|bias)",
            r"blk.\1.attn_output_norm.\2",
        ),
    )
    write_gguf(path, "bert", model.config, gguf_tensors(model, names))


# ---- the cases ---------------------------------------------------------------------------------------------

_ENCODER = {
    "vocab_size": 61,
    "hidden_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 20,
    "max_position_embeddings": 40,
}
_DECODER = _ENCODER | {"num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 10}
_MODERN = _ENCODER | {
    "norm_bias": True,
    "num_hidden_layers": 4,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "cls_token_id": 3,
    "sep_token_id": 4,
}
_GPT2 = {"vocab_size": 61, "n_embd": 24, "n_layer": 3, "n_head": 4, "n_positions": 40}

_SIZES = {"hidden_size": 24, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 20}
_BART = {
    "vocab_size": 61,
    "d_model": 24,
    "encoder_layers": 3,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 6,
    "encoder_ffn_dim": 20,
    "decoder_ffn_dim": 20,
    "max_position_embeddings": 40,
    "pad_token_id": 1,
}
_WHISPER = _BART | {"num_mel_bins": 5, "max_source_positions": 15, "max_target_positions": 20}
_T5 = {
    "vocab_size": 61,
    "d_model": 24,
    "d_kv": 7,
    "num_heads": 4,
    "d_ff": 20,
    "num_layers": 3,
    "num_decoder_layers": 2,
}
_IMAGES = {"image_size": 8, "patch_size": 4}
_VISION = _SIZES | _IMAGES
_TEXT_TOWER = _SIZES | {"vocab_size": 61, "max_position_embeddings": 40, "num_attention_heads": 6}
_TOWERS = {"text_config": _TEXT_TOWER, "vision_config": _VISION | {"hidden_size": 20, "num_hidden_layers": 2}}
_GEMMA3 = {
    "text_config": _DECODER
    | {"sliding_window": 64, "layer_types": ["sliding_attention", "full_attention"] * 2},
    "vision_config": _VISION | {"hidden_size": 20, "num_hidden_layers": 2, "vision_use_head": False},
    "mm_tokens_per_image": 4,
    "image_token_id": 3,
    "boi_token_id": 1,
    "eoi_token_id": 2,
}
_GEMMA3["text_config"]["num_hidden_layers"] = 4
_VIT_NAMES = (
    (r"encoder\.layer\.(\d+)\.attention\.attention$", r"layers.\1.attention"),
    (r"encoder\.layer\.", "layers."),
)
_TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_EXPERTS = {
    "num_experts": 3,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 10,
    "shared_expert_intermediate_size": 10,
}
_TORCH_LAYER = {"d_model": 24, "nhead": 4, "dim_feedforward": 20}
_GGUF_LAYERS = (
    (r"^blk\.(\d+)\.attn_norm", r"layers.\1.input_layernorm"),
    (r"^blk\.(\d+)$", r"layers.\1.self_attn"),
)


def _case(name: str, build: str, settings: Mapping[str, Any], **rest: Any) -> Case:
    """A case whose model_type opens its name ("bert, decoder"), and whose config is named as its model."""
    member = name.partition(",")[0]
    config = re.sub(r"(Model|For[A-Z]\w*|LMHeadModel|TextModelWithProjection)$", "", build) + "Config"
    return Case(name, rest.pop("member", member), build, rest.pop("config", config), settings, **rest)


CASES: tuple[Case, ...] = (
    _case("bert", "BertModel", _ENCODER),
    _case("bert, masked-language head", "BertForMaskedLM", _ENCODER),
    _case("bert, decoder", "BertModel", _ENCODER | {"is_decoder": True}),
    _case(
        "bert, decoder with cross-attention",
        "BertModel",
        _ENCODER | {"is_decoder": True, "add_cross_attention": True},
        feed="ids, encoder states",
    ),
    _case("roberta", "RobertaModel", _ENCODER),
    _case("xlm-roberta", "XLMRobertaModel", _ENCODER),
    _case("camembert", "CamembertModel", _ENCODER),
    _case("electra", "ElectraModel", _ENCODER | {"embedding_size": 28}),
    _case(
        "distilbert",
        "DistilBertModel",
        {
            "vocab_size": 61,
            "dim": 24,
            "n_layers": 3,
            "n_heads": 4,
            "hidden_dim": 20,
            "max_position_embeddings": 40,
        },
        config="DistilBertConfig",
    ),
    _case("albert", "AlbertModel", _ENCODER | {"embedding_size": 28}),
    _case(
        "albert, two groups",
        "AlbertModel",
        _ENCODER | {"embedding_size": 28, "num_hidden_layers": 5, "num_hidden_groups": 2},
    ),
    _case("modernbert", "ModernBertModel", _MODERN),
    _case("modernbert-decoder", "ModernBertDecoderModel", _MODERN),
    _case("gpt2", "GPT2Model", _GPT2),
    _case("gpt2, language head", "GPT2LMHeadModel", _GPT2),
    _case(
        "gpt2, cross-attention",
        "GPT2Model",
        _GPT2 | {"add_cross_attention": True},
        feed="ids, encoder states",
    ),
    _case("gpt_neox", "GPTNeoXModel", _ENCODER),
    _case("opt", "OPTModel", _ENCODER | {"ffn_dim": 20, "word_embed_proj_dim": 24}, q_scaled=True),
    _case(
        "opt, post-norm",
        "OPTModel",
        _ENCODER | {"ffn_dim": 20, "word_embed_proj_dim": 14, "do_layer_norm_before": False},
        q_scaled=True,
    ),
    _case("llama", "LlamaModel", _DECODER),
    _case("llama, language head", "LlamaForCausalLM", _DECODER),
    _case("llama, bidirectional", "LlamaModel", _DECODER | {"is_causal": False}),
    _case("qwen3, bidirectional", "Qwen3Model", _DECODER | {"is_causal": False}),
    _case("mistral", "MistralModel", _DECODER),
    _case("mixtral", "MixtralModel", _DECODER | {"num_local_experts": 2}),
    _case("qwen2", "Qwen2Model", _DECODER),
    _case("qwen3", "Qwen3Model", _DECODER),
    _case("gemma", "GemmaModel", _DECODER),
    _case("gemma2", "Gemma2Model", _DECODER),
    _case("gemma3_text", "Gemma3TextModel", _DECODER),
    _case(
        "gemma3_text, bidirectional",
        "Gemma3TextModel",
        _DECODER | {"use_bidirectional_attention": True},
    ),
    _case(
        "gemma3",
        "Gemma3ForConditionalGeneration",
        _GEMMA3,
        feed="ids with images",
        names=(
            (r"^language_model\.model\.", "model.language_model."),
            (r"^vision_tower\.", "model.vision_tower."),
        ),
    ),
    _case("phi", "PhiModel", _ENCODER | {"num_attention_heads": 6, "num_key_value_heads": 3}),
    _case(
        "phi, query and key norms",
        "PhiModel",
        _ENCODER | {"num_attention_heads": 6, "num_key_value_heads": 3, "qk_layernorm": True},
    ),
    _case("phi3", "Phi3Model", _DECODER | {"pad_token_id": 0}),
    _case("t5", "T5Model", _T5, feed="ids, decoder ids"),
    _case("t5, language head", "T5ForConditionalGeneration", _T5, feed="ids, decoder ids"),
    _case("bart", "BartModel", _BART, feed="ids, decoder ids"),
    _case("whisper", "WhisperModel", _WHISPER, feed="sound, decoder ids", q_scaled=True),
    _case(
        "whisper, language head",
        "WhisperForConditionalGeneration",
        _WHISPER,
        feed="sound, decoder ids",
        q_scaled=True,
    ),
    _case("vit", "ViTModel", _VISION, feed="pixels", names=_VIT_NAMES),
    _case("vit, classifier", "ViTForImageClassification", _VISION, feed="pixels", names=_VIT_NAMES),
    _case("dinov2", "Dinov2Model", _VISION, feed="pixels", names=((r"attention\.attention$", "attention"),)),
    _case("clip", "CLIPModel", _TOWERS, feed="ids, pixels"),
    _case("clip_text_model", "CLIPTextModel", _TEXT_TOWER),
    _case("clip_text_model, projection", "CLIPTextModelWithProjection", _TEXT_TOWER, config="CLIPTextConfig"),
    _case(
        "clip_text_model, older names",
        "CLIPTextModel",
        _TEXT_TOWER,
        stored=((r"^", "text_model."),),
        names=((r"^text_model\.", ""),),
    ),
    _case("clip_vision_model", "CLIPVisionModel", _VISION, feed="pixels"),
    _case("roberta-prelayernorm", "RobertaPreLayerNormModel", _ENCODER),
    _case("ernie", "ErnieModel", _ENCODER),
    _case("data2vec-text", "Data2VecTextModel", _ENCODER),
    _case("layoutlm", "LayoutLMModel", _ENCODER | {"max_2d_position_embeddings": 40}),
    _case(
        "layoutlm, decoder in name only",
        "LayoutLMModel",
        _ENCODER | {"max_2d_position_embeddings": 40, "is_decoder": True},
    ),
    _case("mbart", "MBartModel", _BART, feed="ids, decoder ids"),
    _case("marian", "MarianModel", _BART, feed="ids, decoder ids"),
    _case("pegasus", "PegasusModel", _BART, feed="ids, decoder ids"),
    _case("blenderbot", "BlenderbotModel", _BART, feed="ids, decoder ids"),
    _case("blenderbot-small", "BlenderbotSmallModel", _BART, feed="ids, decoder ids"),
    _case("m2m_100", "M2M100Model", _BART, feed="ids, decoder ids"),
    _case("plbart", "PLBartModel", _BART, feed="ids, decoder ids"),
    _case("mt5", "MT5Model", _T5, feed="ids, decoder ids"),
    _case("umt5", "UMT5Model", _T5, feed="ids, decoder ids"),
    _case("granite", "GraniteModel", _DECODER),
    _case("smollm3", "SmolLM3Model", _DECODER | _TOKENS),
    _case("starcoder2", "Starcoder2Model", _DECODER),
    _case(
        "stablelm",
        "StableLmModel",
        {k: v for k, v in _DECODER.items() if k != "head_dim"} | {"partial_rotary_factor": 0.5},
    ),
    _case("qwen2_moe", "Qwen2MoeModel", _DECODER | _EXPERTS),
    _case("qwen3_moe", "Qwen3MoeModel", _DECODER | _EXPERTS),
    _case("olmo2", "Olmo2Model", _DECODER),
    _case("gptj", "GPTJModel", _GPT2 | {"rotary_dim": 4}),
    _case("biogpt", "BioGptModel", _ENCODER),
    _case("deit", "DeiTModel", _VISION, feed="pixels", names=_VIT_NAMES),
    _case(
        "siglip",
        "SiglipModel",
        {"text_config": _TEXT_TOWER, "vision_config": _VISION | {"num_hidden_layers": 2}},
        feed="ids, pixels",
        skipped=("vision_model.head.attention",),
    ),
    _case("siglip_text_model", "SiglipTextModel", _TEXT_TOWER),
    _case("siglip_vision_model", "SiglipVisionModel", _VISION, feed="pixels", skipped=("head.attention",)),
    _case("vit, live names", "ViTModel", _VISION, feed="pixels", own_names=True),
    _case("dinov2, live names", "Dinov2Model", _VISION, feed="pixels", own_names=True),
    _case(
        "torch, TransformerEncoder", "TransformerEncoderLayer", _TORCH_LAYER, config="", options={"heads": 4}
    ),
    _case(
        "torch, TransformerDecoder", "TransformerDecoderLayer", _TORCH_LAYER, config="", options={"heads": 4}
    ),
    _case(
        "torch, MultiheadAttention",
        "MultiheadAttention",
        {"embed_dim": 24, "num_heads": 4},
        config="",
        options={"heads": 4},
    ),
    _case(
        "torch, MultiheadAttention with kdim",
        "MultiheadAttention",
        {"embed_dim": 24, "num_heads": 4, "kdim": 18, "vdim": 13},
        config="",
        options={"heads": 4},
    ),
    _case("gguf:llama", "LlamaModel", _DECODER, write=gguf_llama, names=_GGUF_LAYERS),
    _case(
        "gguf:qwen2",
        "Qwen2Model",
        {k: v for k, v in _DECODER.items() if k != "head_dim"},
        write=gguf_qwen2,
        names=_GGUF_LAYERS,
    ),
    _case("gguf:gemma", "GemmaModel", _DECODER, write=gguf_gemma, names=_GGUF_LAYERS),
    _case(
        "gguf:gpt2",
        "GPT2Model",
        _GPT2,
        write=gguf_gpt2,
        names=((r"^blk\.(\d+)\.attn_norm", r"h.\1.ln_1"), (r"^blk\.(\d+)$", r"h.\1.attn")),
    ),
    _case(
        "gguf:phi3",
        "Phi3Model",
        {k: v for k, v in _DECODER.items() if k != "head_dim"} | {"pad_token_id": 0},
        write=gguf_phi3,
        names=_GGUF_LAYERS,
    ),
    _case(
        "gguf:bert",
        "BertModel",
        _ENCODER,
        write=gguf_bert,
        names=((r"^blk\.(\d+)$", r"encoder.layer.\1.attention.self"),),
    ),
)


def verify(case: Case) -> Verdict:
    """Build, save, run, compare."""
    with tempfile.TemporaryDirectory() as folder:
        if case.member == "torch":
            model = _torch_model(case.build, case.settings)
            save(case, model, Path(folder))
            return compare(case, Path(folder), multihead_truths(model), None, set())
        model = build(case)
        save(case, model, Path(folder))
        normed = neutralise(model)
        found, recorder = truths(model, FEEDS[case.feed](model.config), case.q_scaled)
        return compare(case, Path(folder), found, recorder, normed)


def save(case: Case, model: Any, folder: Path) -> None:
    from safetensors.torch import load_file, save_file

    if case.write is not None:
        case.write(model, folder / "model.gguf")
    elif case.member == "torch":
        save_file(model.state_dict(), folder / "model.safetensors")
    else:
        model.save_pretrained(folder, **({"save_original_format": False} if case.own_names else {}))
    if case.stored:
        file = folder / "model.safetensors"
        tensors = load_file(file)
        for pattern, new in case.stored:
            tensors = {re.sub(pattern, new, name): t for name, t in tensors.items()}
        save_file(tensors, file)


# ---- the page ----------------------------------------------------------------------------------------------

INTRODUCTION = """\
# Families

<!-- Written by `python -m tests.survey --write docs/families.md`; a test compares it with the rules. -->

A family says where a model keeps its query and key weights. It counts only when it is **verified**: for
every row below, a small model of that kind with random weights and odd sizes is built in double precision,
saved, and read back with qkform. The model then runs its own forward pass, its attention reports the
queries and keys it used, and the query-key form of each head is worked out from those alone. Form,
symmetry, directionality and biases must agree; so must the number of layers and heads, which key head each
query head reads, the mask (does the last token change the first output?) and the norm that feeds the
projections.

Positions are set to 0, so rotary embeddings do nothing, and norms on queries and keys are taken out: qkform
scores the raw weights. Biases are set to 0 for the form and compared on their own. For `torch` modules the
form is worked out from the attention probabilities, without biases. The `gguf` files are written by the
test the way the public converter stores them, and compared with the Hugging Face model they came from.

A test that cannot fail shows nothing. So every row is read again wrongly, in each way that applies, and
each must be noticed in every layer:

{mutants}

Columns: *stored* is `rows` for (outputs, inputs) and `columns` for (inputs, outputs); *keys* says whether
query heads share key heads in the model of this test; *difference* is an upper bound on the largest
relative difference found.

Verified with transformers {transformers} and torch {torch}.

To verify everything again and write this page:

```
python -m tests.survey --write docs/families.md
```

| model | attention | Q, K | stored | keys | mask | norm | difference | mistakes noticed |
|---|---|---|---|---|---|---|---|---|
"""

DESCRIBED = """
GGUF architectures that use the same tensor names and are **not** verified one by one
(their norms are recorded as unknown): {names}.
Any other architecture is read by the same names, with mask and norm unknown.
"""


def rows(verdict: Verdict) -> list[str]:
    """The lines of one case in the page, one for each kind of attention."""
    kinds: dict[tuple[str, ...], list[AttentionLayer]] = {}
    for a in verdict.layers:
        module = _numbered(a.module, a.component)
        names = f"{_local(a.q.weight, a)}, {_local(a.k.weight, a)}"
        if a.q.weight == a.k.weight:
            names = f"{_local(a.q.weight, a)} = {a.q.part.partition(':')[0]}"
        elif a.k.part != "whole":
            names += f" = {a.k.part.partition(':')[0]}"
        keys = "grouped" if a.n_kv_heads < a.n_heads else "one per head"
        kinds.setdefault((module, names, "columns" if a.q.transposed else "rows", keys, a.mask), []).append(a)
    return [_row(verdict, kind, layers) for kind, layers in kinds.items()]


def _row(verdict: Verdict, kind: tuple[str, ...], layers: Sequence[AttentionLayer]) -> str:
    module, names, stored, keys, mask_ = kind
    norms = dict.fromkeys(
        f"`{_numbered(a.norm, a.component).split('{layer}.')[-1]}` ({a.norm_kind})" if a.norm else a.norm_kind
        for a in layers
    )
    worst = max(STABLE, *(verdict.differences[a.module] for a in layers))
    bound = f"< 1e{math.ceil(math.log10(worst))}"
    noticed = ", ".join(dict.fromkeys(m for a in layers for m in verdict.failed[a.module]))
    shown = [verdict.case.name, f"`{module or '(the module itself)'}`", f"`{names}`", stored, keys, mask_]
    cells = [*shown, ", ".join(norms), bound, noticed]
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _local(tensor: str, layer: AttentionLayer) -> str:
    return tensor.removeprefix(layer.module + ".").removesuffix(".weight")


def _numbered(path: str, component: str) -> str:
    return re.sub(rf"^({re.escape(component)}\.)\d+", r"\1{layer}", path) if component else path


def page(verdicts: Sequence[Verdict]) -> str:
    import torch
    import transformers

    mutants = "\n".join(f"- **{name}**: {meaning}" for name, meaning in MUTANTS.items())
    head = INTRODUCTION.format(
        mutants=mutants, transformers=transformers.__version__, torch=torch.__version__
    )
    return head + "\n".join(line for v in verdicts for line in rows(v)) + "\n" + described()


def described() -> str:
    verified = {case.member for case in CASES}
    names = [n.removeprefix("gguf:") for n in families() if n.startswith("gguf:") and n not in verified]
    return DESCRIBED.format(names=", ".join(f"`{n}`" for n in names if n != "*"))


def verdicts(only: str = "") -> list[Verdict]:
    """The verdict of every case whose name fits, with a line printed for each; exits where one fails."""
    found, bad = [], 0
    for case in (c for c in CASES if re.search(only, c.name)):
        try:
            found.append(verify(case))
        except Exception as error:
            bad += 1
            print(f"{case.name}: {type(error).__name__}: {error}")
            continue
        v = found[-1]
        wrong = [*v.problems, *(f"unnoticed in {m}: {', '.join(names)}" for m, names in v.unnoticed.items())]
        bad += bool(wrong)
        mutants = dict.fromkeys(m for names in v.failed.values() for m in names)
        worst = max(v.differences.values(), default=math.nan)
        print(f"{case.name:40} {len(v.layers)} layers  {worst:.0e}  {', '.join(mutants)}")
        for line in wrong:
            print(f"    {line}")
    if bad:
        sys.exit(f"{bad} cases failed")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description="Verify the cases.")
    parser.add_argument("only", nargs="?", default="", help="a regular expression for the names of cases")
    verdicts(parser.parse_args().only)


if __name__ == "__main__":
    main()
