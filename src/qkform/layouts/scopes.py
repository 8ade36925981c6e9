"""Which part of a config speaks of an attention that no family file describes: proved by shapes, or not taken.

A model of several towers has several configs in one. The words of a module's path ("vision_tower") and of a
sub-config ("vision_config") choose between them; heads, key heads and head size must then make the shapes of the
weights. Where two readings remain, there is no answer.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from qkform.errors import LayoutError
from qkform.layouts.defaults import completed, part_types
from qkform.layouts.geometry import Geometry, Overrides
from qkform.layouts.match import is_number
from qkform.layouts.order import Sizes, outputs
from qkform.layouts.outside import unet_block

_HEADS = (
    "num_attention_heads",
    "n_heads",
    "n_head",
    "num_heads",
    "attention_heads",
    "nhead",
    "n_attention_heads",
)
_KV_HEADS = ("num_key_value_heads", "n_kv_heads", "num_kv_heads", "n_head_kv", "key_value_heads")
_HEAD_DIM = (
    "head_dim",
    "d_kv",
    "attention_head_size",
    "attention_head_dim",
    "kv_channels",
    "head_size",
    "qkv_dim",
    "dim_head",
)
_HIDDEN = ("hidden_size", "d_model", "n_embd", "dim", "embed_dim", "hidden_dim", "model_dim", "width")
KEYS: Mapping[str, tuple[str, ...]] = {"heads": _HEADS, "kv_heads": _KV_HEADS, "head_dim": _HEAD_DIM}
_SYNONYMS: Mapping[str, frozenset[str]] = {
    "text": frozenset({"text", "language", "llm", "lm"}),
    "language": frozenset({"text", "language", "llm", "lm"}),
    "llm": frozenset({"text", "language", "llm", "lm"}),
    "vision": frozenset({"vision", "visual", "image", "vit", "vpm"}),
    "visual": frozenset({"vision", "visual", "image", "vit", "vpm"}),
    "image": frozenset({"vision", "visual", "image", "vit"}),
    "audio": frozenset({"audio", "speech", "sound"}),
    "speech": frozenset({"audio", "speech"}),
    "backbone": frozenset({"backbone", "pixel"}),
}
_PREFIX = re.compile(
    r"(?:num_)?(encoder|decoder|text|vision|audio)_(?:num_)?(?:attention_heads|heads|n_heads|key_value_heads|head_dim)"
)
_KINDS = (
    "global",
    "swa",
)  # what configs call layers of full or sliding attention where these have other heads
_MAX_SCOPES = 64


@dataclass(frozen=True)
class Candidate:
    """One part of a config that has head counts, and the words that point to it."""

    words: tuple[str, ...]
    values: Mapping[str, Any]
    prefixed: bool = False  # its last word is a prefix of keys: encoder_attention_heads

    def value(self, keys: tuple[str, ...], at: tuple[int, ...], module: str = "") -> int | None:
        """The first of `keys` that holds a count; of a list, the entry that a number of the path points to."""
        for key in keys:
            value = self.values.get(key)
            if isinstance(value, (list, tuple)):
                block = unet_block(module, len(value))
                at = at if block is None else (block,)
                if "depths" in self.values and len(at) < 2:  # a list by stages, and a path without stages
                    return None
                value = next((value[i] for i in at if 0 <= i < len(value)), None)
            if isinstance(value, int) and not isinstance(value, bool) and 0 < value < 2**31:
                return value
        return None

    def widths(self) -> set[int]:
        """Everything this part of the config calls a width of the model."""
        found: set[int] = set()
        for key in (*_HIDDEN, "hidden_sizes", "embed_dims"):
            value = self.values.get(key)
            for one in value if isinstance(value, (list, tuple)) else (value,):
                if isinstance(one, int) and not isinstance(one, bool):
                    found.add(one)
        if "depths" in self.values and isinstance(
            self.values.get("embed_dim"), int
        ):  # Swin doubles it per stage
            found |= {self.values["embed_dim"] * 2**i for i in range(8)}
        return found

    def hits(self, path: frozenset[str]) -> int:
        """How many of its words the path has; the name of a sub-config counts twice what a prefix of a key does."""
        found = [bool(_SYNONYMS.get(word, frozenset({word})) & path) for word in self.words]
        return 2 * sum(found) - (bool(found) and self.prefixed and found[-1])

    def points_to(self, path: frozenset[str]) -> bool:
        return any(_SYNONYMS.get(word, frozenset({word})) & path for word in self.words)


def candidates(config: Mapping[str, Any] | None) -> list[Candidate]:
    """Every part of a config that may speak of heads: itself, its sub-configs, and `encoder_...` keys of each."""
    found: list[Candidate] = []
    for words, values in _nested(config or {}, ()):
        found.append(Candidate(words, values))
        for prefix in sorted({m[1] for key in values if (m := _PREFIX.fullmatch(str(key)))}):
            renamed = {
                key.replace(f"{prefix}_", "", 1): v
                for key, v in values.items()
                if key.startswith((f"{prefix}_", f"num_{prefix}_"))
            }
            own = {key: v for key, v in values.items() if key in _HIDDEN + _HEAD_DIM}
            found.append(Candidate((*words, prefix), {**own, **renamed}, prefixed=True))
        for kind in _KINDS:  # layers of another kind have sizes of their own
            own = {key: value for key, value in values.items() if kind in str(key).split("_")}
            if own:
                renamed = {
                    "_".join(w for w in key.split("_") if w != kind): value for key, value in own.items()
                }
                found.append(Candidate(words, {**values, **renamed}))
        if len(found) > _MAX_SCOPES:
            break
    return found


def _nested(
    config: Mapping[str, Any], words: tuple[str, ...], model_type: str = ""
) -> Iterator[tuple[tuple[str, ...], Mapping[str, Any]]]:
    """(words, values) of a config and everything inside it, with the defaults of their classes."""
    named = config.get("model_type")
    model_type = named if isinstance(named, str) else model_type
    yield words, completed(config, model_type, (_HEADS, _KV_HEADS, _HEAD_DIM, _HIDDEN))
    if len(words) < 6:
        types = part_types(model_type)
        left_out: dict[str, Mapping[str, Any]] = {key: {} for key in types if key not in config}
        for key, value in (*config.items(), *left_out.items()):
            if isinstance(value, Mapping) and isinstance(key, str) and len(key) < 100:
                inner = (*words, *key.removesuffix("_config").lower().split("_"))
                yield from _nested(value, inner, types.get(key, ""))


@dataclass(frozen=True)
class Projection:
    """The stored matrix of one side: its shape, and the order of what it holds ("" for one projection)."""

    outputs: int
    inputs: int
    order: str = ""

    def units(self, n: int, g: int, heads: int) -> int:
        """How many head sizes make its outputs, with n query heads, g key heads, `heads` of them on this side."""
        return outputs(self.order, Sizes(n, g, 1)) if self.order else heads


def path_words(module: str) -> frozenset[str]:
    """The words of a module's path: vision_tower.crossAttention -> vision, tower, cross, attention."""
    return frozenset(re.split(r"[._]", re.sub(r"(?<=[a-z])(?=[A-Z])", "_", module).lower()))


_Question = tuple[frozenset[str], str, Projection, Projection, tuple[tuple[str, ...], ...], bool]


class Solver:
    """Heads of pairs of projections, by the parts of one config; equal questions are answered once.

    Of a module's path only those words count that may point to a part of the config, and its numbers only where
    the config has a list of head counts: thousands of layers ask a handful of different questions.
    """

    def __init__(self, options: Sequence[Candidate], overrides: Overrides) -> None:
        self._options, self._overrides = options, overrides
        words = {word for option in options for word in option.words}
        self._telling = frozenset[str]().union(*(_SYNONYMS.get(word, {word}) for word in words))
        self._listed = {
            key for c in options for key, value in c.values.items() if isinstance(value, (list, tuple))
        }
        self._answers: dict[_Question, Geometry | str] = {}

    def words(self, module: str) -> frozenset[str]:
        """The words of a module's path that some part of the config goes by."""
        return path_words(module) & self._telling if self._telling else self._telling

    def solve(
        self,
        module: str,
        q: Projection,
        k: Projection,
        keys: Mapping[str, tuple[str, ...]] | None = None,
        any_width: bool = False,
    ) -> Geometry | str:
        """Heads of a pair of projections, or why they are not known. `keys` are config keys to read and no others.

        `any_width`: it is known that heads do not fill the width of the model and that no head size says so.
        """
        named = {**KEYS, **(keys or {})}
        asked = tuple(named[kind] for kind in KEYS)
        varies = not all(self._listed.isdisjoint(of_kind) for of_kind in asked)
        question = (self.words(module), module if varies else "", q, k, asked, any_width)
        if question not in self._answers:
            self._answers[question] = self._solved(*question)
        return self._answers[question]

    def _solved(
        self,
        path: frozenset[str],
        module: str,
        q: Projection,
        k: Projection,
        asked: tuple[tuple[str, ...], ...],
        any_width: bool,
    ) -> Geometry | str:
        keys = dict(zip(KEYS, asked, strict=True))
        numbers = tuple(int(part) for part in module.split(".") if is_number(part))
        # a word of the path that names a sub-config rules the others out; of several, the one with most words counts
        pointed = [c for c in self._options if c.points_to(path) and c.value(keys["heads"], numbers)]
        fitting: dict[Geometry, int] = {}
        for candidate in pointed or self._options:
            geometry = _fit(candidate, self._overrides, module, numbers, q, k, keys, any_width)
            if geometry is not None:
                fitting[geometry] = max(fitting.get(geometry, 0), candidate.hits(path))
        best = [g for g, hits in fitting.items() if hits == max(fitting.values())]
        if len(best) == 1:
            return best[0]
        if best:
            words = " or ".join(f"{g.n_heads} heads of {g.d_head}" for g in best[:4])
            return f"the config leaves open whether it has {words}"
        return "no head count in the config makes its shapes"


def _fit(
    candidate: Candidate,
    overrides: Overrides,
    module: str,
    numbers: tuple[int, ...],
    q: Projection,
    k: Projection,
    keys: Mapping[str, tuple[str, ...]],
    any_width: bool,
) -> Geometry | None:
    n = overrides.heads or candidate.value(keys["heads"], numbers, module)
    if n is None:
        return None
    g = overrides.kv_heads or candidate.value(keys["kv_heads"], numbers, module) or n
    d = overrides.head_dim or candidate.value(keys["head_dim"], numbers, module)
    widths = set() if any_width else candidate.widths()
    if n % g or (widths and q.inputs not in widths and overrides.heads is None):
        return None
    try:
        q_units, k_units = q.units(n, g, n), k.units(n, g, g)
    except LayoutError:  # heads that this order cannot hold
        return None
    if d is None:  # heads fill the width of the model; if they do not, a head size must say so
        d = (q.outputs // q_units) if any_width else q.inputs // n
    if d == 0 or q_units * d != q.outputs or k_units * d != k.outputs:
        return None
    return Geometry(n, g, d)
