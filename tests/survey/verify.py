"""One model type: built, run, saved, scanned, and everything qkform says held against the model."""

from __future__ import annotations

import contextlib
import tempfile
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

import qkform as qk
from qkform.checkpoints import open_checkpoint
from qkform.errors import QKFormError
from qkform.layouts import AttentionLayer
from tests import truth
from tests.survey import attentions, build, configs
from tests.survey.trace import NormCall, Trace

Array = np.ndarray[Any, Any]

VERIFIED, SCANNED, NO_SOFTMAX, NOT_YET = (
    "verified",
    "scanned, not verifiable",
    "no softmax attention",
    "not yet",
)


@dataclass
class Result:
    """What the survey says about one model type."""

    model_type: str
    status: str = NOT_YET
    reason: str = ""
    step: str = ""  # where it stopped: config, build, feed, save, layout, compare
    built: str = ""  # the class
    variant: str = ""  # of the small config
    fed: list[str] = field(default_factory=list)
    unfed: list[str] = field(default_factory=list)  # parts that no input suited, with what they said
    attentions_seen: int = 0
    found_by_qkform: int = 0
    matched: int = 0
    components: list[dict[str, Any]] = field(default_factory=list)
    not_found: list[dict[str, Any]] = field(default_factory=list)  # seen in the model, unknown to qkform
    not_seen: list[str] = field(default_factory=list)  # known to qkform, not reached
    not_read: list[dict[str, Any]] = field(
        default_factory=list
    )  # softmaxes whose operands have no plain source
    skipped: list[dict[str, str]] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    unknown: list[str] = field(default_factory=list)
    mutants: dict[str, int] = field(default_factory=dict)
    unnoticed: list[str] = field(default_factory=list)


def examine(model_type: str) -> dict[str, Any]:
    """The result of one model type, as plain data. Never raises for what a model does."""
    result = Result(model_type)
    try:
        with watchable():
            _examine(result)
    except build.NoModel:
        result.status, result.step = NO_SOFTMAX, ""
        result.reason = "no class takes this config: it is a part of other configs"
    except Exception as error:
        result.reason = result.reason or f"{type(error).__name__}: {str(error)[:500]}"
    return asdict(result)


@contextlib.contextmanager
def watchable() -> Iterator[None]:
    """Double precision for what a forward makes on the way, no scripted functions, no warnings."""
    jit = torch.jit._state
    torch.set_default_dtype(torch.float64)
    jit.disable()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        jit.enable()
        torch.set_default_dtype(torch.float32)


def _examine(result: Result) -> None:
    model, readings = _running(result)
    seen = [a for r in readings for a in r.attentions]
    failures = [f for r in readings for f in r.failures]
    result.attentions_seen = len({a.module for a in seen} | {f.module for f in failures})
    with tempfile.TemporaryDirectory() as folder:
        result.step = "save"
        model.save_pretrained(folder)
        result.step = "layout"
        tensors = open_checkpoint(Path(folder))
        places = _Places(_matrices(model, Path(folder)))
        result.not_read = [
            {
                "module": f.module,
                "without_form": f.without_form,
                "reason": f.reason,
                "q": f.parameters[0],
                "k": f.parameters[1],
            }
            for f in failures
        ]
        layers: list[AttentionLayer] = []
        try:
            layers = list(qk.layers(folder))
            (scanned,) = qk.scan(folder, signature="none").models
            result.skipped = [dict(s) for s in scanned.skipped]
        except QKFormError as error:
            result.reason = f"{type(error).__name__}: {error!s}".replace(folder, "the file")[:300]
        result.found_by_qkform = len(layers)
        result.step = "compare"
        compare(result, layers, seen, readings, tensors, places)
    classify(result, readings, seen, failures, layers)


def _running(result: Result) -> tuple[Any, list[attentions.Reading]]:
    """The model of the first variant of the config that can be built and run."""
    errors: list[tuple[int, str, Exception]] = []
    best: tuple[int, Any, list[attentions.Reading], Result] | None = None
    tried = []
    for variant in configs.VARIANTS:
        result.step, result.fed, result.unfed = "config", [], []
        try:
            config = configs.small(result.model_type, variant)
            if config.to_dict() in tried:
                continue
            tried.append(config.to_dict())
            result.step = "build"
            model = build.build(result.model_type, config, check_size=not variant.widths)
            result.built = type(model).__name__
            result.step = "feed"
            readings = list(runs(model, result))
        except build.NoModel:
            raise
        except Exception as error:
            errors.append((("config", "build", "feed").index(result.step), result.step, error))
            if hopeless(str(error)):
                break
            continue
        result.variant = variant.name
        reached = sum(r.softmaxes for r in readings)
        if best is None or reached > best[0]:
            best = reached, model, readings, replace(result)
        if not result.unfed:
            break
    if best is not None:
        for name in ("built", "variant", "fed", "unfed"):
            setattr(result, name, getattr(best[3], name))
        return best[1], best[2]
    _, result.step, error = max(errors, key=lambda e: e[0])
    raise error


def hopeless(said: str) -> bool:
    """Whether other sizes would not help: a library or an input is missing."""
    return "requires the" in said or (
        ("TypeError" in said or "AttributeError" in said) and "RuntimeError" not in said
    )


# ---- runs ---------------------------------------------------------------------------------------------------


def runs(model: Any, result: Result) -> Iterator[attentions.Reading]:
    """Readings of the whole model, then of each part that no run has reached."""
    touched: set[str] = set()
    errors: list[str] = []
    done: list[str] = []
    for path, part in [("", model), *_parts(model)]:
        if any(path.startswith(d + ".") or d == "" for d in done) and not _untouched(part, path, touched):
            continue
        said, reached = len(errors), False
        for reading in _readings(part, _untouched(part, path, touched), errors, path):
            assert reading.first is not None
            reached = True
            touched |= {f"{path}.{n}".removeprefix(".") for n in reading.first.touched}
            for a in [*reading.attentions, *reading.failures]:
                a.module = f"{path}.{a.module}".strip(".")
            yield reading
        if reached:
            done.append(path)
            result.fed.append(path or "whole model")
        elif path:
            result.unfed.append("; ".join(dict.fromkeys(errors[said:]))[:400])
    if not result.fed:
        raise ValueError("; ".join(errors)[:1500] or "no inputs to try")


def _parts(model: Any) -> list[tuple[str, Any]]:
    from transformers import PreTrainedModel

    return [(p, m) for p, m in model.named_modules() if p and isinstance(m, PreTrainedModel)]


def _untouched(part: Any, path: str, touched: set[str]) -> set[str]:
    """Names, in the part, of matrices that no run has used."""
    names = [n for n, p in part.named_parameters() if p.ndim >= 2]
    return {n for n in names if f"{path}.{n}".removeprefix(".") not in touched}


def _readings(part: Any, left: set[str], errors: list[str], path: str) -> Iterator[attentions.Reading]:
    """A reading for every input that suits the part and reaches some of the matrices that are `left`."""
    for inputs in build.candidates(part):
        call = build.forward(part, inputs)
        try:
            first = attentions.watch(part, call)
        except Exception as error:
            errors.append(
                f"{path or 'model'}({', '.join(inputs)}): {type(error).__name__}: {str(error)[:150]}"
            )
            continue
        if left & first.touched:
            left -= first.touched
            yield attentions.read(part, call, first)
        if not left:
            return


# ---- comparison ---------------------------------------------------------------------------------------------


def compare(
    result: Result,
    layers: Sequence[AttentionLayer],
    seen: Sequence[attentions.Attention],
    readings: Sequence[attentions.Reading],
    checkpoint: Any,
    places: _Places,
) -> None:
    truths = _truths(seen)
    left = dict(enumerate(truths))
    parts = _truths([part for a in seen for part in a.parts()])
    for layer in layers:
        try:
            matrices = np.asarray(layer.form.matrix())
        except QKFormError as error:
            result.problems.append(f"{layer.module}: {error}")
            continue
        if layer.part is not None:
            _check_part(result, layer, matrices, parts, readings, checkpoint)
            continue
        hit = next((i for i, (t, _) in enumerate(truths) if _same(matrices, t.matrix)), None)
        if hit is None:
            result.not_seen.append(layer.module)
            continue
        left.pop(hit, None)
        true, calls = truths[hit]
        result.matched += 1
        _check(result, layer, true, calls, readings, checkpoint)
    for _, calls in left.values():
        a = calls[0]
        result.not_found.append(
            {
                "module": a.module,
                "attention": a.attention,
                "mask": a.mask,
                "heads": a.matrix.shape[0],
                "kv_heads": len(a.k.rows),
                "qk_norm": a.normed,
                "terms": a.terms,
                "q": places.describe(a.q),
                "k": places.describe(a.k),
            }
        )


def _check_part(
    result: Result,
    layer: AttentionLayer,
    matrices: Array,
    parts: Sequence[tuple[truth.Truth, list[attentions.Attention]]],
    readings: Sequence[attentions.Reading],
    checkpoint: Any,
) -> None:
    for true, calls in parts:
        if _same(matrices, true.matrix):
            _check(result, layer, true, calls, readings, checkpoint)
            return
    result.problems.append(f"{layer.module}: no term of the model's score is its part {layer.part!r}")


def _truths(seen: Sequence[attentions.Attention]) -> list[tuple[truth.Truth, list[attentions.Attention]]]:
    """Calls grouped by their weights: several calls of one attention are several layers."""
    out: list[tuple[truth.Truth, list[attentions.Attention]]] = []
    for a in seen:
        matrix = a.matrix
        hit = next((i for i, (t, _) in enumerate(out) if _same(matrix, t.matrix)), None)
        if hit is not None:
            out[hit][1].append(a)
            continue
        out.append((truth.Truth(a.module, [], a.attention, a.mask, matrix, a.q.bias(), a.k.bias()), [a]))
    return out


def _same(a: Array, b: Array) -> bool:
    return a.shape == b.shape and bool(np.abs(a - b).max() <= 1e-6 * np.abs(b).max())


def _check(
    result: Result,
    layer: AttentionLayer,
    true: truth.Truth,
    calls: Sequence[attentions.Attention],
    readings: Sequence[attentions.Reading],
    checkpoint: Any,
) -> None:
    # a learned vector that is added to every query may be stored as a bias, or apart from it
    with_added = replace(true, b_q=true.b_q + calls[0].q.added, b_k=true.b_k + calls[0].k.added)
    true = min(true, with_added, key=lambda t: truth.difference(layer, t))
    off = truth.difference(layer, true)
    if not off <= truth.TOLERANCE:
        result.problems.append(f"{layer.module}: differs by {off:.1e}")
    n, d = true.matrix.shape[:2]
    masks = {c.mask for c in calls}
    claims: dict[str, tuple[Any, Any]] = {
        "attention": (layer.attention, true.attention),
        "n_heads, n_kv_heads": ((layer.n_heads, layer.n_kv_heads), (n, len(true.b_k))),
        "d_model, d_head": ((layer.d_model, layer.d_head), (d, true.b_q.shape[1])),
        "query and key norms": ("qk_norm" in layer.flags, calls[0].normed),
    }
    if layer.mask == "unknown":
        result.unknown.append("mask")
    elif "unknown" not in masks:
        claims["mask"] = ({layer.mask}, masks)
    for what, (mine, model) in claims.items():
        if mine != model:
            result.problems.append(f"{layer.module}: {what} is {mine!r}, the model says {model!r}")
    if layer.norm_kind == "unknown":
        result.unknown.append("norm")
    else:
        wrong = norm_problem(layer, calls, readings, checkpoint)
        if wrong:
            result.problems.append(f"{layer.module}: {wrong}")
    for mutant in (m for m in truth.MUTANTS if truth.applies(m, layer)):
        if truth.fails(mutant, layer, true):
            result.mutants[mutant] = result.mutants.get(mutant, 0) + 1
        else:
            result.unnoticed.append(f"{layer.module}: {mutant}")
    result.components.append(
        {
            "component": layer.component,
            "module": layer.module,
            "attention": layer.attention,
            "mask": layer.mask,
            "q": layer.q.weight,
            "k": layer.k.weight,
            "part": layer.q.part,
            "transposed": layer.q.transposed,
            "heads": layer.n_heads,
            "kv_heads": layer.n_kv_heads,
            "norm": layer.norm,
            "norm_kind": layer.norm_kind,
            "flags": list(layer.flags),
            "score_part": layer.part,
            "terms": calls[0].terms,
            "offset": calls[0].q.offset or calls[0].k.offset,
        }
    )


def norm_problem(
    layer: AttentionLayer,
    calls: Sequence[attentions.Attention],
    readings: Sequence[attentions.Reading],
    checkpoint: Any,
) -> str | None:
    """What is wrong with `norm` and `norm_kind`, None where they hold."""
    reading = next(r for r in readings if any(a.x is calls[0].x for a in r.attentions))
    assert reading.first is not None
    first: Trace = reading.first
    x = calls[0].x
    if layer.norm is None:
        if layer.norm_kind not in ("post", "none"):
            return f"norm_kind is {layer.norm_kind!r} without a norm"
        residual = any(_equal(part, x) for a, b, _ in first.sums for part in (a, b))
        return None if residual else "no norm is named, and the input is not the residual"
    name = f"{layer.norm}.weight"
    if name not in checkpoint.tensors:
        return f"there is no {name} in the file"
    gain = np.asarray(checkpoint.read(name))
    modules = dict(first.model.named_modules())
    made: list[NormCall] = [
        n
        for n in first.norms
        if isinstance(w := getattr(modules[n.module], "weight", None), torch.Tensor)
        and w.shape == gain.shape
        and bool(np.array_equal(w.detach().numpy(), gain))
    ]
    feeding = [n for n in made if _equal(n.y, x)]
    if not feeding:
        return f"the output of {layer.norm} is not what the attention reads"
    norm = modules[feeding[0].module]
    eps = next(
        (getattr(norm, n) for n in ("eps", "variance_epsilon", "epsilon", "norm_eps") if hasattr(norm, n)),
        1e-6,
    )
    given = feeding[0].x.detach().numpy()
    centred = given - given.mean(-1, keepdims=True) if layer.norm_kind == "layer" else given
    expected = centred / np.sqrt((centred**2).mean(-1, keepdims=True) + (eps or 0.0))
    expected = expected * (1.0 + gain if layer.norm_kind == "rms, gain 1 + weight" else gain)
    if f"{layer.norm}.bias" in checkpoint.tensors:
        expected = expected + checkpoint.read(f"{layer.norm}.bias")
    y = feeding[0].y.detach().numpy()
    off = float(np.linalg.norm(expected - y) / np.linalg.norm(y))
    return None if off < 1e-5 else f"{layer.norm} is not of kind {layer.norm_kind!r}: off by {off:.1e}"


def _equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    if a is b:
        return True
    if a.numel() != b.numel() or a.shape[-1] != b.shape[-1]:
        return False
    a, b = a.reshape(b.shape), b
    return bool((a - b).abs().max() <= 1e-12 * b.abs().max())


# ---- where weights are in the file ------------------------------------------------------------------------


def _matrices(model: Any, folder: Path) -> dict[str, Array]:
    """Every tensor of floating point in the files, by name."""
    from safetensors.torch import load_file

    found = {}
    for file in sorted(folder.glob("*.safetensors")):
        found.update({n: t.double().numpy() for n, t in load_file(file).items() if t.is_floating_point()})
    return found


class _Places:
    """Rows and columns of every matrix in the file, by value."""

    def __init__(self, tensors: Mapping[str, Array]) -> None:
        self.rows: dict[bytes, tuple[str, str, int]] = {}
        for name, t in tensors.items():
            if t.ndim < 2 or t.size > 4_000_000:
                continue
            flat = np.ascontiguousarray(t.reshape(t.shape[0], -1), dtype=np.float64)
            for i, row in enumerate(flat):
                self.rows.setdefault(row.tobytes(), (name, "row", i))
            if t.ndim == 2:
                for i, row in enumerate(np.ascontiguousarray(flat.T)):
                    self.rows.setdefault(row.tobytes(), (name, "column", i))

    def describe(self, side: attentions.Side) -> str:
        """In words: which rows or columns of which tensor make the heads."""
        w = side.matrix().swapaxes(1, 2)  # (heads, d_head, d_model)
        found = [[self.rows.get(np.ascontiguousarray(r).tobytes()) for r in head] for head in w]
        flat = [f for head in found for f in head]
        if any(f is None for f in flat):
            return f"not in the file as such; parameters {', '.join(side.parameters)}"
        names = {(f[0], f[1]) for f in flat if f}
        where = "; ".join(f"{kind}s of {name}" for name, kind in sorted(names))
        index = np.array([[f[2] for f in head if f] for head in found])
        inner = set(np.diff(index, axis=1).ravel().tolist()) if index.shape[1] > 1 else {1}
        starts = index[:, 0].tolist()
        step = sorted(set(np.diff(starts).tolist())) if len(starts) > 1 else []
        heads = f"{len(starts)} heads of {index.shape[1]}, from {starts[0]}, a head every {step}"
        return f"{where}: {heads}, inside step {sorted(inner)}"


# ---- verdict ------------------------------------------------------------------------------------------------


def classify(
    result: Result,
    readings: Sequence[attentions.Reading],
    seen: Sequence[attentions.Attention],
    failures: Sequence[attentions.Failure],
    layers: Sequence[AttentionLayer],
) -> None:
    skipped = [s["module"] for s in result.skipped]

    def listed(module: str) -> bool:
        return any(s and (s in module or module in s) for s in skipped)

    open_failures = [f for f in failures if not f.without_form and not listed(f.module)]
    open_seen = [a for a in result.not_found if not listed(a["module"])]
    if not any(r.softmaxes for r in readings) and not layers:
        result.status, result.reason, result.step = (
            NO_SOFTMAX,
            "no product reaches a softmax in its forward",
            "",
        )
    elif result.problems or result.unnoticed:
        result.reason = "; ".join([*result.problems, *(f"not noticed: {u}" for u in result.unnoticed)])[:600]
    elif not layers:
        result.step = "layout"
    elif open_seen:
        result.reason = f"{len(open_seen)} attentions are not found by qkform, first {open_seen[0]['module']}"
    elif result.not_seen:
        result.reason = f"{len(result.not_seen)} layers are not reached or differ, first {result.not_seen[0]}"
        result.step = "reach"
    elif open_failures:
        result.status = SCANNED if result.matched == 0 else NOT_YET
        result.reason = f"{open_failures[0].module}: {open_failures[0].reason}"
    elif result.matched:
        result.status, result.step, result.reason = VERIFIED, "", ""
