"""Head counts and sizes from a config, held against the shapes of the weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from qkform.errors import ConfigError
from qkform.layouts.order import Sizes, outputs, parsed
from qkform.layouts.rules import Rule


@dataclass(frozen=True)
class Overrides:
    """What a person says about the heads; it outranks the config."""

    heads: int | None = None
    kv_heads: int | None = None
    head_dim: int | None = None

    def __post_init__(self) -> None:
        given = {"--heads": self.heads, "--kv-heads": self.kv_heads, "--head-dim": self.head_dim}
        for flag, value in given.items():
            if value is not None and value < 1:
                raise ConfigError(f"{flag} is {value}; it must be at least 1")


@dataclass(frozen=True)
class Geometry:
    n_heads: int
    n_kv_heads: int
    d_head: int


class Scope:
    """The part of a config that one rule reads, with the words to point at it in an error."""

    def __init__(self, config: Mapping[str, Any] | None, rule: Rule, where: str, arch: str = "") -> None:
        self.where, self._arch = where, arch
        self._defaults: Mapping[str, int] = rule.defaults if config else {}
        self.config: Mapping[str, Any] = config or {}
        nested = self.config.get(rule.config) if rule.config else None
        if nested is not None:
            if not isinstance(nested, Mapping):
                raise ConfigError(f"{where}: {rule.config} is a {type(nested).__name__}, not an object")
            self.config, self.where = nested, f"{where}, {rule.config}"

    def flag(self, key: str) -> bool | None:
        """A boolean config value, None where it is absent."""
        value = self.config.get(key.replace("{arch}", self._arch)) if key else None
        if value is None or isinstance(value, bool):
            return value
        shown = key.replace("{arch}", self._arch)
        raise ConfigError(f"{self.where}: {shown} is {_shown(value)}; expected true or false")

    def pruned(self, layer: int) -> int:
        """How many heads of a layer were cut out, as `pruned_heads` records them."""
        pruned = self.config.get("pruned_heads")
        heads = pruned.get(str(layer)) if isinstance(pruned, Mapping) else None
        return len(heads) if isinstance(heads, list) else 0

    def names(self, keys: tuple[str, ...]) -> str:
        return ", ".join(key.replace("{arch}", self._arch) for key in keys)

    def count(self, keys: tuple[str, ...], layer: int) -> tuple[str, int] | None:
        """The first of `keys` that is present, as (key, positive int); a list holds one value per layer."""
        for key in keys:
            if key.startswith("="):
                return "the layout", int(key[1:])
            key = key.replace("{arch}", self._arch)
            value = self.config.get(key, self._defaults.get(key))
            if isinstance(value, (list, tuple)):
                if not 0 <= layer < len(value):
                    raise ConfigError(
                        f"{self.where}: {key} has {len(value)} entries and there is a layer {layer}"
                    )
                value = value[layer]
            if value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int) or not 0 < value < 2**31:
                raise ConfigError(f"{self.where}: {key} is {_shown(value)}; expected a positive whole number")
            return key, value
        return None


def geometry(
    rule: Rule,
    scope: Scope,
    overrides: Overrides,
    layer: int,
    q: tuple[str, int, int],  # tensor name, outputs, inputs
    k: tuple[str, int, int],
) -> Geometry:
    """Heads, kv heads and head size of one layer; ConfigError where config, flags and shapes disagree."""
    q_name, q_out, q_in = q
    k_name, k_out, _ = k
    heads = _asked(overrides.heads, "--heads") or scope.count(rule.heads, layer)
    if heads is None:
        raise ConfigError(
            f"{scope.where} does not say how many heads there are (looked for {scope.names(rule.heads)}); "
            "pass --heads"
        )
    kv_heads = _asked(overrides.kv_heads, "--kv-heads") or scope.count(rule.kv_heads, layer) or heads
    head_dim = _asked(overrides.head_dim, "--head-dim") or scope.count(rule.head_dim, layer)
    d_model = scope.count(rule.d_model, layer)
    if d_model is not None and d_model[1] != q_in:
        raise ConfigError(f"{scope.where}: {d_model[0]} is {d_model[1]}, and {q_name!r} takes {q_in} inputs")
    n, g = heads[1], kv_heads[1]
    cut = scope.pruned(layer)
    if cut and n == g and overrides.heads is None:
        head_dim = head_dim or ("the width", q_in // n)
        n = g = n - cut
    if n < 1 or n % g:
        raise ConfigError(
            f"{scope.where}: {heads[0]} is {n} and {kv_heads[0]} is {g}: "
            "query heads cannot share key heads evenly"
        )
    parts, words = _heads_in(rule.order if rule.fused else rule.q_order, n, g)
    d_head = head_dim[1] if head_dim else q_out // parts
    if d_head < 1 or q_out != parts * d_head:
        size = f" of {head_dim[0]} {d_head}" if head_dim else ""
        raise ConfigError(
            f"{scope.where}: {heads[0]} is {n}, and {q_name!r} has {q_out} outputs, "
            f"which {words}{size} do not make"
        )
    if not head_dim and n * d_head != q_in:
        if rule.fused and rule.transposed and q_in == 3 * q_out:
            raise ConfigError(
                f"{scope.where}: {q_name!r} is ({q_in}, {q_out}), and this layout stores ({q_out}, {q_in}): "
                "it looks transposed, as other code bases save it; save it in the family's own way"
            )
        if rule.fused or (rule.d_model and overrides.heads is None):
            raise ConfigError(
                f"{scope.where}: {heads[0]} is {n}, and {q_name!r} maps {q_in} inputs to {n} heads of {d_head}; "
                "if the heads really are that wide, pass --head-dim"
            )
    k_parts = _heads_in(rule.kv_order, n, g)[0] if rule.kv_fused else g
    if not rule.fused and k_out != k_parts * d_head:
        raise ConfigError(
            f"{scope.where}: {kv_heads[0]} is {g}, and {k_name!r} has {k_out} outputs, "
            f"which {g} key heads of {d_head} do not make"
        )
    return Geometry(n, g, d_head)


def _heads_in(order: str, n: int, g: int) -> tuple[int, str]:
    """How many heads a tensor of this order has rows for, and the same in words; one projection for ""."""
    if not order:
        return n, f"{n} heads"
    items = parsed(order)[1]
    words = ", ".join(f"{g if item in 'kv' else n} {_WORDS.get(item, item)} heads" for item in items)
    return outputs(order, Sizes(n, g, 1)), f"{words} ({order})"


_WORDS = {"q": "query", "k": "key", "v": "value"}


def _asked(value: int | None, flag: str) -> tuple[str, int] | None:
    return None if value is None else (flag, value)


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) < 60 else text[:57] + "..."
