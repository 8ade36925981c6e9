"""The J of each arm: W_K = c W_Q J with J orthogonal, d_head x d_head, so that W = c W_Q J^T W_Q^T is as J is.

J symmetric makes W symmetric, J skew makes W skew. A rotary model compares W_Q R(n) with W_K, R(n) a turn of pairs of
coordinates, so J has to commute with R(n) for the promise to hold at every distance n: it is made of the turns of
single planes (and of anything among the coordinates that do not turn). Then W_{-n} = W_n^T, skew: -W_n^T.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from qkform.errors import SurgeryError
from qkform.form.rotary import Rotary

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Planes:
    """Which coordinates of a head turn together: `pairs` of them, and those that are `free` to be mixed."""

    pairs: tuple[tuple[int, int], ...]
    free: tuple[int, ...]

    @property
    def d_head(self) -> int:
        return 2 * len(self.pairs) + len(self.free)


def planes(d_head: int, rotary: Rotary | None) -> Planes:
    """The planes in which a head of a rotary model turns; all coordinates are free without a rotation."""
    if rotary is None:
        return Planes((), tuple(range(d_head)))
    start, dims = rotary.start, rotary.dims
    if start + dims > d_head:
        raise SurgeryError(f"{start + dims} coordinates turn and a head has {d_head}")
    if rotary.style == "half":
        pairs = tuple((start + p, start + p + dims // 2) for p in range(dims // 2))
    else:
        pairs = tuple((start + 2 * p, start + 2 * p + 1) for p in range(dims // 2))
    return Planes(pairs, tuple(i for i in range(d_head) if not start <= i < start + dims))


@dataclass(frozen=True)
class Arm:
    """An arm of the kind W_K = c W_Q J.

    promise   what symmetry the layer has at step 0; None: none is promised, and what came out is reported
    make      (planes, number of the key head, generator) -> J, (d_head, d_head) float64
    problem   planes -> why there is no such J; None where there is one
    """

    promise: float | None
    make: Callable[[Planes, int, Any], torch.Tensor]
    problem: Callable[[Planes], str | None]


def identity(p: Planes, head: int, generator: Any) -> torch.Tensor:
    """J = 1: a token matches itself, W = c W_Q W_Q^T is positive semi-definite."""
    import torch

    return torch.eye(p.d_head, dtype=torch.float64)


def signs(p: Planes, head: int, generator: Any) -> torch.Tensor:
    """J = diag of signs, one per rotary plane, as many minus as plus: W attracts along as many directions as it repels.

    Which are minus is drawn. Of an odd number one is left over; its sign alternates from key head to key head. A plane
    that is left over (two coordinates) is made up for among the free coordinates, where there are some.
    """
    import torch

    surplus = 1 if head % 2 == 0 else -1
    turning = _balanced(len(p.pairs), surplus, generator)
    left, n = int(2 * turning.sum()), len(p.free)
    minus = min(max((n + left - (n % 2) * surplus) // 2, 0), n)
    diagonal = torch.ones(p.d_head, dtype=torch.float64)
    for (a, b), sign in zip(p.pairs, turning.tolist(), strict=True):
        diagonal[a] = diagonal[b] = sign
    for place in torch.randperm(n, generator=generator)[:minus].tolist():
        diagonal[p.free[place]] = -1.0
    return torch.diag(diagonal)


def quarter_turns(p: Planes, head: int, generator: Any) -> torch.Tensor:
    """J = a quarter turn in every plane, one way in half of them: J^T = -J and W^T = -W.

    Free coordinates are paired with their neighbours. Without a rotation the way does not matter; with one, turns all
    the same way would make equal tokens attract from one side at short distances.
    """
    ways = _balanced(len(p.pairs) + len(p.free) // 2, 1 if head % 2 == 0 else -1, generator).tolist()
    both = [*p.pairs, *zip(p.free[::2], p.free[1::2], strict=True)]
    return _turns(p, {pair: way * math.pi / 2 for pair, way in zip(both, ways, strict=True)})


def random(p: Planes, head: int, generator: Any) -> torch.Tensor:
    """J without symmetry: Haar-random among the free coordinates; each rotary plane is turned by an odd eighth.

    The control: W_K has the singular values that it has in the other arms, and W too as far as the columns of W_Q are
    orthonormal. Then, of one head and over Haar-random J, the symmetry of W has mean 1/d_head and standard deviation
    sqrt(2)/d_head; for any W_Q and a whole layer `qkform.surgery.chance` says what to expect.

    What commutes with a rotation is a turn of each plane by some angle a; it is symmetric by cos(a)^2 and skew by
    sin(a)^2, so an angle drawn at random has a symmetry of its own, cos(2 a). At 45, 135, 225 and 315 degrees the two
    are equal in every plane, and which of the four is drawn: W has no symmetry, whatever the weight of a plane. At
    distance n a plane is symmetric by sin(2 a) sin(2 n f), f its frequency. The signs of sin(2 a) are balanced, so most
    of that cancels, and some is left: with d_model 512, d_head 64 and frequencies of base 10000, Gaussian W_Q, one head
    has a root mean square symmetry of 0.05 at n = 1, 0.08 at 4 and 0.09 at 16, up to 0.24 in 200 draws; the sum of 8
    heads 0.02 to 0.03, up to 0.09 in 60. At n = 0 both have 0.006 (benchmarks/arms.py).

    A Haar matrix over all coordinates would not commute: the score would depend on the distance otherwise than in the
    other arms.
    """
    import torch

    ways = _balanced(len(p.pairs), 1 if head % 2 == 0 else -1, generator).tolist()
    halves = torch.randint(0, 2, (len(p.pairs),), generator=generator).tolist()
    angles = {
        pair: math.pi * (half + (0.25 if way > 0 else 0.75))
        for pair, way, half in zip(p.pairs, ways, halves, strict=True)
    }
    j = _turns(p, angles)
    free = torch.tensor(p.free, dtype=torch.int64)
    if len(p.free):
        j[free[:, None], free[None, :]] = _haar(len(p.free), generator)
    return j


def flaw(j: torch.Tensor, p: Planes, promise: float | None) -> str | None:
    """Why a J, (d_head, d_head) float64, is none for these planes, in words; None where it is one, to rounding.

    It has to be orthogonal and to commute with every rotation of the planes: with one generator of such rotations whose
    frequencies differ. Without a promise each plane has as much that is symmetric as is skew: tr J^2 = 0 there.
    """
    import torch

    spin = torch.zeros_like(j)
    for frequency, (a, b) in enumerate(p.pairs, 1):
        spin[a, b], spin[b, a] = frequency, -frequency
    one, squared = torch.eye(len(j), dtype=j.dtype), j @ j
    own = [float(squared[a, a] + squared[b, b]) for a, b in p.pairs] if promise is None else []
    for what, off in (
        ("is not orthogonal", (j @ j.T - one).abs().max()),
        ("does not commute with the rotation", (j @ spin - spin @ j).abs().max() / max(len(p.pairs), 1)),
        ("has a symmetry of its own in a rotary plane", max((abs(t) for t in own), default=0.0)),
    ):
        if not float(off) < 1e-12:
            return f"J {what}, by {float(off):.1e}"
    return None


def _turns(p: Planes, angles: Mapping[tuple[int, int], float]) -> torch.Tensor:
    """Turns of pairs of coordinates, (d_head, d_head); the others stay."""
    import torch

    j = torch.eye(p.d_head, dtype=torch.float64)
    for (a, b), angle in angles.items():
        cos, sin = (
            round(math.cos(angle), 15),
            round(math.sin(angle), 15),
        )  # 0 and 1 exactly, at a quarter turn
        j[a, a], j[b, b], j[a, b], j[b, a] = cos, cos, sin, -sin
    return j


def _balanced(n: int, surplus: int, generator: Any) -> torch.Tensor:
    """(n,) signs in drawn order, as many minus as plus; of an odd number `surplus` is one more."""
    import torch

    values = torch.ones(n, dtype=torch.float64)
    values[: (n + (n % 2 and surplus < 0)) // 2] = -1.0
    return values[torch.randperm(n, generator=generator)]


def _haar(n: int, generator: Any) -> torch.Tensor:
    """Haar-random on O(n): Q of a Gaussian matrix with the signs of R's diagonal put in (arXiv math-ph/0609050)."""
    import torch

    q, r = torch.linalg.qr(torch.randn(n, n, generator=generator, dtype=torch.float64))
    return q * torch.where(r.diagonal() < 0, -1.0, 1.0)


def _any(p: Planes) -> str | None:
    return None


def _two_signs(p: Planes) -> str | None:
    if len(p.pairs) + len(p.free) >= 2:
        return None
    what = "one rotary plane" if p.pairs else "one coordinate"
    return f"a head of {what} has one sign, and an indefinite form needs two"


def _even(p: Planes) -> str | None:
    return (
        None
        if len(p.free) % 2 == 0
        else f"d_head is {p.d_head}, and a skew form of full rank needs an even one"
    )


def _two_coordinates(p: Planes) -> str | None:
    return None if p.d_head >= 2 else "d_head is 1, and such a form is symmetric whatever J is"


ARMS: Mapping[str, Arm] = {
    "matched": Arm(1.0, identity, _any),
    "indefinite": Arm(1.0, signs, _two_signs),
    "skew": Arm(-1.0, quarter_turns, _even),
    "orthogonal": Arm(None, random, _two_coordinates),
}
