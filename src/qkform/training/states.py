"""A training besides its weights: optimizer, schedule, loss scale, random numbers; gathered, saved, put back."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import torch

from qkform.dynamics.processes import of_all
from qkform.errors import TrainingError

NAME = "training.pt"


def gathered(optimizer: Any, scheduler: Any, scaler: Any) -> dict[str, Any]:
    """The state of a training as one process would have it; random numbers of every process. All take part.

    optimizer, scheduler    of torch.optim; sharded state is gathered
    scaler                  torch.amp.GradScaler or None
    """
    state = optimizer.state_dict()
    full = {
        index: {name: whole(value) for name, value in of_parameter.items()}
        for index, of_parameter in state["state"].items()
    }
    return {
        "optimizer": {**state, "state": full},
        "scheduler": scheduler.state_dict(),
        "scaler": scaler.state_dict() if scaler is not None else None,
        "random": of_all(_random()),
    }


def save(state: dict[str, Any], folder: Path) -> None:
    torch.save(state, folder / NAME)


def load(folder: Path) -> dict[str, Any]:
    """What `save` wrote; TrainingError where it cannot be read."""
    try:
        return dict(torch.load(folder / NAME, map_location="cpu", weights_only=True))
    except (OSError, RuntimeError, EOFError, ValueError, KeyError) as error:
        raise TrainingError(f"{folder / NAME}: cannot be read: {error}") from error


def restore_(state: dict[str, Any], optimizer: Any, scheduler: Any, scaler: Any) -> None:
    """Put a gathered state back, random numbers aside. TrainingError where it is that of another optimizer."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    own = state["optimizer"]
    placed = {
        index: {name: _as_parameter(value, parameters[index]) for name, value in of_parameter.items()}
        for index, of_parameter in own["state"].items()
    }
    try:
        optimizer.load_state_dict({**own, "state": placed})
    except (ValueError, KeyError, IndexError) as error:
        raise TrainingError(f"the optimizer of the checkpoint is another one: {error}") from error
    scheduler.load_state_dict(state["scheduler"])
    if scaler is not None and state["scaler"] is not None:
        scaler.load_state_dict(state["scaler"])


def restore_random_(state: dict[str, Any], rank: int) -> None:
    """Put this process's random numbers back; those of a process that was not there stay as they are."""
    if rank < len(state["random"]):
        saved = state["random"][rank]
        random.setstate(saved["python"])
        kind, keys, place, has_gauss, gauss = saved["numpy"]
        np.random.set_state((kind, keys.numpy().astype(np.uint32), place, has_gauss, gauss))  # noqa: NPY002
        torch.set_rng_state(saved["torch"])
        if saved["cuda"] is not None and torch.cuda.is_available():
            torch.cuda.set_rng_state(saved["cuda"])


def whole(value: Any) -> Any:
    """A tensor as one process has it: shards are gathered. All processes take part."""
    return value.full_tensor() if hasattr(value, "full_tensor") else value


def own(value: Any) -> Any:
    """This process's part of a tensor."""
    return value.to_local() if hasattr(value, "to_local") else value


def _as_parameter(value: Any, parameter: Any) -> Any:
    """State of a parameter, sharded as it is."""
    if hasattr(parameter, "device_mesh") and getattr(value, "shape", None) == parameter.shape:
        from torch.distributed.tensor import distribute_tensor

        return distribute_tensor(value.to(parameter.device), parameter.device_mesh, parameter.placements)
    return value


def _random() -> dict[str, Any]:
    kind, keys, place, has_gauss, gauss = np.random.get_state(legacy=True)  # noqa: NPY002
    return {
        "python": random.getstate(),
        "numpy": (str(kind), torch.from_numpy(np.asarray(keys).astype(np.int64)), place, has_gauss, gauss),
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state() if torch.cuda.is_available() else None,
    }
