"""Training on real text, with the query-key form recorded and changed: one `Experiment`, one folder, one record.

Needs the extra `train` (torch, transformers, accelerate, datasets, tokenizers).

>>> from qkform.training import Experiment, run                                      # doctest: +SKIP
>>> run(Experiment(objective="clm", attention="decoupled", steps=200), "runs/one")   # doctest: +SKIP
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from qkform.lazy import member

if TYPE_CHECKING:
    from qkform.training import data as data
    from qkform.training.comparing import compare as compare
    from qkform.training.experiment import Experiment as Experiment
    from qkform.training.grid import Grid as Grid
    from qkform.training.models import build_model as build_model
    from qkform.training.on_ray import ray_sweep as ray_sweep
    from qkform.training.running import Finished as Finished
    from qkform.training.running import run as run
    from qkform.training.sweeping import sweep as sweep
    from qkform.training.watch import Progress as Progress

_HOME: dict[str, str] = {  # public name -> module
    "Experiment": "qkform.training.experiment",
    "Finished": "qkform.training.running",
    "Grid": "qkform.training.grid",
    "compare": "qkform.training.comparing",
    "data": "qkform.training.data",
    "ray_sweep": "qkform.training.on_ray",
    "sweep": "qkform.training.sweeping",
    "Progress": "qkform.training.watch",
    "build_model": "qkform.training.models",
    "run": "qkform.training.running",
}

__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    return member(__name__, _HOME, name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOME])
