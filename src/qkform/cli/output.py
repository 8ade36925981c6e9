"""What the commands print, and where: results on stdout, everything else on stderr, names made plain."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qkform import targets
from qkform.errors import RecordError

if TYPE_CHECKING:
    from qkform.comparisons import CompareTable
    from qkform.differences import DiffTable
    from qkform.flows import FlowTable
    from qkform.records import ScoreTable
    from qkform.report.runset import RunSet

LONGEST = 2500  # characters of one message: names in a hostile file can be millions long


def print_table(table: ScoreTable | DiffTable | FlowTable | CompareTable | RunSet, format: str) -> None:
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # a name that the terminal cannot show is no fault
    if format == "json":
        put(table.to_json() + "\n")
    elif format == "csv":
        text = table.to_csv()
        put(text if not sys.stdout.isatty() else plain(text, keep="\n"))
    else:
        from qkform.report.screens import renderables

        print_lines(lambda width, unicode: renderables(table, width=width, unicode=unicode))


def print_lines(drawn: Callable[[int, bool], Iterable[Any]]) -> None:
    """What rich prints of the items that `drawn` makes for a width in columns, and with or without Unicode."""
    from rich.console import Console

    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
    file = io.StringIO()
    width = max(Console().width, 20)
    console = Console(
        file=file,
        width=width,
        highlight=False,
        emoji=False,
        markup=False,
        force_terminal=sys.stdout.isatty() and "NO_COLOR" not in os.environ,
    )
    unicode = (sys.stdout.encoding or "").lower().replace("-", "") == "utf8"
    for item in drawn(width, unicode):
        console.print(item)
    put(file.getvalue())


def write(
    table: ScoreTable | DiffTable | FlowTable | CompareTable | RunSet,
    out: Sequence[Path],
    html: Path | None,
    plots: Path | None,
    quiet: bool,
) -> None:
    for note in targets.write(table, out, html, plots):
        if not quiet:
            say(note)


def put(text: str) -> None:
    """Text on stdout; a reader that has gone, `head` for example, has what it wanted."""
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except BrokenPipeError:
        _nowhere("stdout")
    except OSError as error:
        _nowhere("stdout")
        raise RecordError(f"cannot write to stdout: {error.strerror or error}") from None


def say(text: str) -> None:
    """One line on stderr, of bounded length."""
    text = plain(text)
    say_lines(text if len(text) <= LONGEST else f"{text[:LONGEST]}... ({len(text):,} characters)")


def say_lines(text: str) -> None:
    with suppress(OSError, ValueError):  # a stderr that is closed or full has nobody to read it
        print(text, file=sys.stderr, flush=True)


def fail(message: str) -> int:
    say(f"error: {message}")
    return 2


def plain(text: str, keep: str = "") -> str:
    """Text on one line; control characters, which could come from a file's names, are shown and not obeyed."""
    return "".join(
        c if c.isprintable() or c in keep else " " if c in "\n\t" else ascii(c)[1:-1] for c in text
    )


def stand_in_streams() -> None:
    """A stream that was closed for us is nowhere, not a fault."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            _nowhere(name)


def _nowhere(name: str) -> None:
    """Put a stand-in for a standard stream that is gone; the interpreter flushes it at exit."""
    setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115
