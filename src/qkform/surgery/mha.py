"""`nn.MultiheadAttention` with a changed score: the module keeps its weights, names and options, and computes anew.

The module is given another class, `ChangedMultiheadAttention`, and later its old one back: nothing is patched on the
instance, so copies, pickles and state dicts are those of any module. The class keeps the fused path of an
nn.TransformerEncoderLayer away; an nn.TransformerEncoder around it is told to leave its nested tensors.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, get_args

from torch import nn

from qkform.errors import SurgeryError
from qkform.sites import Site
from qkform.surgery.collapsed import CircuitAttention
from qkform.surgery.multihead import ChangedMultiheadAttention, Kind

# On an nn.TransformerEncoder: it made nested tensors of padded input before a layer of it was changed.
_NESTED = "nested_before_surgery"


def check(site: Site) -> None:
    """SurgeryError where `attach` could not change this module: for asking all of them before one is changed."""
    module = site.module
    kind = type(module)
    if isinstance(module, ChangedMultiheadAttention):
        raise SurgeryError(
            f"{site.path} is changed already, to {module.kind} attention; undo that first "
            f"({'`recouple_`' if module.kind == 'decoupled' else '`set_attention_` to standard'})"
        )
    if hasattr(module, "parametrizations"):
        raise SurgeryError(
            f"{site.path} has parametrized weights; undo that (`unsplit_` for param_groups), and change its attention "
            "first, then parametrize"
        )
    if kind is not nn.MultiheadAttention or "forward" in vars(module):
        raise SurgeryError(
            f"{site.path} is a {kind.__name__} with a forward of its own, which a changed one would replace; "
            "put an nn.MultiheadAttention there"
        )
    if module.kdim != module.embed_dim:
        raise SurgeryError(
            f"{site.path} has keys of width {module.kdim} for queries of width {module.embed_dim}: cross-attention, "
            "where a token has no score with itself"
        )


def attach(site: Site, score: nn.Module) -> None:
    """Let the module compute decoupled attention: `score`, (B, N, d_model) -> (B, n_heads, N), is its `self_score`."""
    check(site)
    module = site.module
    shape = (module.num_heads, module.embed_dim)
    if tuple(score.v.shape) != shape:
        raise SurgeryError(
            f"the self score of {site.path} has v of shape {tuple(score.v.shape)}; expected {shape}"
        )
    switch_on(site, "decoupled")
    module.self_score = score


def detach(site: Site) -> None:
    """Undo `attach`: the module is an nn.MultiheadAttention again, and its self score is gone."""
    switch_off(site)
    del site.module.self_score


def switch_on(site: Site, kind: Kind) -> None:
    """The module's attention is from now on of this kind, and its name in messages is that of the site.

    The fast paths of the nn.TransformerEncoderLayer and nn.TransformerEncoder around it are off until `switch_off`.
    """
    if kind not in get_args(Kind):
        raise SurgeryError(f"{kind!r} is no kind of attention; known: {', '.join(get_args(Kind))}")
    check(site)
    module = site.module
    module.__class__ = ChangedMultiheadAttention
    module.kind = kind
    module.site_path = site.path
    for encoder in _encoders_around(site):
        leave_nested(encoder)


def switch_off(site: Site) -> None:
    """Undo `switch_on`."""
    module = site.module
    if type(module) is not ChangedMultiheadAttention:
        if hasattr(module, "parametrizations"):
            raise SurgeryError(
                f"{site.path} has parametrized weights; undo that first (`unsplit_` for param_groups)"
            )
        raise SurgeryError(
            f"{site.path} is a {type(module).__name__}; expected an attention that was changed"
        )
    if "observe" in vars(module):
        del module.observe
    del module.kind
    del module.site_path
    module.__class__ = nn.MultiheadAttention
    for encoder in _encoders_around(site):
        nest_again(encoder)


def leave_nested(encoder: Any) -> None:
    """Tell an nn.TransformerEncoder to make no nested tensors: a layer of it is, or will be, changed."""
    if getattr(encoder, "use_nested_tensor", False):
        encoder.use_nested_tensor = False
        setattr(encoder, _NESTED, True)


def nest_again(encoder: Any) -> None:
    """Undo `leave_nested`, where no layer is changed any more."""
    changed = any(
        isinstance(m, ChangedMultiheadAttention | CircuitAttention) for m in encoder.layers.modules()
    )
    if not changed and getattr(encoder, _NESTED, False):
        delattr(encoder, _NESTED)
        encoder.use_nested_tensor = True


def switched(module: Any) -> str | None:
    """The kind of attention that a module was switched to; None for a module as torch made it."""
    return module.kind if isinstance(module, ChangedMultiheadAttention) else None


def _encoders_around(site: Site) -> Iterator[Any]:
    for encoder in site.live.root.modules():
        if isinstance(encoder, nn.TransformerEncoder) and any(m is site.module for m in encoder.modules()):
            yield encoder
