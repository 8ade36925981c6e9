"""A changed attention in a Hugging Face model: what is hung on its modules, and which of them can take it.

The interface through which transformers calls an attention hands over queries, keys and values but not what they were
made of. So the projection of the queries, which sees that, computes the self score; the attention function takes it.
What is kept from one to the other is (batch, heads, tokens), and it is dropped when the module returns or raises.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from types import CodeType
from typing import Any

from torch import Tensor, nn

from qkform.errors import SurgeryError
from qkform.sites import Site
from qkform.surgery import interface
from qkform.surgery.interface import NAME, SWITCH, Call, Switch
from qkform.surgery.owners import owners
from qkform.surgery.self_score import SelfScore, this_thread

_WORDS = {"exclusive": "of exclusive attention", "no-diagonal": "of no-diagonal attention"}
_READER = "qkform_self_score"  # on a projection: the self score that reads its input; not a child of it


def check(site: Site) -> None:
    """SurgeryError where the attention cannot be changed: for asking all of them before one is changed."""
    problem = _problem(site)
    if problem is not None:
        raise SurgeryError(f"{site.path}: {problem}")


def attach(site: Site, score: SelfScore) -> None:
    """Let the module compute decoupled attention with this self score, which becomes its `self_score`."""
    check(site)
    module = site.module
    module.self_score = score
    projection = site.shares["w_q"].at.owner
    vars(projection)[_READER] = score  # not by setattr, which would make it a child with a second name
    projection.register_forward_pre_hook(_read, with_kwargs=True)
    switch_on(site, "decoupled")


def detach(site: Site) -> None:
    """Undo `attach`."""
    projection = site.shares["w_q"].at.owner
    vars(projection).pop(_READER, None)
    _unhook(projection._forward_pre_hooks, _read, projection._forward_pre_hooks_with_kwargs)
    switch_off(site)
    del site.module.self_score


def switch_on(site: Site, kind: str) -> None:
    """The module's attention is from now on of this kind, see `interface.attention`."""
    module = site.module
    interface.register()
    # Modules share a config: all but its first remember NAME. The last one that is switched off gives it back.
    setattr(module, SWITCH, Switch(kind, module.config._attn_implementation))
    # Not by the property, which would set that of the config's parts too.
    module.config._attn_implementation_internal = NAME
    module.register_forward_pre_hook(_begin, with_kwargs=True)
    module.register_forward_hook(_end, always_call=True)


def switch_off(site: Site) -> None:
    """Undo `switch_on`."""
    module = site.module
    switch = getattr(module, SWITCH)
    delattr(module, SWITCH)
    _unhook(module._forward_pre_hooks, _begin, module._forward_pre_hooks_with_kwargs)
    _unhook(module._forward_hooks, _end, module._forward_hooks_always_called)
    if module.config._attn_implementation == NAME and switch.before != NAME:
        heir = _heir(site)
        if heir is None:
            module.config._attn_implementation_internal = switch.before
        else:
            heir.before = switch.before


def _heir(site: Site) -> Any:
    """The switch of another module that needs this one's config to stay as it is; None where there is none."""
    config = site.module.config
    for root in (site.live.root, *(owner.model for owner in owners(site.live.root))):
        for module in root.modules():
            if SWITCH in vars(module) and module.config is config:
                return getattr(module, SWITCH)
    return None


def switched(module: Any) -> str | None:
    """The kind of attention that a module was switched to; None for a module as its model made it."""
    switch = getattr(module, SWITCH, None)
    return None if switch is None else str(switch.kind)


def _read(projection: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Before the query projection runs: the self score of what it is about to see."""
    score = getattr(projection, _READER)
    x = next(given for given in (*args, *kwargs.values()) if isinstance(given, Tensor))
    if x.ndim != 3:
        raise SurgeryError(
            f"the queries of a decoupled attention come from an input of {tuple(x.shape)}; "
            "expected (batch, tokens, d_model)"
        )
    if x.device != score.v.device:
        raise SurgeryError(
            f"the input of a decoupled attention is on {x.device} and its self score on {score.v.device}; a replica "
            "(nn.DataParallel) does not get one of its own: use DistributedDataParallel, or move the whole model"
        )
    score.hold(score(x))


def _begin(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Before the attention runs: where its tokens will stand among the keys, by its cache."""
    getattr(module, SWITCH).calls[this_thread()] = Call(_start(module, args, kwargs))
    score = getattr(module, "self_score", None)
    if score is not None:
        score.open()


def _end(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
    """After the attention, also when it raised (output None): nothing is kept."""
    switch = getattr(module, SWITCH)
    call = switch.calls.pop(this_thread(), None)
    score = getattr(module, "self_score", None)
    if score is not None:
        score.close()
    if output is not None and call is not None and not call.came:
        undo = "recouple_ the model" if switch.kind == "decoupled" else 'set_attention_(model, "standard")'
        raise SurgeryError(
            f"a {type(module).__name__} is {_WORDS.get(switch.kind, switch.kind)} and computed standard attention: its "
            f"config names the implementation {module.config._attn_implementation!r}; expected {NAME!r}: "
            f"{undo} before changing it"
        )


def _start(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | int | None:
    """The place among the keys of the first token; None where the tokens are the last keys.

    A cache of fixed size hands over all its places, filled or not: there it is where the mask says it is. A tensor
    then, never read, so that compiled decoding does not wait for it.
    """
    from transformers import Cache

    cache = next((given for given in (*kwargs.values(), *args) if isinstance(given, Cache)), None)
    layer = getattr(module, "layer_idx", None)
    if cache is None or layer is None:
        return None
    kept = getattr(cache, "self_attention_cache", cache).layers
    if layer >= len(kept) or not kept[layer].is_compileable:
        return None  # a cache that grows: what it hands over ends with the tokens
    x = kwargs.get("hidden_states")
    x = next(given for given in (*args, *kwargs.values()) if isinstance(given, Tensor)) if x is None else x
    _, first = cache.get_mask_sizes(x.shape[1], layer)
    seen = getattr(cache, "get_query_offset", cache.get_seq_length)(layer)
    place: Tensor | int = seen - first  # a new tensor: the cache's own counts on during the call
    return place


def _unhook(hooks: Any, function: Any, *marks: Any) -> None:
    """Take a hook out: by what it is, since handles do not outlive copies and pickles."""
    for key in [key for key, hook in hooks.items() if hook is function]:
        del hooks[key]
        for mark in marks:
            mark.pop(key, None)


def _problem(site: Site) -> str | None:
    """Why the attention cannot be changed, with the remedy; None where it can."""
    module, kind = site.module, type(site.module).__name__
    if switched(module) is not None:
        return f"its attention was changed to {switched(module)!r} before; undo that first"
    if site.layer.part is not None:
        return (
            f"a {kind} adds up several query-key terms, of which no single one is the score of a token with itself; "
            "choose a model with one term, or decouple a part of this one"
        )
    if not hasattr(getattr(module, "config", None), "_attn_implementation") or not uses_interface(module):
        return (
            f"a {kind} does not call its attention through transformers' AttentionInterface, so that its scores "
            "cannot be changed; change the part of the model that does, or use nn.MultiheadAttention"
        )
    if getattr(module, "attn_logit_softcapping", None) is not None:
        return f"a {kind} caps its scores (attn_logit_softcapping); set it to None in the config first"
    names = set(_names(module))
    for name in interface.SINKS:
        if name in names:
            return (
                f"a {kind} has attention sinks ({name!r}), a key of no token; no attention of qkform has them"
            )
    if "cu_seqlens" in names or "cu_seq_lens" in names:
        return (
            f"a {kind} runs over packed sequences, cut inside the module; decouple another part of the model"
        )
    at = site.shares["w_q"].at
    if at.index is not None or at.owner is module or not isinstance(at.owner, nn.Module):
        return f"the queries of a {kind} come from no projection module of their own; change another part of the model"
    if not any(at.owner is part for part in module.modules()):
        return f"its queries are taken for those of {at.name!r}, outside of it; give the whole model, not a part of it"
    return None


def uses_interface(module: Any) -> bool:
    """Whether the code of a module asks transformers for its attention function."""
    return "ALL_ATTENTION_FUNCTIONS" in set(_names(module))


def _names(module: Any) -> Iterator[str]:
    """Every name, and every keyword of a call, in the code of a module's class."""
    for base in type(module).__mro__:
        if base is nn.Module:
            return
        for found in vars(base).values():
            code = getattr(inspect.unwrap(found) if callable(found) else found, "__code__", None)
            if isinstance(code, CodeType):
                yield from code.co_names
                yield from code.co_varnames
                for constant in code.co_consts:  # the keywords of calls
                    if isinstance(constant, tuple):
                        yield from (name for name in constant if isinstance(name, str))
