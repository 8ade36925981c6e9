"""Circuits of a small model as free matrices, and back as factors: the function stays, the training does not.

`collapse_` makes of each head's W_Q and W_K one free matrix W_QK, and of W_V and W_O one W_OV; `factorize_` takes such
matrices apart again, by singular value decomposition into balanced factors. nn.MultiheadAttention becomes a
`CircuitAttention`. A Hugging Face attention keeps its class and its kernels: its query projection becomes W_QK, wide
enough for d_model per head, its keys and values the inputs themselves, and its output projection W_OV.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import nn

from qkform.errors import QKFormError, SurgeryError
from qkform.sites import Site, find
from qkform.surgery.collapsed import STOCK, CircuitAttention, converted, refuse_loss
from qkform.surgery.mha import leave_nested, nest_again
from qkform.surgery.record import forget, note, prepare
from qkform.surgery.root import changeable
from qkform.surgery.split import is_split
from qkform.surgery.switched import switched
from qkform.surgery.widened import narrow, plan, put, widen

CHANGE = "collapse"  # its name in the record
MAX_PARAMETERS = 20_000_000  # of free matrices: more than any model that this is for has


def collapse_(model: nn.Module, *, ov: bool = True, max_parameters: int = MAX_PARAMETERS) -> nn.Module:
    """Make every head's W_QK, and W_OV, one free matrix, in place; returns the model (a lone attention: a new module).

    The forward pass stays, to rounding. Attention weights must sum to 1 for that: the constant that a value bias adds
    is moved to the output bias, so dropout of attention weights, and rows without a key, see another model.

    Goes with nn.MultiheadAttention, with `CircuitAttention` whose circuits are factorized, and with self-attentions of
    Hugging Face models that have one projection of each kind (or GPT-2's), a head size of their own and no rotary
    embedding: BERT and its kin, ViT, GPT-2. There both circuits are collapsed. Cross-attention of such models stays.
    The new matrices are float64 products, rounded once. The new parameters learn, and are in no optimizer yet.

    ov              W_OV too; False keeps W_V and W_O (not for Hugging Face models)
    max_parameters  refuse to make larger matrices in all: n_heads * d_model^2 each

    Raises SurgeryError with the module and the reason: rotary embedding turns the factors between W_Q and W_K, a norm
    on queries is no linear map, grouped keys, extra key tokens, too many parameters. Nothing is changed then.
    """
    root = changeable(model, "collapse_")
    prepare(root)
    new, paths = _collapsed(root, ov, max_parameters)
    note(new, CHANGE, ov=ov, sites=paths)
    return model if new is root else new


def restore(model: nn.Module, change: Mapping[str, Any]) -> None:
    """Build the structure of a recorded change into a stock model, of any size; its values come from elsewhere.

    SurgeryError where the model has no attention at a path of the record. Without paths, as before there were any in
    a record, it is of all attentions.
    """
    _collapsed(model, bool(change.get("ov", True)), None, change.get("sites"))


def _collapsed(
    model: nn.Module, ov: bool, max_parameters: int | None, only: Collection[str] | None = None
) -> tuple[nn.Module, list[str]]:
    """The model, and the paths of what was collapsed: all that can be, or the attentions `only` at these paths."""
    root = model
    _refuse_changed(root)
    own = [
        (path, m)
        for path, m in root.named_modules(remove_duplicate=False)
        if _is_own(m) and not (getattr(m, "qk", "") == "collapsed" and (m.ov == "collapsed" or not ov))
    ]
    sites = _sites(root, {path for path, _ in own})
    if only is not None:
        missing = sorted(set(only) - {path for path, _ in own} - {site.path for site in sites})
        if missing:
            raise SurgeryError(
                f"the record of surgery says that {missing[0]} was collapsed; the model has none there"
            )
        own = [(path, module) for path, module in own if path in only]
        sites = [site for site in sites if site.path in only]
    if not own and not sites:
        raise SurgeryError(f"a {type(root).__name__} has no attention that can be collapsed")
    if sites and not ov:
        raise SurgeryError(
            f"{sites[0].path}: values stay as wide as queries here, so ov=False is not possible"
        )
    plans = [(site, plan(root, site)) for site in sites]
    size = sum(_size(m, ov) for m in {id(m): m for _, m in own}.values())
    size += sum(2 * s.layer.n_heads * s.layer.d_model**2 for s in sites)
    if max_parameters is not None and size > max_parameters:
        raise SurgeryError(
            f"collapsing would make {size:,} parameters; this is for small models, up to "
            f"max_parameters={max_parameters:,}"
        )
    made: dict[int, nn.Module] = {}
    for path, module in own:
        if id(module) not in made:
            whole = module if isinstance(module, CircuitAttention) else from_torch(module)
            made[id(module)] = converted(whole, qk="collapsed", ov="collapsed" if ov else whole.ov)[0]
            setattr(made[id(module)], STOCK, getattr(whole, STOCK, None))
        root = put(root, path, made[id(module)])
    for encoder in (m for m in root.modules() if isinstance(m, nn.TransformerEncoder)):
        leave_nested(encoder)  # it looks into in_proj_weight otherwise
    for site, places in plans:
        widen(root, site, places)
    return root, [path for path, _ in own] + [site.path for site in sites]


def factorize_(model: nn.Module, rank: int | None = None, *, truncate: bool = False) -> nn.Module:
    """Take free matrices apart into balanced factors, in place: W_V^T W_V = W_O W_O^T, and W_K^T W_K = W_Q^T W_Q.

    With a bias on queries W_Q stands for [W_Q; b_Q], the bias as one more row: it balances W_K together with its bias.
    That is the quantity that gradient flow conserves, and it has exact factors whenever W_QK and b_K came from some.

    What `collapse_` has changed gets its stock modules back: same names and shapes, other numbers. A
    `CircuitAttention` that was made as one stays one, with factors `rank` wide (d_head if None). The forward pass
    stays, to rounding, where no matrix has a higher rank than its factors can hold.

    rank      width of the factors of a CircuitAttention; stock modules have d_head
    truncate  allow a matrix of higher rank: its largest singular values are kept, which are the nearest such product
              (of W_QK with b_K as one more row)

    Raises SurgeryError where nothing is collapsed, and where a matrix has a higher rank and truncate is not set: a
    matrix that was trained freely has full rank. Nothing is changed then.
    """
    root = changeable(model, "factorize_")
    before = root
    own = [
        (path, m)
        for path, m in root.named_modules(remove_duplicate=False)
        if isinstance(m, CircuitAttention) and "collapsed" in (m.qk, m.ov)
    ]
    wide = [(path, m) for path, m in root.named_modules() if not _is_own(m) and getattr(m, STOCK, None)]
    if not own and not wide:
        raise SurgeryError(f"a {type(root).__name__} has no collapsed attention; collapse_ it first")
    made: dict[int, nn.Module] = {}
    narrowed: list[tuple[str, Any, dict[str, nn.Module]]] = []
    for path, module in own:
        if id(module) not in made:
            stock = getattr(module, STOCK, None)
            if stock and rank not in (None, module.d_head):
                raise SurgeryError(
                    f"{path}: rank {rank} does not fit nn.MultiheadAttention, whose heads are {module.d_head} wide"
                )
            factors, lost = converted(module, qk="factorized", ov="factorized", rank=rank)
            refuse_loss(
                path, lost, factors.d_head, module.W_QK if module.qk == "collapsed" else module.W_OV, truncate
            )
            made[id(module)] = to_torch(factors, stock) if stock else factors
    for path, module in wide:
        width = getattr(module, STOCK)["d_head"]
        if rank not in (None, width):
            raise SurgeryError(
                f"{path}: rank {rank} does not fit a stock attention; its heads are {width} wide"
            )
        narrowed.append((path, module, narrow(root, path, module, truncate)))
    for path, module in own:
        root = put(root, path, made[id(module)])
    for _, module, parts in narrowed:
        stock = getattr(module, STOCK)
        for path, part in parts.items():
            put(root, path, part)
        for name, value in stock["sizes"].items():
            setattr(module, name, value)
        delattr(module, STOCK)
    for encoder in (m for m in root.modules() if isinstance(m, nn.TransformerEncoder)):
        nest_again(encoder)
    forget(root, CHANGE)
    return model if root is before else root


# ---- nn.MultiheadAttention -----------------------------------------------------------------------------------


def from_torch(attention: Any) -> CircuitAttention:
    """An nn.MultiheadAttention as a `CircuitAttention` with the same factors."""
    if attention.bias_k is not None or attention.add_zero_attn:
        raise SurgeryError(
            "an nn.MultiheadAttention with add_bias_kv or add_zero_attn has keys that are no inputs"
        )
    d, h = attention.embed_dim, attention.num_heads
    apart = [attention.q_proj_weight, attention.k_proj_weight, attention.v_proj_weight]
    weights = list(attention.in_proj_weight.chunk(3)) if attention.in_proj_weight is not None else apart
    bias = attention.in_proj_bias
    new: CircuitAttention = CircuitAttention(
        d, h, qk="factorized", ov="factorized", d_key=attention.kdim, d_value=attention.vdim,
        bias=bias is not None, dropout=attention.dropout, batch_first=attention.batch_first,
    ).to(weights[0])  # fmt: skip
    new.train(attention.training)
    setattr(new, STOCK, {"bias": bias is not None})
    with torch.no_grad():
        for own, weight in zip((new.W_Q, new.W_K, new.W_V), weights, strict=True):
            own.copy_(weight.view(h, d // h, -1).transpose(1, 2))
        new.W_O.copy_(attention.out_proj.weight.T.view(h, d // h, d))
        if bias is not None:
            b_q, _, b_v = bias.view(3, h, d // h)
            new.b_Q.copy_(b_q)
            moved = torch.einsum("hv,hvd->d", b_v.double(), new.W_O.double())
            new.b_O.copy_(attention.out_proj.bias.double() + moved)
    return new


def to_torch(attention: CircuitAttention, stock: dict[str, Any]) -> nn.Module:
    """A factorized `CircuitAttention` as the nn.MultiheadAttention it was: biases of keys and values are zero."""
    d, h = attention.d_model, attention.n_heads
    new = nn.MultiheadAttention(
        d, h, dropout=attention.dropout, bias=stock["bias"], kdim=attention.d_key, vdim=attention.d_value,
        batch_first=attention.batch_first,
    ).to(attention.W_Q)  # fmt: skip
    new.train(attention.training)
    factors = [w.transpose(1, 2).reshape(d, -1) for w in (attention.W_Q, attention.W_K, attention.W_V)]
    with torch.no_grad():
        if new.in_proj_weight is not None:
            new.in_proj_weight.copy_(torch.cat(factors))
        else:
            for own, factor in zip(
                (new.q_proj_weight, new.k_proj_weight, new.v_proj_weight), factors, strict=True
            ):
                own.copy_(factor)
        new.out_proj.weight.copy_(attention.W_O.reshape(d, d).T)
        if stock["bias"]:
            new.in_proj_bias.zero_()
            new.in_proj_bias[:d].copy_(attention.b_Q.reshape(-1))
            new.out_proj.bias.copy_(attention.b_O)
    return new


# ---- which ----------------------------------------------------------------------------------------------------


def _sites(root: nn.Module, own: set[str]) -> list[Site]:
    """Self-attentions of the model that are none of our own kinds."""
    if isinstance(root, CircuitAttention):
        return []
    try:
        found = list(find(root))
    except QKFormError:
        return []
    return [s for s in found if s.layer.attention == "self" and s.path not in own and not _is_own(s.module)]


def _refuse_changed(root: nn.Module) -> None:
    """SurgeryError for an attention with another score, or with a forward or weights of another making."""
    for path, module in root.named_modules():
        kind = switched(module)
        if kind is not None:
            undo = "recouple_" if kind == "decoupled" else 'set_attention_ to "standard"'
            raise SurgeryError(
                f"{path or 'the attention'} is {kind}: its score, or what it adds up, is no product of two circuits; "
                f"undo that first ({undo})"
            )
        if not isinstance(module, nn.MultiheadAttention):
            continue
        if is_split(module):
            raise SurgeryError(
                f"{path or 'the attention'}: its fused weight is split; unsplit_ the model first"
            )
        if type(module) is not nn.MultiheadAttention or "forward" in vars(module):
            raise SurgeryError(
                f"{path or 'the attention'} is a {type(module).__name__} with a forward of its own, which a collapsed "
                "one would replace; put an nn.MultiheadAttention there"
            )


def _is_own(module: Any) -> bool:
    return isinstance(module, (nn.MultiheadAttention, CircuitAttention))


def _size(module: Any, ov: bool) -> int:
    d_key, d_value, d, h = (
        (module.kdim, module.vdim, module.embed_dim, module.num_heads)
        if isinstance(module, nn.MultiheadAttention)
        else (module.d_key, module.d_value, module.d_model, module.n_heads)
    )
    return int(h * d * (d_key + (d_value if ov else 0)))
