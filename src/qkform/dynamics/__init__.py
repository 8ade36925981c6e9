"""What training does to the query-key form: mathematics that can be measured.

`one_layer` is a model small enough to be solved: which learning rates sharpen attention, and by how much. It needs the
extra `theory` (scipy). `decompose` splits the gradient of a live model's form into its pairs of tokens, and
`conflict` asks whether a token's pair with itself works against the others (torch).
`sharpness` and the proxies of interpretability measure attention weights, numpy or torch; `agreement` makes sentences
in which the token that matters is known. `Tracker` records the form, attention and loss of a model while it trains.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from qkform.lazy import member

if TYPE_CHECKING:
    from qkform.dynamics import agreement as agreement
    from qkform.dynamics import one_layer as one_layer
    from qkform.dynamics.conflicts import Conflict as Conflict
    from qkform.dynamics.conflicts import conflict as conflict
    from qkform.dynamics.conflicts import fraction_negative as fraction_negative
    from qkform.dynamics.decomposition import Decomposition as Decomposition
    from qkform.dynamics.decomposition import decompose as decompose
    from qkform.dynamics.proxies import attention_mass as attention_mass
    from qkform.dynamics.proxies import comprehensiveness as comprehensiveness
    from qkform.dynamics.proxies import leave_one_out as leave_one_out
    from qkform.dynamics.proxies import rank_correlation as rank_correlation
    from qkform.dynamics.proxies import sufficiency as sufficiency
    from qkform.dynamics.spread import Sharpness as Sharpness
    from qkform.dynamics.spread import sharpness as sharpness
    from qkform.dynamics.tracker import Tracker as Tracker

_HOME: dict[str, str] = {  # public name -> module
    "Conflict": "qkform.dynamics.conflicts",
    "Decomposition": "qkform.dynamics.decomposition",
    "Sharpness": "qkform.dynamics.spread",
    "Tracker": "qkform.dynamics.tracker",
    "agreement": "qkform.dynamics.agreement",
    "attention_mass": "qkform.dynamics.proxies",
    "comprehensiveness": "qkform.dynamics.proxies",
    "conflict": "qkform.dynamics.conflicts",
    "decompose": "qkform.dynamics.decomposition",
    "fraction_negative": "qkform.dynamics.conflicts",
    "leave_one_out": "qkform.dynamics.proxies",
    "one_layer": "qkform.dynamics.one_layer",
    "rank_correlation": "qkform.dynamics.proxies",
    "sharpness": "qkform.dynamics.spread",
    "sufficiency": "qkform.dynamics.proxies",
}

__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    return member(__name__, _HOME, name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOME])
