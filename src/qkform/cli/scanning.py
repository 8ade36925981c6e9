"""Scanning many sources for a command: samples are fetched, a bar shows progress, what failed is told."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from qkform.cli.output import plain, say, say_lines
from qkform.errors import QKFormError

if TYPE_CHECKING:
    from qkform.options import Options
    from qkform.records import ScoreTable
    from qkform.scanner import Progress


def scan_all(sources: Sequence[str], options: Options, *, quiet: bool) -> tuple[ScoreTable, int]:
    """Every source that can be scanned, a message for each that cannot, and how many of these are faults of ours."""
    from qkform.records import ScoreTable, SourceFault, merged
    from qkform.scanner import fault
    from qkform.scanner import scan as scan_one

    tables, faults = [], 0
    with scan_progress(quiet) as progress:
        for source in sources:
            try:
                fetch_sample(source, quiet)
                tables.append(scan_one(source, progress=progress, on_error="record", **asdict(options)))
            except QKFormError as error:  # of the sample
                tables.append(ScoreTable([], [fault(source, error)]))
            except Exception as error:
                faults += 1
                say_lines(traceback.format_exc())
                message = (
                    f"{source[:200]}: internal error, please report it with the traceback above: {error!r}"
                )
                tables.append(ScoreTable([], [SourceFault(source, message)]))
    table = merged(tables)
    errors = [SourceFault(error.source, plain(error.message)) for error in table.errors]
    return ScoreTable(table.models, errors), faults


def fetch_sample(source: str, quiet: bool) -> None:
    """Put a sample into the cache, with a message while it is fetched."""
    if source.startswith("sample:"):
        from qkform import samples as store

        store.fetch(source.removeprefix("sample:"), on_progress=None if quiet else say)


@contextmanager
def scan_progress(quiet: bool) -> Iterator[Progress | None]:
    """A bar on stderr while a person watches."""
    if quiet or not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.markup import escape
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as Bars

    columns = [TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()]
    with Bars(*columns, console=Console(stderr=True), transient=True) as bars:
        tasks: dict[str, Any] = {}

        def show(source: str, done: int, total: int) -> None:
            if source not in tasks:
                tasks[source] = bars.add_task(escape(plain(source)), total=total)
            bars.update(tasks[source], completed=done)

        yield show
