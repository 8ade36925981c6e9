"""What the self-attentions of a live model see in one forward pass, and the gradients that come back to them.

The model is left as it was, whatever happens: parameters, their gradients, random numbers, modes, config and hooks.
"""

from __future__ import annotations

import sys
import threading
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
        return output.clone()  # what the model changes in place is the copy


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
    if not (loss_fn is None or callable(loss_fn)):
        raise DynamicsError(f"loss_fn is a {type(loss_fn).__name__}; it is a function of the model's output")
    with _watching(model, batch, modules) as (root, watched, batch), torch.enable_grad():
        output = root(**batch)
        for each in watched:
            each.over = True
        _finish(watched, _loss(output, loss_fn))
    return _ran(watched)


def observe(model: Any, batch: Mapping[str, Any], modules: Sequence[str] | None = None) -> list[Watched]:
    """The same without a loss, and without the way back: calls have their weights and no gradient."""
    with _watching(model, batch, modules) as (root, watched, batch), torch.no_grad():
        root(**batch)
    for each in watched:
        each.outputs.clear()
        each.grads.clear()
    return _ran(watched)


@contextmanager
def _watching(
    model: Any, batch: Any, modules: Sequence[str] | None
) -> Iterator[tuple[Any, list[Watched], Mapping[str, Any]]]:
    """The model, wrappers left out, while its self-attentions are watched, and the batch; afterwards it is as it was.

    Modes, config and random numbers belong to everybody: threads come one after the other.
    """
    if not isinstance(batch, Mapping):
        raise DynamicsError(
            f"batch is a {type(batch).__name__}; it is a mapping: the keyword arguments of one call of the model"
        )
    for name, value in batch.items():
        if not isinstance(name, str):
            raise DynamicsError(
                f"batch has the key {name!r:.60}; it holds keyword arguments, whose names are strings"
            )
        if isinstance(value, Tensor) and value.numel() == 0:
            raise DynamicsError(f"batch[{name!r}] has shape {tuple(value.shape)}: there is no token in it")
    with ExitStack() as stack:
        if not stack.enter_context(_alone()):
            raise DynamicsError(
                "decompose or conflict was called while another call of theirs runs the model"
            )
        live = sites.open_live(model)
        root, watched = live.root, _chosen(live, modules)
        _check_weights(live)
        stack.enter_context(torch.inference_mode(False))
        if "torch._dynamo" in sys.modules:  # compiled parts run as they were written: hooks are for them too
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        batch = {name: _usable(value) for name, value in batch.items()}
        stack.enter_context(torch.random.fork_rng(_devices(root)))
        stack.enter_context(_eval(root))
        for kind, those in _by_kind(watched).items():
            stack.enter_context(kind(root, those))
        yield root, watched, batch


_LOCK = threading.RLock()
_INSIDE: list[bool] = []  # only the thread that holds the lock looks


@contextmanager
def _alone() -> Iterator[bool]:
    """Until other threads are through; False inside another call of the same thread, from a loss_fn or a hook."""
    with _LOCK:
        first = not _INSIDE
        _INSIDE.append(True)
        try:
            yield first
        finally:
            _INSIDE.pop()


def _check_weights(live: LiveModel) -> None:
    """DynamicsError for parameters without values, and such as no gradient can pass."""
    for name, parameter in live.root.named_parameters():
        if parameter.device.type == "meta":
            raise DynamicsError(
                f"{live.source}: {name} is on the meta device and has no values; load the weights first"
            )
        if parameter.is_inference():
            raise DynamicsError(
                f"{live.source}: {name} was made in inference mode, where gradients cannot pass; build or load it "
                "outside of torch.inference_mode"
            )


def _usable(value: Any) -> Any:
    """A tensor of the batch made in inference mode as a normal one, which a gradient can pass."""
    return value.clone() if isinstance(value, Tensor) and value.is_inference() else value


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
    if isinstance(modules, str) or not isinstance(modules, Sequence):
        raise DynamicsError(f"modules is {modules!r:.60}; it is a list of paths, of {', '.join(at)}")
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


def without_autocast(watched: Sequence[Watched]) -> torch.autocast:
    """A context in which sums are in the type that was asked for, whatever the caller runs the model in."""
    return torch.autocast(watched[0].calls[0].x.device.type, enabled=False)


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
