"""What processes that train one model together tell each other; alone, everything is as it is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch import distributed as dist

from qkform.errors import QKFormError

T = TypeVar("T")


def together() -> bool:
    """Whether there are several processes."""
    return bool(dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1)


def world_size() -> int:
    return int(dist.get_world_size()) if together() else 1


def is_first() -> bool:
    """Whether this process is the one that writes."""
    return not together() or dist.get_rank() == 0


def total(value: float, device: torch.device) -> float:
    """The sum over processes, each of which has to call this; float64, exact for whole numbers."""
    if not together():
        return value
    return float(summed(torch.tensor(value, dtype=torch.float64, device=_reachable(device))))


def summed(value: Tensor) -> Tensor:
    """The sum of a tensor over processes, each of which has to call this; the tensor of each stays as it is."""
    if together():
        value = value.clone()
        dist.all_reduce(value)
    return value


def of_all(value: T) -> list[T]:
    """The value of every process, by rank; each of them has to call this."""
    if not together():
        return [value]
    values: list[Any] = [None] * world_size()
    dist.all_gather_object(values, value)
    return values


def by_first(compute: Callable[[], T], device: torch.device) -> T:
    """What a function returns in the first process, or the error that it raises there, in each of them."""
    if not together():
        return compute()
    held: list[Any] = [None, None]
    if is_first():
        try:
            held[0] = compute()
        except QKFormError as error:
            held[1] = error
    dist.broadcast_object_list(held, src=0, device=_reachable(device))
    if held[1] is not None:
        raise held[1]
    return held[0]  # type: ignore[no-any-return]


def _reachable(device: torch.device) -> torch.device:
    """Where the processes' backend can reach: nccl knows no CPU, gloo reaches it everywhere."""
    return torch.device("cpu") if dist.get_backend() in ("gloo", "mpi") else device


def is_sharded(model: Any) -> bool:
    """Whether every process holds a part of the parameters only (FSDP2, tensor parallelism)."""
    return any(hasattr(p, "full_tensor") for p in model.parameters())


def resharded(model: Any) -> None:
    """Let FSDP2's modules hold their own part again: a pass without a way back leaves some of them whole."""
    for module in model.modules():
        if hasattr(module, "reshard") and hasattr(module, "unshard"):
            module.reshard()
