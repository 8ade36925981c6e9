"""What besides the experiment decides the last bits of a run: versions, threads, processes, the processor."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from typing import Any

import qkform


def environment(args: Any) -> dict[str, Any]:
    """The facts of this process; `args` are Trainer's."""
    import numpy
    import torch
    import transformers

    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "processor": f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}",
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "numpy": numpy.__version__,
        "qkform": qkform.__version__,
        "threads": torch.get_num_threads(),
        "world_size": args.world_size,
        "device": str(args.device.type),
    }


_IGNORED = ("python", "platform", "qkform")  # do not touch a sum


def changed(before: Mapping[str, Any], now: Mapping[str, Any]) -> str | None:
    """What differs in a way that may change sums, in words; None where nothing does."""
    names = [name for name in now if name not in _IGNORED and before.get(name) != now[name]]
    if now.get("device") != "cpu":
        return "sums on a GPU are not the same twice"
    return "; ".join(f"{name} {now[name]}, was {before.get(name)}" for name in names) or None
