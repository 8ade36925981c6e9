"""What a scan may be told beyond the source."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from qkform.errors import ConfigError
from qkform.layouts.transform import Changes

FARTHEST = 2**31  # positions: more than any model reads, and angles still have nine digits


@dataclass(frozen=True)
class Options:
    """What a scan may be told beyond the source.

    heads, kv_heads, head_dim   outrank the config
    q, k                        tensor names with {layer}, for a layout that is not known; transposed: stored (in, out)
    gamma                       standard deviations above the mean at which a row or column is an outlier
    signature                   "auto" counts directions of every head, and of a whole layer up to 2048 of them;
                                "all" of every layer, however long it takes; "none" of nothing
    revision, token             of a hub id: branch, tag or commit (default: the main branch), and an access token
    download                    of a hub id that has no safetensors: fetch whole files where ranges cannot do
    fold_norm                   multiply W_Q and W_K by the gain of the norm that feeds them, and add its bias to theirs
    bias                        score the extended form [x, 1] W [x, 1]^T, biases included
    qk_norm                     multiply by the gains of the norms on queries and keys
    offset                      rotary models: the form at this relative distance i - j, W_Q R(i - j) W_K^T; several
                                distances give one ModelScores each, and every layer is read once for all of them
    """

    heads: int | None = None
    kv_heads: int | None = None
    head_dim: int | None = None
    q: str | None = None
    k: str | None = None
    transposed: bool = False
    gamma: float = 2.0
    signature: Literal["auto", "all", "none"] = "auto"
    revision: str | None = None
    token: str | None = field(default=None, repr=False)
    download: bool = False
    fold_norm: bool = False
    bias: bool = False
    qk_norm: bool = False
    offset: int | tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        if not abs(self.gamma) <= 1e6:
            raise ConfigError(
                f"gamma is {self.gamma}; it must be a number of standard deviations, at most 1e6"
            )
        if self.signature not in ("auto", "all", "none"):
            raise ConfigError(f"signature is {self.signature!r}; it must be auto, all or none")
        for offset in self.offsets:
            sound = isinstance(offset, int) and not isinstance(offset, bool)
            if offset is not None and not (sound and abs(offset) <= FARTHEST):
                raise ConfigError(
                    f"offset is {offset!r:.60}; it must be a whole number of positions up to {FARTHEST}"
                )
        if len(set(self.offsets)) < len(self.offsets):
            raise ConfigError(f"offset names a distance twice: {', '.join(map(str, self.offsets))}")

    @property
    def offsets(self) -> tuple[int | None, ...]:
        """The distances, one for each ModelScores; (None,) where the form is taken as it is stored."""
        if isinstance(self.offset, tuple):
            return self.offset or (None,)
        return (self.offset,)

    @property
    def distance(self) -> int | None:
        """The distance of options that have one, or none."""
        (distance,) = self.offsets
        return distance

    @property
    def changes(self) -> Changes:
        """What is done to the form of every layer."""
        return Changes(self.fold_norm, self.bias, self.qk_norm, self.distance)
