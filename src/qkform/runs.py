"""Stand-in until the record of a run is merged."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qkform.errors import RecordError


@dataclass(frozen=True)
class RunRecord:
    """A record."""

    start: dict[str, Any]
    events: list[dict[str, Any]]
    steps: list[dict[str, Any]]

    @classmethod
    def load(cls, path: Any) -> RunRecord:
        path = Path(path)
        path = path / "record.jsonl" if path.is_dir() else path
        lines = path.read_text().split("\n")[:-1]
        found = []
        for i, line in enumerate(lines):
            try:
                found.append(json.loads(line))
            except ValueError:
                raise RecordError(f"{path}:{i + 1}: no JSON") from None
        return cls(found[0], [x for x in found if "event" in x], [x for x in found if "event" not in x])
