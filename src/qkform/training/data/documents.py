"""What a corpus is: documents that come lazily, in pieces, and what happens to those that cannot be read."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from qkform.errors import DataError

OnError = Literal["raise", "skip"]
PLACES = 5  # of what was left out, kept to be shown


@dataclass(frozen=True)
class Piece:
    """A stretch of one document. A document is a piece that begins it and those that follow until the next begins."""

    text: str
    where: str  # "notes.txt:17", the place of its first line or row
    begins: bool = True


@dataclass
class Skipped:
    """What a reading left out: how much of it by reason, and the first places."""

    counts: Counter[str] = field(default_factory=Counter)
    places: list[str] = field(default_factory=list)

    def add(self, where: str, reason: str) -> None:
        self.counts[reason] += 1
        if len(self.places) < PLACES:
            self.places.append(f"{where}: {reason}")

    def __str__(self) -> str:
        """ "3 left out: not UTF-8 (2), an empty text (1); the first: a.txt:3: not UTF-8"; empty where none was."""
        if not self.counts:
            return ""
        reasons = ", ".join(f"{reason} ({count:,})" for reason, count in self.counts.most_common())
        return f"{self.counts.total():,} left out: {reasons}; the first: {self.places[0]}"


class Corpus(Protocol):
    """A source of documents."""

    @property
    def name(self) -> str:
        """As a person calls it."""
        ...

    def identity(self) -> dict[str, Any]:
        """What decides which text comes, as JSON: equal identities give equal pieces, whatever the files are called."""
        ...

    def pieces(self, skipped: Skipped) -> Iterator[Piece]:
        """The text in a fixed order, read as it is asked for. What is left out is counted in `skipped`."""
        ...


@dataclass(frozen=True)
class Faults:
    """Raises at what cannot be read, or counts it: the two answers to `on_error`."""

    on_error: OnError
    skipped: Skipped

    def __call__(self, where: str, reason: str, detail: str = "", remedy: str = "") -> None:
        """`reason` is the short fact under which it is counted; `detail` and `remedy` are for the error."""
        if self.on_error == "skip":
            self.skipped.add(where, reason)
            return
        found = f"{reason} ({detail})" if detail else reason
        remedy = remedy or "mend it, or leave such text out and count it: on_error='skip', --on-error skip"
        raise DataError(f"{where}: {found}; {remedy}") from None
