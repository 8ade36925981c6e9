"""Changes of the query-key form in a live model: one change per module, the same model comes out.

Every change is recorded in the model (`model.config.qkform`), and `from_pretrained` restores it. Needs torch.
"""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING, Any

from qkform.lazy import member

if TYPE_CHECKING:
    from qkform.surgery.building import from_config as from_config
    from qkform.surgery.collapsed import CircuitAttention as CircuitAttention
    from qkform.surgery.decouple import decouple_ as decouple_
    from qkform.surgery.decouple import recouple_ as recouple_
    from qkform.surgery.factorize import collapse_ as collapse_
    from qkform.surgery.factorize import factorize_ as factorize_
    from qkform.surgery.groups import describe_groups as describe_groups
    from qkform.surgery.groups import param_groups as param_groups
    from qkform.surgery.loading import from_pretrained as from_pretrained
    from qkform.surgery.set_attention import set_attention_ as set_attention_
    from qkform.surgery.split import unsplit_ as unsplit_
    from qkform.surgery.symmetric_init import symmetrize_ as symmetrize_

_HOME: dict[str, str] = {  # public name -> module
    "CircuitAttention": "qkform.surgery.collapsed",
    "collapse_": "qkform.surgery.factorize",
    "decouple_": "qkform.surgery.decouple",
    "describe_groups": "qkform.surgery.groups",
    "factorize_": "qkform.surgery.factorize",
    "from_config": "qkform.surgery.building",
    "from_pretrained": "qkform.surgery.loading",
    "param_groups": "qkform.surgery.groups",
    "recouple_": "qkform.surgery.decouple",
    "set_attention_": "qkform.surgery.set_attention",
    "symmetrize_": "qkform.surgery.symmetric_init",
    "unsplit_": "qkform.surgery.split",
}

__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    if name in _HOME and importlib.util.find_spec("torch") is None:
        from qkform.errors import MissingExtra

        raise MissingExtra(
            f"qkform.surgery.{name} needs torch, which is not installed: pip install 'qkform[torch]'"
        )
    return member(__name__, _HOME, name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOME])
