"""Any dataset that the `datasets` library streams: an id on the hub, or a local folder that it knows how to read.

Its identity is the files it is made of: those on the hub by an address that carries the commit, local ones by content.
What a name on the hub stood for is remembered, so that tokens made of it are found again where no hub can be reached.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qkform.errors import DataError
from qkform.training.data.digests import digest
from qkform.training.data.documents import Faults, OnError, Piece, Skipped
from qkform.training.data.extras import imported
from qkform.training.data.files import checked_text


@dataclass(frozen=True)
class Streamed:
    """One split of a dataset, a document a row."""

    dataset: str
    field: str
    split: str
    config: str | None
    revision: str | None
    on_error: OnError
    cache: Path

    @property
    def name(self) -> str:
        return self.dataset

    def identity(self) -> dict[str, Any]:
        place = self._remembered()
        try:
            found = self._found()
        except DataError:
            with contextlib.suppress(OSError, ValueError):
                if not Path(self.dataset).exists():
                    return dict(json.loads(place.read_bytes()))
            raise
        with contextlib.suppress(OSError):
            place.parent.mkdir(parents=True, exist_ok=True)
            aside = place.with_name(f"{place.name}.{os.getpid()}")
            aside.write_text(json.dumps(found), encoding="utf-8")
            aside.replace(place)
        return found

    def _remembered(self) -> Path:
        asked = [self.dataset, self.config, self.revision, self.split, self.field, self.on_error]
        return self.cache / "datasets" / hashlib.sha256(json.dumps(asked).encode()).hexdigest()

    def _found(self) -> dict[str, Any]:
        builder = self._asked("load_dataset_builder")
        files = getattr(builder.config, "data_files", None) or {}
        if files and self.split not in files:
            known = ", ".join(map(str, files))
            raise DataError(f"{self.dataset}: no split {self.split!r}; it has {known}; name one with split=")
        return {
            "builder": builder.name,
            "config": builder.config.name,
            "files": [self._file(str(file)) for file in files.get(self.split, [])] or builder.hash,
            "split": self.split,
            "field": self.field,
            "on_error": self.on_error,
        }

    def _file(self, address: str) -> str:
        return address if "://" in address else digest(Path(address), self.cache)

    def pieces(self, skipped: Skipped) -> Iterator[Piece]:
        faults = Faults(self.on_error, skipped)
        rows = iter(self._asked("load_dataset", split=self.split, streaming=True))
        number = 0
        while True:
            number += 1
            where = f"{self.dataset}, {self.split}, row {number}"
            try:
                row = next(rows)
            except StopIteration:
                return
            except (
                Exception
            ) as error:  # of the reader of whatever format, or of the network: the rest is not to be had
                raise DataError(f"{where}: {_said(error)}; the rows after it cannot be read") from None
            yield from checked_text(row, self.field, where, faults)

    def _asked(self, function: str, **arguments: Any) -> Any:
        call = getattr(imported("datasets", f"{self.dataset}: a dataset by its id"), function)
        try:
            return call(self.dataset, name=self.config, revision=self.revision, **arguments)
        except (
            Exception
        ) as error:  # the library raises what its layers raise, from FileNotFoundError to pyarrow's
            raise DataError(
                f"{self.dataset}: {_said(error)}; a file or folder is named by its path, a dataset by its id on the hub"
            ) from None


def _said(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:400]
