"""Where a run trains: versions, threads and devices, for its record, and in what two of them differ."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

from qkform import __version__
from qkform.dynamics.processes import world_size


def environment(model: Any) -> dict[str, Any]:
    """What the numbers of a run may depend on beside its experiment: strings and whole numbers."""
    parameter = next(iter(model.parameters()), None)
    device = torch.device("cpu") if parameter is None else parameter.device
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "processor": _processor(device),
        "torch": str(torch.__version__),
        "transformers": _version("transformers"),
        "numpy": _version("numpy"),
        "qkform": __version__,
        "threads": torch.get_num_threads(),
        "world_size": world_size(),
        "device": device.type,
        "dtype": None if parameter is None else str(parameter.dtype).removeprefix("torch."),
    }


def changed(before: Mapping[str, Any], now: Mapping[str, Any]) -> str | None:
    """In what two environments differ, in words: why a resumed run is not exact. None where they do not."""
    said = [
        f"{name} was {before.get(name)!r} and is {value!r}"
        for name, value in now.items()
        if name in before and before[name] != value
    ]
    return "; ".join(said) or None


def _processor(device: torch.device) -> str:
    if device.type == "cuda":
        return str(torch.cuda.get_device_name(device))
    return platform.processor() or platform.machine()


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
