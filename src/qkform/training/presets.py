"""The presets of `presets.toml`, read once: values of fields, and the model's sizes."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from typing import Any


@dataclass(frozen=True)
class Preset:
    """Values of fields of an experiment, model type per objective, and overrides of its config."""

    values: Mapping[str, Any]
    models: Mapping[str, str]
    size: Mapping[str, Any]
    config: Mapping[str, Mapping[str, Any]]


def _read() -> dict[str, Preset]:
    text = resources.files("qkform.training").joinpath("presets.toml").read_text(encoding="utf-8")
    tables = tomllib.loads(text)
    made = {}
    for name, table in tables.items():
        whole = {**tables.get(table.get("like", name), {}), **table}
        apart = ("models", "size", "config", "like")
        made[name] = Preset(
            {key: value for key, value in whole.items() if key not in apart},
            whole["models"],
            whole["size"],
            whole.get("config", {}),
        )
    return made


PRESETS: Mapping[str, Preset] = _read()
