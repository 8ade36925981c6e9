"""qkform: measure the query-key form W_qk = W_Q W_K^T of self-attention in any checkpoint.

>>> import qkform as qk
>>> table = qk.scan("./my-model")               # doctest: +SKIP
>>> for layer in qk.layers("./my-model"):       # doctest: +SKIP
...     layer.form.symmetry()                   # (n_heads,)

Names are loaded when they are first used, so that importing the package costs nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from qkform.lazy import member

if TYPE_CHECKING:
    from qkform import attention as attention
    from qkform import dynamics as dynamics
    from qkform import errors as errors
    from qkform import report as report
    from qkform import runs as runs
    from qkform import sites as sites
    from qkform import surgery as surgery
    from qkform import training as training
    from qkform.differ import diff as diff
    from qkform.differences import DiffTable as DiffTable
    from qkform.form import BilinearForm as BilinearForm
    from qkform.form import Signature as Signature
    from qkform.layouts import AttentionLayer as AttentionLayer
    from qkform.records import ModelScores as ModelScores
    from qkform.records import ScoreTable as ScoreTable
    from qkform.runs import RunRecord as RunRecord
    from qkform.scanner import layers as layers
    from qkform.scanner import scan as scan

__version__ = "0.1.0"

_HOME = {
    "BilinearForm": "qkform.form",
    "Signature": "qkform.form",
    "AttentionLayer": "qkform.layouts",
    "ModelScores": "qkform.records",
    "ScoreTable": "qkform.records",
    "RunRecord": "qkform.runs",
    "DiffTable": "qkform.differences",
    "diff": "qkform.differ",
    "layers": "qkform.scanner",
    "scan": "qkform.scanner",
    "attention": "qkform.attention",
    "dynamics": "qkform.dynamics",
    "errors": "qkform.errors",
    "report": "qkform.report",
    "runs": "qkform.runs",
    "sites": "qkform.sites",
    "surgery": "qkform.surgery",
    "training": "qkform.training",
}

__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    try:
        return member(__name__, _HOME, name)
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        from qkform.errors import MissingExtra

        raise MissingExtra(
            f"qkform.{name} needs torch, which is not installed: pip install 'qkform[torch]'"
        ) from None


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOME])
