"""What a config leaves out: the defaults of its class, where the file does not say.

Sub-configs are saved without what equals the defaults of their class, and often by hand with less. A default counts
only where the config has nothing of its kind: a head count under another name outranks it.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from functools import cache
from importlib import resources
from typing import Any


@cache
def known() -> tuple[Mapping[str, Mapping[str, int]], Mapping[str, Mapping[str, str]]]:
    """(values by model type, types of the sub-configs by model type)."""
    text = (resources.files("qkform.layouts") / "defaults.toml").read_text(encoding="utf-8")
    data = tomllib.loads(text)
    return data["values"], data["parts"]


def completed(
    config: Mapping[str, Any], model_type: str, kinds: Sequence[Sequence[str]]
) -> Mapping[str, Any]:
    """A config with the defaults of its class, for each of the `kinds` of keys that it has none of."""
    defaults = known()[0].get(model_type, {})
    if not defaults:
        return config
    found = dict(config)
    grouped = {key for kind in kinds for key in kind}
    for keys in (*kinds, *((key,) for key in defaults if key not in grouped)):
        if not any(config.get(key) is not None for key in keys):
            found |= {key: defaults[key] for key in keys if key in defaults}
    return found


def part_types(model_type: str) -> Mapping[str, str]:
    """The sub-configs of a model type and their own types."""
    return known()[1].get(model_type, {})
