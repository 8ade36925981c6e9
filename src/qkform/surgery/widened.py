"""Collapsed circuits in an attention of a Hugging Face model, which keeps its class, its kernels and its caches.

Its query projection becomes W_QK, wide enough for d_model per head; its keys and values become the inputs themselves,
once per head; its output projection becomes W_OV. The code of the model then computes with heads of width d_model, and
with the scale that it had. What was there before is written down in the module, for the way back.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from qkform.errors import QKFormError, SurgeryError
from qkform.sites import Site
from qkform.sites.shares import Side
from qkform.surgery.circuits import outputs, values
from qkform.surgery.collapsed import STOCK, balanced, balanced_qk, beside, projections, refuse_loss
from qkform.surgery.split import is_split

_SIDES: tuple[tuple[str, Side], ...] = (("q", "w_q"), ("k", "w_k"))
_HEAD_SIZES = ("attention_head_size", "head_dim")


class Repeated(nn.Module):  # type: ignore[misc]
    """Keys, or values, of collapsed heads: the input itself, once per head."""

    def __init__(self, heads: int) -> None:
        super().__init__()
        self.heads = heads

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.repeat(*[1] * (x.ndim - 1), self.heads)


class FusedCollapsed(nn.Module):  # type: ignore[misc]
    """Queries, keys and values of collapsed heads side by side, where the stock module had one projection for them."""

    def __init__(self, query: nn.Linear, heads: int) -> None:
        super().__init__()
        self.query, self.keys = query, Repeated(heads)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        repeated = self.keys(x)
        return torch.cat([self.query(x), repeated, repeated], -1)


def plan(root: nn.Module, site: Site) -> dict[str, str]:
    """Where the projections of an attention are: {"q", "k", "v", "o"}, or {"fused", "o"}; SurgeryError if unsound."""
    try:
        _refuse_score(site)
        places = _places(site)
        modules = [root.get_submodule(path) for path in places.values()]
        plain = all(type(m) is nn.Linear or type(m).__name__ == "Conv1D" for m in modules)
        if not plain or modules[-1].bias is None:
            raise SurgeryError("its projections are no plain linear maps with a bias at the end")
    except SurgeryError as error:
        raise SurgeryError(f"{site.path}: cannot be collapsed: {error}") from None
    return places


def _refuse_score(site: Site) -> None:
    """SurgeryError where the score is no form of the input, or where the module has no room for wider heads."""
    layer, module = site.layer, site.module
    try:
        turns = layer.positions is not None and layer.positions.rotary(layer.d_head, 1) is not None
    except QKFormError as error:
        raise SurgeryError(
            f"whether rotary embedding turns its queries and keys is not known: {error}"
        ) from error
    if turns:
        raise SurgeryError(
            "rotary embedding turns queries and keys between W_Q and W_K: one matrix cannot stand for it"
        )
    if layer.qk_norms is not None or "qk_norm" in layer.flags:
        raise SurgeryError("it norms queries and keys, which is no linear map")
    if layer.n_heads != layer.n_kv_heads:
        raise SurgeryError("its keys are grouped")
    if any(is_split(m) for m in module.modules()):
        raise SurgeryError("its fused weight is split; unsplit_ the model first")
    if getattr(module, "scaling", None) is None or _head_size(module) is None:
        raise SurgeryError("its code is not known to take heads of another width")


def _places(site: Site) -> dict[str, str]:
    paths = {side: site.shares[s].name.rpartition(".")[0] for side, s in _SIDES}
    out, value = outputs(site, _taken(site)), values(site)
    fused = paths["q"] == paths["k"]
    if len(out) != 1 or (not fused and len(value) != 1):
        raise SurgeryError("its value or output projection is not recognised")
    if not fused:
        return {**paths, "v": value[0], "o": out[0]}
    if not hasattr(site.module, "split_size") or site.layer.q.order != "q|k|v":
        raise SurgeryError("its projection holds Q, K and V in an order that its code takes apart by itself")
    return {"fused": paths["q"], "o": out[0]}


def _taken(site: Site) -> dict[int, Any]:
    """The parameters of queries, keys and values, for `outputs` to leave out."""
    paths = [share.name.rpartition(".")[0] for share in site.parameters()] + values(site)
    modules = [site.live.tree.modules[path] for path in paths if path != site.path]
    return {id(p): "qk" for m in modules for p in m.parameters()}


def widen(root: nn.Module, site: Site, places: dict[str, str]) -> None:
    """Put collapsed projections into a Hugging Face attention."""
    module, h, d = site.module, site.layer.n_heads, site.layer.d_model
    old = {side: root.get_submodule(path) for side, path in places.items()}
    weights, biases = _stock_factors(old, h)
    sizes = {
        name: getattr(module, name)
        for name in (*_HEAD_SIZES, "all_head_size", "split_size")
        if hasattr(module, name)
    }
    like = weights["q"]
    w_q, w_k, w_v, w_o = (weights[side].double() for side in "qkvo")
    qk = w_q @ w_k.transpose(1, 2)  # (H, d, d)
    added = torch.zeros(h, d) if biases["q"] is None else (w_k @ biases["q"].double()[:, :, None])[:, :, 0]
    last = biases["o"].double()
    if biases["v"] is not None:
        last = last + torch.einsum("hv,hvd->d", biases["v"].double(), w_o)
    query = _linear(qk.transpose(1, 2).reshape(h * d, d), added.reshape(-1), like)
    output = _linear((w_v @ w_o).permute(2, 0, 1).reshape(d, h * d), last, like)
    if "fused" in places:
        put(root, places["fused"], FusedCollapsed(query, h))
    else:
        put(root, places["q"], query)
        for side in ("k", "v"):
            put(root, places[side], Repeated(h))
    put(root, places["o"], output)
    for name in sizes:
        setattr(module, name, d if name in _HEAD_SIZES else h * d)
    kinds = {side: (type(m), m.bias is not None) for side, m in old.items()}
    setattr(
        module,
        STOCK,
        {
            "places": {side: beside(site.path, place) for side, place in places.items()},
            "kinds": kinds,
            "sizes": sizes,
            "heads": h,
            "d_head": site.layer.d_head,
        },
    )


def _stock_factors(old: dict[str, nn.Module], heads: int) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Weights as (heads, in, width), that of "o" as (heads, width, out); biases as (heads, width), of "o" (out,)."""
    flat: dict[str, Any] = {}
    for side, module in old.items():
        weight = module.weight if isinstance(module, nn.Linear) else module.weight.T  # (out, in)
        pieces = zip("qkv", weight.chunk(3), strict=True) if side == "fused" else [(side, weight)]
        flat |= {name: piece.detach() for name, piece in pieces}
        bias = module.bias
        made = [None] * 3 if bias is None else bias.chunk(3)
        named = zip("qkv", made, strict=True) if side == "fused" else [(side, bias)]
        flat |= {f"b_{name}": None if b is None else b.detach() for name, b in named}
    weights = {s: flat[s].view(heads, -1, flat[s].shape[1]).transpose(1, 2) for s in "qkv"}
    weights["o"] = flat["o"].T.view(heads, -1, flat["o"].shape[0])
    biases = {s: None if flat[f"b_{s}"] is None else flat[f"b_{s}"].view(heads, -1) for s in "qkv"}
    return weights, {**biases, "o": flat["b_o"]}


def narrow(root: nn.Module, path: str, module: Any, truncate: bool) -> dict[str, nn.Module]:
    """The stock projections, by path, whose products are the collapsed ones of an attention."""
    stock = getattr(module, STOCK)
    places, h, width = projections(module, path), stock["heads"], stock["d_head"]
    query = root.get_submodule(places.get("q") or places["fused"])
    query = query.query if isinstance(query, FusedCollapsed) else query
    output = root.get_submodule(places["o"])
    d = query.weight.shape[1]
    qk = query.weight.detach().view(h, d, d).transpose(1, 2)
    ov = output.weight.detach().view(d, h, d).permute(1, 2, 0)
    with torch.no_grad():
        added = query.bias.detach().view(h, d)
        w_q, w_k, b_q, lost_qk = balanced_qk(qk, added, width)
        # what a value bias adds is in the output bias, so W_OV needs no row for it
        w_v, w_o, lost_ov = balanced(ov, width)
        refuse_loss(path, max(lost_qk, lost_ov), width, qk, truncate)
        rows = {
            "q": (w_q.transpose(1, 2).reshape(h * width, d), b_q.reshape(-1)),
            "k": (w_k.transpose(1, 2).reshape(h * width, d), torch.zeros(h * width)),
            "v": (w_v.transpose(1, 2).reshape(h * width, d), torch.zeros(h * width)),
            "o": (w_o.transpose(1, 2).reshape(h * width, d).T, output.bias.detach()),
        }
        fused = (torch.cat([rows[s][0] for s in "qkv"]), torch.cat([rows[s][1].to(qk) for s in "qkv"]))
        parts = {}
        for side, place in places.items():
            kind, biased = stock["kinds"][side]
            weight, bias = fused if side == "fused" else rows[side]
            if not biased and side == "q" and bool(added.any()):
                raise SurgeryError(
                    f"{path}: its stock query projection has no bias, and the collapsed one is not zero"
                )
            parts[place] = _of_kind(kind, weight, bias if biased else None, qk)
    return parts


def _linear(weight: torch.Tensor, bias: torch.Tensor | None, like: torch.Tensor) -> nn.Module:
    return _of_kind(nn.Linear, weight, bias, like)


def _of_kind(kind: Any, weight: torch.Tensor, bias: torch.Tensor | None, like: torch.Tensor) -> nn.Module:
    """An nn.Linear or a Conv1D with a weight (out, in), of the type and on the device of `like`."""
    outputs_, inputs = weight.shape
    made = nn.Linear(inputs, outputs_, bias=bias is not None) if kind is nn.Linear else kind(outputs_, inputs)
    made = made.to(like)
    with torch.no_grad():
        made.weight.copy_(weight if kind is nn.Linear else weight.T)
        if bias is not None:
            made.bias.copy_(bias)
    return made


def _head_size(module: Any) -> str | None:
    return next((name for name in _HEAD_SIZES if isinstance(getattr(module, name, None), int)), None)


def put(root: nn.Module, path: str, module: nn.Module) -> nn.Module:
    """The model with a module in this place: the module itself where that is the whole model."""
    if not path:
        return module
    above, _, name = path.rpartition(".")
    setattr(root.get_submodule(above), name, module)
    return root
