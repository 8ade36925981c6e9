"""What the self-attentions of a live model see in one forward pass, and the gradients that come back to them.

The model is left as it was, whatever happens: parameters, their gradients, random numbers, modes, config and hooks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from qkform import sites
from qkform.dynamics.calls import Call
from qkform.errors import ConfigError, DynamicsError, LayoutError
from qkform.sites import LiveModel, Site

LossFunction = Callable[[Any], Tensor]


@dataclass(eq=False)
class Watched:
    """A self-attention and its calls; `outputs` are the tensors whose gradients the calls wait for.

    `site` is None for an attention whose form is one parameter, a collapsed circuit.
    """

    path: str
    module: Any
    site: Site | None
    calls: list[Call] = field(default_factory=list)
    outputs: list[Tensor] = field(default_factory=list)
    grads: list[Callable[[Tensor], Tensor]] = field(default_factory=list)  # dL/doutput -> (B, H, N, D_v)
    x: Tensor | None = None  # what the projections of the call in progress read
    over: bool = False  # the forward pass is: what is computed once more, for checkpoints, is no call

    def add(self, call: Call, output: Tensor, grad: Callable[[Tensor], Tensor]) -> Tensor:
        """Note a call without its gradient; the output to go on with, which the loss will depend on."""
        if not output.requires_grad:  # nothing before it learns
            output = output.detach().requires_grad_()
        self.calls.append(call)
        self.outputs.append(output)
        self.grads.append(grad)
        return output


def capture(
    model: Any,
    batch: Mapping[str, Any],
    loss_fn: LossFunction | None = None,
    modules: Sequence[str] | None = None,
) -> list[Watched]:
    """Run the model once, forward and back, in eval mode; the self-attentions that ran, in order, with their calls.

    DynamicsError for a batch that gives no loss, a model without self-attention, and one whose scores are not those
    of a query-key form on tokens.
    """
    with _watching(model, batch, modules) as (root, watched), torch.enable_grad():
        output = root(**batch)
        for each in watched:
            each.over = True
        _finish(watched, _loss(output, loss_fn))
    return _ran(watched)


def observe(model: Any, batch: Mapping[str, Any], modules: Sequence[str] | None = None) -> list[Watched]:
    """The same without a loss, and without the way back: calls have their weights and no gradient."""
    with _watching(model, batch, modules) as (root, watched), torch.no_grad():
        root(**batch)
    for each in watched:
        each.outputs.clear()
        each.grads.clear()
    return _ran(watched)


@contextmanager
def _watching(model: Any, batch: Any, modules: Sequence[str] | None) -> Iterator[tuple[Any, list[Watched]]]:
    """The model, wrappers left out, while its self-attentions are watched; afterwards it is as it was."""
    if not isinstance(batch, Mapping):
        raise DynamicsError(
            f"batch is a {type(batch).__name__}; it is a mapping: the keyword arguments of one call of the model"
        )
    live = sites.open_live(model)
    root, watched = live.root, _chosen(live, modules)
    with ExitStack() as stack:
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.random.fork_rng(_devices(root)))
        stack.enter_context(_eval(root))
        for kind, those in _by_kind(watched).items():
            stack.enter_context(kind(root, those))
        yield root, watched


def _ran(watched: Sequence[Watched]) -> list[Watched]:
    found = [each for each in watched if each.calls]
    if not found:
        raise DynamicsError(
            f"none of the self-attentions ran in this call of the model: {watched[0].path}, ..."
        )
    return found


def _chosen(live: LiveModel, modules: Sequence[str] | None) -> list[Watched]:
    """The self-attentions of a model in order, or those at some paths."""
    found: dict[str, Site] = {}
    reason = "give a transformers model, or a module that holds nn.MultiheadAttention"
    try:
        seen = sites.find(live.root)
        found = {site.path: site for site in seen}
        reason = "; ".join(f"{each['module']}: {each['reason']}" for each in seen.skipped[:1]) or reason
    except (ConfigError, LayoutError) as error:  # a model of collapsed circuits has none either
        reason = str(error)
    at = {
        path: Watched(path, module, found.get(path))
        for path, module in live.tree.modules.items()
        if (path in found and found[path].layer.attention == "self") or _is_collapsed(module)
    }
    if not at:
        raise DynamicsError(f"{live.source} has no self-attention that is known here: {reason}")
    if modules is None:
        return list(at.values())
    missing = [path for path in modules if path not in at]
    if missing or not modules:
        raise DynamicsError(
            f"no self-attention at {missing[0] if missing else 'no path'!r}; there are {', '.join(at)}"
        )
    return [at[path] for path in modules]


def is_circuit(module: Any) -> bool:
    """Whether a module is an attention with its circuits as parameters, which surgery makes."""
    return hasattr(module, "circuit_qk")


def _is_collapsed(module: Any) -> bool:
    return is_circuit(module) and module.qk == "collapsed" and module.d_key == module.d_model


def _by_kind(watched: Sequence[Watched]) -> dict[Any, list[Watched]]:
    """Which way of watching fits which attentions."""
    from qkform.dynamics.capture_interface import watching as interface
    from qkform.dynamics.capture_modules import watching as modules_themselves

    kinds: dict[Any, list[Watched]] = {}
    for each in watched:
        if each.site is not None and each.site.layer.part is not None:
            raise DynamicsError(
                f"{each.path}: its scores are the sum of several query-key terms; Gamma is that of one form"
            )
        own = isinstance(each.module, nn.MultiheadAttention) or is_circuit(each.module)
        kinds.setdefault(modules_themselves if own else interface, []).append(each)
    return kinds


def _loss(output: Any, loss_fn: LossFunction | None) -> Tensor:
    if loss_fn is not None:
        loss = loss_fn(output)
    else:
        loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
        if loss is None:
            raise DynamicsError(
                "the model returned no loss: put the labels into the batch, or give loss_fn=, a function of the "
                "model's output"
            )
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        found = tuple(loss.shape) if isinstance(loss, Tensor) else type(loss).__name__
        raise DynamicsError(f"the loss is {found}; expected one number, as a tensor")
    if not loss.requires_grad:
        raise DynamicsError(
            "the loss does not depend on any attention: is it detached, or computed under no_grad?"
        )
    return loss.reshape(())


def _finish(watched: Sequence[Watched], loss: Tensor) -> None:
    """Give every call its gradient, 0 where the loss does not depend on it, and forget the graph."""
    outputs = [output for each in watched for output in each.outputs]
    found = iter(torch.autograd.grad(loss, outputs, allow_unused=True) if outputs else ())
    for each in watched:
        for i, (call, output, back) in enumerate(zip(each.calls, each.outputs, each.grads, strict=True)):
            grad = next(found)
            grad = torch.zeros_like(output) if grad is None else grad
            each.calls[i] = replace(call, grad=back(grad.detach()))
        each.outputs.clear()
        each.grads.clear()


@contextmanager
def _eval(root: Any) -> Iterator[None]:
    """Eval mode, and afterwards the mode that each module had."""
    training = [module for module in root.modules() if module.training]
    root.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True


def _devices(root: Any) -> list[int]:
    """CUDA devices of the model, whose random numbers are put back too."""
    return sorted({p.device.index for p in root.parameters() if p.device.type == "cuda"})
