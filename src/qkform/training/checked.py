"""Values as the fields of an experiment have them; ExperimentError with the field and what was expected."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any, Literal, get_args, get_origin

from qkform.errors import ExperimentError

DEEPEST = 30  # levels of what a config holds: a file has two more around it
LARGEST_INT = 2**63 - 1  # what an integer of a tensor can be


class Settings(dict[str, Any]):
    """Names and values that stay as they are; unlike a MappingProxyType they can be hashed, copied and pickled."""

    def __hash__(self) -> int:  # type: ignore[override]
        return hash(json.dumps(self, sort_keys=True))

    def __reduce__(self) -> Any:
        return Settings, (dict(self),)

    def _fixed(self, *_: Any, **__: Any) -> Any:
        raise TypeError("an experiment cannot be changed; make another one: experiment.replace(lr=1e-3)")

    __setitem__ = __delitem__ = __ior__ = update = setdefault = pop = popitem = clear = _fixed


def checked(name: str, value: Any, kind: Any, facts: Mapping[str, Any]) -> Any:
    """The value as its field has it; ExperimentError with what was expected."""
    origin, parts = get_origin(kind), get_args(kind)
    if type(None) in parts:
        if value is None:
            return None
        kind = next(part for part in parts if part is not type(None))
        origin, parts = get_origin(kind), get_args(kind)
    if origin is Literal:
        if value not in parts:
            raise ExperimentError(f"{name}: {value!r:.60} is none of {', '.join(parts)}")
        return value
    if origin is tuple:
        items = value if isinstance(value, tuple | list) else (value,)
        return tuple(checked(name, item, parts[0], facts) for item in items)
    if origin is not None and issubclass(origin, Mapping):
        if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
            raise ExperimentError(f"{name}: {shown(value)}; expected names and values")
        return Settings(_copied(name, value))
    if kind in (int, float):
        return _number(name, value, kind, facts)
    if not isinstance(value, kind):
        raise ExperimentError(
            f"{name}: {shown(value)}; expected {'true or false' if kind is bool else 'a text'}"
        )
    if kind is str and not value.strip():
        raise ExperimentError(f"{name}: {value!r:.60} names nothing; leave it out, or say what is meant")
    return value


def _number(name: str, value: Any, kind: type, facts: Mapping[str, Any]) -> Any:
    low, above, most = facts["least"], facts["above"], facts["most"]
    wanted = "a whole number" if kind is int else "a number"
    bounds = [f"from {low}"] * (low is not None) + [f"above {above}"] * (above is not None)
    wanted = " ".join([wanted, *bounds, *([f"to {most}"] * (most is not None))])
    number: Any = value
    if isinstance(value, str):  # YAML takes 3e-4 for a text
        try:
            number = float(value) if kind is float else int(value)
        except ValueError:
            number = None
    fits = not isinstance(number, bool) and isinstance(number, int if kind is int else int | float)
    if fits and isinstance(number, int) and abs(number) > LARGEST_INT:
        raise ExperimentError(f"{name}: {shown(value)}; expected {wanted}, and none beyond {LARGEST_INT}")
    if not fits or not math.isfinite(number):
        raise ExperimentError(f"{name}: {shown(value)}; expected {wanted}")
    if (
        (low is not None and number < low)
        or (above is not None and number <= above)
        or (most is not None and number > most)
    ):
        raise ExperimentError(f"{name}: {value}; expected {wanted}")
    return kind(number)


def plain(value: Any) -> Any:
    """A value as JSON and YAML have it."""
    if isinstance(value, Mapping):
        return {name: plain(one) for name, one in value.items()}
    return [plain(one) for one in value] if isinstance(value, tuple | list) else value


def _copied(where: str, value: Any, level: int = 0) -> Any:
    """A copy as JSON gives it back; ExperimentError names the place of what JSON does not have."""
    if level > DEEPEST:
        raise ExperimentError(f"{where[:60]}...: nested more than {DEEPEST} levels deep")
    if isinstance(value, Mapping):
        names = [_name(where, name) for name in value]
        if len(set(names)) < len(names):
            raise ExperimentError(
                f"{where}: {max(names, key=names.count)} is there as a number and as a text"
            )
        pairs = zip(names, value.values(), strict=True)
        return {name: _copied(f"{where}: {name}", one, level + 1) for name, one in pairs}
    if isinstance(value, tuple | list):
        return [_copied(where, one, level + 1) for one in value]
    if isinstance(value, float) and not math.isfinite(value):
        raise ExperimentError(f"{where}: {value}; expected a finite number")
    if value is None or isinstance(value, bool | float | str):
        return value
    if isinstance(value, int) and abs(value) <= LARGEST_INT:
        return int(value)
    kind = type(value).__name__
    quoted = "; put a date in quotes to have it as a text" if kind in ("date", "datetime") else ""
    raise ExperimentError(
        f"{where}: {shown(value)}, a {kind}; expected plain values, as JSON has them{quoted}"
    )


def _name(where: str, name: Any) -> str:
    if isinstance(name, str) or (isinstance(name, int) and not isinstance(name, bool)):  # as id2label has
        return str(name)
    raise ExperimentError(f"{where}: {shown(name)}; expected a name")


def shown(value: Any) -> str:
    """What was given, in a message: not more than 60 letters of it."""
    try:
        return f"{value!r:.60}"
    except (ValueError, RecursionError):  # whole numbers of thousands of digits
        return f"a {type(value).__name__} that is too long to show"
