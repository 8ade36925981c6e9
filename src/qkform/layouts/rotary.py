"""A config -> how one layer turns its queries and keys, or why it does not. `positions.toml` holds what is known.

A table of that file, [half] or [interleaved], lists model types with what is special about them:

    theta         base of the frequencies where the config has none (10000)
    partial       share of a head that turns where the config says nothing; without it whole heads turn
    dims          config key of the number of coordinates that turn, with dims_default where it is absent
    last          the last coordinates of a head turn, not the first (latent attention)
    fixed         the model's code takes 10000 and no scaling, whatever the config says
    local_theta   base of the layers with a sliding window, where it is another one
    period, every which layers have a sliding window where `layer_types` is absent: all but each `every`-th, by the
                  config key `period`; first: counted from the first layer
    scaled        "full": a scaling that names no kind of layer is for those without a sliding window
    without       layers that do not turn: a config key with one 0 or 1 per layer (every 4th is 0 where it is absent),
                  or the kind of layer
    alibi         a config flag of that name replaces the rotation
    half_if_false config flag: where it is false the style is "half"

[other] lists types whose positions are no rotation, by the reason; [qk_norm] kinds of the norms on queries and keys.
"""

from __future__ import annotations

import math
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib import resources
from typing import Any

import numpy as np

from qkform.errors import ConfigError, LayoutError
from qkform.form import rotary as turns
from qkform.form.rotary import Rotary, Style

MAX_DIMS = 2**16
_THETA = ("rope_theta", "rotary_emb_base")
_FACTORS = "rope_freqs.weight"  # a GGUF file's divisors of the frequencies (Llama 3.1)
_LONGROPE = ("rope_factors_long.weight", "rope_factors_short.weight")


@dataclass(frozen=True)
class Positions:
    """What decides how one layer knows positions; asked only when a distance is.

    `config` is the (sub-)config of the layer, `where` its name for messages, `kinds` the names that the type may be
    listed under, most special first, `layer` its place in the list, `factors` a tensor with divisors of the
    frequencies, `unread` tensors that change them in a way that is not read.
    """

    kinds: tuple[str, ...]
    config: Mapping[str, Any] = field(repr=False)
    where: str
    layer: int
    factors: str | None = None
    unread: str | None = None

    @property
    def kind(self) -> str | None:
        """The type that is known, None where none of the names is."""
        return next((k for k in self.kinds if k in _known()), None)

    def other(self) -> str | None:
        """Why the model has no rotation at all; None where it has one. LayoutError where nobody has said."""
        if self.kind is None:
            raise LayoutError(
                f"--offset: how {self.kinds[0]!r} knows positions is not described; rotary types are: "
                + ", ".join(k for k, (style, _) in _known().items() if style in ("half", "interleaved"))
            )
        style, facts = _known()[self.kind]
        if style not in ("half", "interleaved"):
            return style
        if facts.get("alibi") and self._value("alibi") is True:
            return "a bias that falls with the distance is added to the score (ALiBi)"
        return None

    def rotary(self, d_head: int, distance: int, part: str | None = None) -> Rotary | None:
        """How the heads of this layer turn over `distance` positions; None where this layer, or this part, does not.

        `distance` decides where the frequencies depend on how long a sequence is. ConfigError for values that make no
        sense, LayoutError for what is not known how to read.
        """
        if self.other() is not None or part == "nope":
            return None
        style, facts = _known()[self.kind or ""]
        sliding = self._slides(facts)
        if self._stands_still(facts, sliding):
            return None
        if facts.get("half_if_false") and self._value(facts["half_if_false"]) is False:
            style = "half"
        if self.kind and self.kind.startswith("gguf:"):
            return self._of_gguf("half" if style == "half" else "interleaved", d_head)
        parameters = {} if facts.get("fixed") else self._parameters(facts, sliding)
        dims = self._dims(facts, parameters, d_head)
        theta = self._theta(facts, parameters, sliding)
        frequencies, factor = self._scaled(turns.plain(theta, dims), theta, parameters, distance)
        start = d_head - dims if facts.get("last") else 0
        return Rotary("half" if style == "half" else "interleaved", tuple(frequencies), start, factor)

    # ---- kinds of layers -----------------------------------------------------------------------------------

    def _slides(self, facts: Mapping[str, Any]) -> bool | None:
        """Whether this layer has a sliding window; None where the config does not tell and nothing depends on it."""
        types = self._value("layer_types")
        if isinstance(types, list):
            return bool(self._at(types, "layer_types") == "sliding_attention")
        if "period" not in facts:
            return None
        every = self._value(facts["period"])
        every = facts["every"] if every is None else every
        if isinstance(every, bool) or not isinstance(every, int) or every < 1:
            raise self._wrong(facts["period"], every, "a positive whole number")
        return bool((self.layer + (0 if facts.get("first") else 1)) % every)

    def _stands_still(self, facts: Mapping[str, Any], sliding: bool | None) -> bool:
        key = facts.get("without")
        if key == "full_attention":
            return sliding is False
        if key is None:
            return False
        listed = self._value(key)
        if isinstance(listed, list):
            return not self._at(listed, key)
        every = self._value("no_rope_layer_interval")
        every = 4 if every is None else every
        if isinstance(every, bool) or not isinstance(every, int) or every < 1:
            raise self._wrong("no_rope_layer_interval", every, "a positive whole number")
        return (self.layer + 1) % every == 0

    # ---- numbers of a config -------------------------------------------------------------------------------

    def _parameters(self, facts: Mapping[str, Any], sliding: bool | None) -> Mapping[str, Any]:
        """The rotary parameters that apply to this layer: newer configs nest them, by kind of layer or not."""
        found = self._mapping("rope_parameters")
        older = self._mapping("rope_scaling")
        nested = [v for v in found.values() if isinstance(v, Mapping)]
        if nested:
            types = self._value("layer_types")
            kind = self._at(types, "layer_types") if isinstance(types, list) else None
            if kind is None:
                kind = "sliding_attention" if sliding else "full_attention"
            inner = found.get(kind) if isinstance(kind, str) else None
            if not isinstance(inner, Mapping):
                raise ConfigError(f"{self.where}: rope_parameters says nothing about {kind!r:.60} layers")
            return inner
        if facts.get("scaled") == "full" and sliding:
            older = {}
        return {**older, **found}

    def _dims(self, facts: Mapping[str, Any], parameters: Mapping[str, Any], d_head: int) -> int:
        if "dims" in facts:
            dims = self._value(facts["dims"])
            dims = facts.get("dims_default") if dims is None else dims
            if isinstance(dims, bool) or not isinstance(dims, int):
                raise self._wrong(facts["dims"], dims, "how many coordinates turn")
        else:
            given = [parameters.get("partial_rotary_factor"), self._value("partial_rotary_factor")]
            given.append(self._value("rotary_pct"))
            share = next((v for v in given if v is not None), facts.get("partial", 1.0))
            share = self._number("partial_rotary_factor", share, 0.0, 1.0)
            if "partial" not in facts and share != 1.0:
                raise ConfigError(
                    f"{self.where}: partial_rotary_factor is {share}, and {self.kind!r} turns whole heads"
                )
            dims = int(d_head * share)
        if not 2 <= dims <= d_head or dims % 2 or dims > MAX_DIMS:
            raise ConfigError(
                f"{self.where}: {dims} coordinates of a head of {d_head} should turn; expected an even number of them"
            )
        return dims

    def _theta(self, facts: Mapping[str, Any], parameters: Mapping[str, Any], sliding: bool | None) -> float:
        if facts.get("fixed"):
            return 10_000.0
        given = [parameters.get("rope_theta")]
        if "local_theta" in facts:
            keys = (
                ("local_rope_theta", "rope_local_base_freq")
                if sliding
                else ("global_rope_theta", "rope_theta")
            )
            given += [self._value(key) for key in keys]
            default = facts["local_theta" if sliding else "theta"]
        else:
            given += [self._value(key) for key in _THETA]
            default = facts.get("theta", 10_000.0)
        value = next((v for v in given if v is not None), default)
        return self._number("rope_theta", value, 1.0, 1e15)

    def _scaled(
        self, plain: list[float], theta: float, parameters: Mapping[str, Any], distance: int
    ) -> tuple[list[float], float]:
        """(frequencies, factor of cosines and sines) after what the config calls scaling."""
        kind = parameters.get("rope_type", parameters.get("type", "default"))
        if kind in ("su", "longrope") or (kind == "yarn" and self.kind == "phi3"):
            return self._longrope(plain, parameters, distance)
        match kind:
            case "default":
                return plain, 1.0
            case "linear":
                return turns.linear(plain, self._needed(parameters, "factor")), 1.0
            case "dynamic":
                longest = self._number(
                    "max_position_embeddings", self._value("max_position_embeddings"), 1.0, 1e12
                )
                if abs(distance) >= longest:
                    raise LayoutError(
                        f"{self.where}: the dynamic scaling of frequencies depends on the length of the sequence "
                        f"beyond {longest:.0f} positions; choose a distance below that"
                    )
                return plain, 1.0
            case "llama3":
                low, high = (self._needed(parameters, key) for key in ("low_freq_factor", "high_freq_factor"))
                if not low < high:
                    raise ConfigError(
                        f"{self.where}: low_freq_factor is {low} and high_freq_factor {high}; the first must be smaller"
                    )
                factor, original = self._needed(parameters, "factor"), self._original(parameters)
                return turns.llama3(plain, factor, low, high, original), 1.0
            case "yarn":
                return self._yarn(plain, theta, parameters)
        raise LayoutError(
            f"{self.where}: rope_type {kind!r:.60} is not read; known: default, linear, dynamic, llama3, yarn, longrope"
        )

    def _yarn(
        self, plain: list[float], theta: float, parameters: Mapping[str, Any]
    ) -> tuple[list[float], float]:
        original = self._original(parameters)
        if parameters.get("factor") is None:
            longest = self._number(
                "max_position_embeddings", self._value("max_position_embeddings"), 1.0, 1e12
            )
            factor = longest / original
        else:
            factor = self._needed(parameters, "factor")
        optional = {
            key: self._number(key, parameters[key], 1e-9, 1e12) if parameters.get(key) is not None else None
            for key in ("attention_factor", "mscale", "mscale_all_dim", "beta_fast", "beta_slow")
        }
        attention = optional["attention_factor"]
        if attention is None:
            attention = turns.yarn_factor(factor, optional["mscale"], optional["mscale_all_dim"])
        if not theta > 1.0:
            raise self._wrong("rope_theta", theta, "a base above 1, as yarn needs")
        frequencies = turns.yarn(
            plain,
            theta,
            factor,
            original,
            optional["beta_fast"] or 32.0,
            optional["beta_slow"] or 1.0,
            truncate=parameters.get("truncate", True) is not False,
        )
        return frequencies, attention

    def _longrope(
        self, plain: list[float], parameters: Mapping[str, Any], distance: int
    ) -> tuple[list[float], float]:
        """A divisor for every pair; another list for sequences longer than the original context."""
        original = self._original(parameters)
        key = "long_factor" if abs(distance) >= original else "short_factor"
        divisors = parameters.get(key)
        if not isinstance(divisors, list) or len(divisors) != len(plain):
            size = f"{len(divisors)} numbers" if isinstance(divisors, list) else f"{divisors!r:.40}"
            raise ConfigError(
                f"{self.where}: {key} is {size}; expected one number for each of {len(plain)} pairs"
            )
        divisors = [self._number(key, d, 1e-9, 1e12) for d in divisors]
        attention = parameters.get("attention_factor")
        if attention is None:
            if parameters.get("factor") is not None:
                factor = self._needed(parameters, "factor")
            else:
                longest = self._value("max_position_embeddings")
                factor = self._number("max_position_embeddings", longest, 1.0, 1e12) / original
            attention = turns.longrope_factor(factor, original)
        attention = self._number("attention_factor", attention, 1e-9, 1e12)
        return [f / d for f, d in zip(plain, divisors, strict=True)], attention

    def _original(self, parameters: Mapping[str, Any]) -> float:
        """The context length of the first training: beside the parameters in some configs, which then counts."""
        key = "original_max_position_embeddings"
        given = (self._value(key), parameters.get(key), self._value("max_position_embeddings"))
        return self._number(key, next((v for v in given if v is not None), None), 2.0, 1e12)

    def _of_gguf(self, style: Style, d_head: int) -> Rotary:
        arch = (self.kind or "").removeprefix("gguf:")
        if self.unread is not None:
            raise LayoutError(
                f"{self.where}: the frequencies of {self.unread!r} are not read from GGUF files"
            )
        scaling = self._value(f"{arch}.rope.scaling.type")
        if scaling not in (None, "none", "linear"):
            raise LayoutError(
                f"{self.where}: {arch}.rope.scaling.type {scaling!r:.60} is not read; known: none, linear"
            )
        dims = self._value(f"{arch}.rope.dimension_count")
        dims = d_head if dims is None else dims
        if isinstance(dims, bool) or not isinstance(dims, int) or not 2 <= dims <= d_head or dims % 2:
            raise self._wrong(f"{arch}.rope.dimension_count", dims, f"an even number up to {d_head}")
        base = self._value(f"{arch}.rope.freq_base")
        theta = self._number(f"{arch}.rope.freq_base", 10_000.0 if base is None else base, 1.0, 1e15)
        frequencies = turns.plain(theta, dims)
        if scaling == "linear":
            key = f"{arch}.rope.scaling.factor"
            frequencies = turns.linear(frequencies, self._number(key, self._value(key), 1e-9, 1e12))
        return Rotary(style, tuple(frequencies))

    # ---- values --------------------------------------------------------------------------------------------

    def _value(self, key: str) -> Any:
        return self.config.get(key)

    def _mapping(self, key: str) -> Mapping[str, Any]:
        value = self._value(key)
        if value is None or isinstance(value, Mapping):
            return value or {}
        raise self._wrong(key, value, "an object")

    def _at(self, listed: list[Any], key: str) -> Any:
        if self.layer >= len(listed):
            raise ConfigError(
                f"{self.where}: {key} has {len(listed)} entries and there is a layer {self.layer}"
            )
        return listed[self.layer]

    def _needed(self, parameters: Mapping[str, Any], key: str) -> float:
        return self._number(key, parameters.get(key), 1e-9, 1e12)

    def _number(self, key: str, value: Any, least: float, most: float) -> float:
        sound = isinstance(value, (int, float, np.floating, np.integer)) and not isinstance(value, bool)
        if not sound or not math.isfinite(float(value) if abs(value) < 1e300 else math.inf):
            raise self._wrong(key, value, "a number")
        if not least <= value <= most:
            raise self._wrong(key, value, f"a number from {least:g} to {most:g}")
        return float(value)

    def _wrong(self, key: str, value: Any, expected: str) -> ConfigError:
        return ConfigError(f"{self.where}: {key} is {value!r:.60}; expected {expected}")


def divided(rotary: Rotary, factors: Any, name: str) -> Rotary:
    """The rotation with each frequency divided by its entry of the tensor `name`."""
    values = np.asarray(factors, dtype=np.float64).reshape(-1)
    if len(values) != len(rotary.frequencies) or not np.all(np.isfinite(values) & (values > 0)):
        raise ConfigError(
            f"{name!r} holds {len(values)} values; expected a positive divisor for each of "
            f"{len(rotary.frequencies)} frequencies"
        )
    frequencies = tuple(float(f / v) for f, v in zip(rotary.frequencies, values, strict=True))
    return Rotary(rotary.style, frequencies, rotary.start, rotary.factor)


def positions(
    family: str, arch: str, config: Mapping[str, Any], where: str, layer: int, tensors: Mapping[str, Any]
) -> Positions:
    """The positions of one layer of `family`; nothing is read or checked yet."""
    own = config.get("model_type")
    kinds = tuple(dict.fromkeys(k for k in (own, family) if isinstance(k, str)))
    if arch:
        kinds = (f"gguf:{arch}",)
    unread = next((name for name in _LONGROPE if arch and name in tensors), None)
    return Positions(kinds, config, where, layer, _FACTORS if arch and _FACTORS in tensors else None, unread)


def qk_norm_kind(kinds: tuple[str, ...]) -> str | None:
    """What kind the norms on queries and keys of a type are; None where nobody has said."""
    known = _qk_norms()
    return next((known[k] for k in kinds if k in known), None)


@cache
def _data() -> Mapping[str, Any]:
    text = (resources.files("qkform.layouts") / "positions.toml").read_text(encoding="utf-8")
    return tomllib.loads(text)


@cache
def _known() -> Mapping[str, tuple[str, Mapping[str, Any]]]:
    """type -> (style, facts), or (reason, {}) for types without a rotation."""
    data = _data()
    found: dict[str, tuple[str, Mapping[str, Any]]] = {}
    for style in ("half", "interleaved"):
        found |= {name: (style, facts) for name, facts in data[style].items()}
    for reason, names in data["other"].items():
        found |= dict.fromkeys(names, (reason, {}))
    return found


@cache
def _qk_norms() -> Mapping[str, str]:
    return {name: kind for kind, names in _data()["qk_norm"].items() for name in names}
