"""What a scan may be told beyond the source."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from qkform.errors import ConfigError
from qkform.layouts.transform import Changes

FARTHEST = 2**31  # positions: more than any model reads, and angles still have nine digits


@dataclass(frozen=True, kw_only=True)
class Options:
    """What a scan may be told beyond the source.

    heads, kv_heads, head_dim   outrank the config
    q, k                        tensor names with {layer}, for a layout that is not known; transposed: stored (in, out)
    gamma                       standard deviations above the mean at which a row or column is an outlier
    signature                   "auto" counts directions of every head, and of a whole layer up to 2048 of them;
                                "all" of every layer, however long it takes; "none" of nothing
    revision, token             of a hub id: branch, tag or commit (default: the main branch), and an access token; of
                                several revisions each gives its own ModelScores
    download                    of a hub id that has no safetensors: fetch whole files where ranges cannot do
    fold_norm                   multiply W_Q and W_K by the gain of the norm that feeds them, and add its bias to theirs
    bias                        score the extended form [x, 1] W [x, 1]^T, biases included
    qk_norm                     multiply by the gains of the norms on queries and keys
    offset                      rotary models: the form at this relative distance i - j, W_Q R(i - j) W_K^T; several
                                distances give one ModelScores each, and every layer is read once for all of them

    Whole numbers may be of any type that is one (numpy's too), several values any sequence; they are kept as int and
    tuple. Raises ConfigError for a value that makes no sense.
    """

    heads: int | None = None
    kv_heads: int | None = None
    head_dim: int | None = None
    q: str | None = None
    k: str | None = None
    transposed: bool = False
    gamma: float = 2.0
    signature: Literal["auto", "all", "none"] = "auto"
    revision: str | Sequence[str] | None = None
    token: str | None = field(default=None, repr=False)
    download: bool = False
    fold_norm: bool = False
    bias: bool = False
    qk_norm: bool = False
    offset: int | Sequence[int] | None = None

    def __post_init__(self) -> None:
        for name in ("heads", "kv_heads", "head_dim"):
            if getattr(self, name) is not None:
                self._set(name, _whole(name, getattr(self, name), "a whole number"))
        for name in ("q", "k", "token"):
            text = getattr(self, name)
            if text is not None and not isinstance(text, str):
                shown = "" if name == "token" else f" and not {text!r:.60}"
                raise ConfigError(f"{name} must be text{shown}, a {type(text).__name__}")
        for name in ("transposed", "download", "fold_norm", "bias", "qk_norm"):
            self._set(name, _flag(name, getattr(self, name)))
        self._set("gamma", _deviations(self.gamma))
        if self.signature not in ("auto", "all", "none"):
            raise ConfigError(f"signature is {self.signature!r}; it must be auto, all or none")
        self._set("offset", _distances(self.offset))
        self._set("revision", _revisions(self.revision))

    def _set(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)

    @property
    def offsets(self) -> tuple[int | None, ...]:
        """The distances, one for each ModelScores; (None,) where the form is taken as it is stored."""
        return _several(self.offset)

    @property
    def distance(self) -> int | None:
        """The distance of options that have one, or none."""
        (distance,) = self.offsets
        return distance

    @property
    def revisions(self) -> tuple[str | None, ...]:
        """The revisions, one for each time the source is read; (None,) for the one that the source itself means."""
        return _several(self.revision)

    @property
    def single_revision(self) -> str | None:
        """The revision of options that have one, or none."""
        (revision,) = self.revisions
        return revision

    @property
    def form(self) -> str:
        """What is scored, for the record: "raw", or the words of the options that change the form."""
        asked = {"fold_norm": self.fold_norm, "bias": self.bias, "qk_norm": self.qk_norm}
        return " ".join(word for word, on in asked.items() if on) or "raw"

    @property
    def changes(self) -> Changes:
        """What is done to the form of every layer."""
        return Changes(self.fold_norm, self.bias, self.qk_norm, self.distance)


def _several(value: Any) -> tuple[Any, ...]:
    return value if isinstance(value, tuple) else (value,)


def _whole(name: str, value: Any, words: str) -> int:
    """A whole number of any type that is one; True and 3.0 are none."""
    try:
        if isinstance(value, bool):
            raise TypeError
        return operator.index(value)
    except TypeError:
        raise ConfigError(f"{name} is {value!r:.60}; it must be {words}") from None


def _flag(name: str, value: Any) -> bool:
    if isinstance(value, bool) or type(value).__name__ in ("bool_", "bool"):  # numpy's
        return bool(value)
    raise ConfigError(f"{name} is {value!r:.60}; it must be True or False")


def _deviations(value: Any) -> float:
    try:
        found = float("nan") if isinstance(value, (bool, str)) else float(value)
    except (TypeError, ValueError, OverflowError):
        found = float("nan")
    if not abs(found) <= 1e6:
        raise ConfigError(f"gamma is {value!r:.60}; it must be a number of standard deviations, at most 1e6")
    return found


def _distances(value: Any) -> int | tuple[int, ...] | None:
    words = f"a whole number of positions up to {FARTHEST}"
    if value is None:
        return None
    several = isinstance(value, Iterable) and not isinstance(value, (str, bytes)) and not _is_scalar(value)
    found = tuple(_whole("offset", one, words) for one in (value if several else (value,)))
    for one in found:
        if abs(one) > FARTHEST:
            raise ConfigError(f"offset is {one!r:.60}; it must be {words}")
    if len(set(found)) < len(found):
        raise ConfigError(f"offset names a distance twice: {', '.join(map(str, found))}")
    return found if len(found) > 1 else found[0] if found else None


def _is_scalar(value: Any) -> bool:
    """Arrays without axes say that they can be gone through, and cannot."""
    return getattr(value, "ndim", None) == 0


def _revisions(value: Any) -> str | tuple[str, ...] | None:
    if value is None or isinstance(value, str):
        return (value or "").strip() or None
    found = tuple(value) if isinstance(value, Iterable) else (value,)
    for one in found:
        if not isinstance(one, str) or not one.strip():
            raise ConfigError(f"revision is {one!r:.60}; it must be a branch, a tag or a commit")
    if len(set(found)) < len(found):
        raise ConfigError(f"revision names one twice: {', '.join(found)[:200]}")
    return found if len(found) > 1 else found[0] if found else None
