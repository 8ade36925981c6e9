"""The command line: parses, calls, prints. Results go to stdout, everything else to stderr.

Exit codes: 0; 2 for input that cannot be used (one message on stderr); 1 for a fault of ours; 130 after Ctrl-C.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import App, CycloptsError, Parameter

import qkform
from qkform import targets
from qkform.cli.compare import compare
from qkform.cli.demo import demo, samples
from qkform.cli.flags import FORM, HUB, SCORES, Reading, Shown
from qkform.cli.output import fail, plain, print_table, say, stand_in_streams, write
from qkform.cli.runs import runs
from qkform.cli.scanning import fetch_sample, scan_all, scan_progress
from qkform.cli.sweep import sweep
from qkform.cli.theory import theory
from qkform.cli.train import train
from qkform.errors import ConfigError, QKFormError

if TYPE_CHECKING:
    from qkform.differences import DiffTable
    from qkform.records import Row, ScoreTable

app = App(
    name="qkform",
    help="Measure the query-key form W_qk = W_Q W_K^T of self-attention: how symmetric, how directional.",
    version=qkform.__version__,
    version_flags=["--version"],
    suppress_keyboard_interrupt=False,  # `main` says it
)
app.command(theory)
app.command(train)
app.command(sweep)
app.command(compare)
app.command(demo)
app.command(samples)
app.command(runs)


@app.command
def scan(
    *sources: str,
    shown: Shown = Shown(),
    reading: Reading = Reading(),
    signature: Annotated[Literal["auto", "all", "none"], Parameter(group=SCORES)] = "auto",
    offset: Annotated[str | None, Parameter(group=FORM, allow_leading_hyphen=True)] = None,
    revision: Annotated[str | None, Parameter(group=HUB)] = None,
) -> int:
    """Score every layer and head of one or more checkpoints.

    Reads only the query and key weights, one layer at a time; no model is built and torch is not needed.

    Parameters
    ----------
    sources
        A file (safetensors, PyTorch, GGUF, ONNX, npz), a folder that holds a model or an adapter,
        a hub id (org/name), or sample:NAME (see `qkform samples`).
    signature
        Count attracting and repelling directions: of heads and of layers up to 2048 of them (auto),
        of all, or of none.
    offset
        Rotary models: score W_Q R(N) W_K^T, of a query N positions after its key. Several, as 0,1,2,4, are
        scored one by one; every layer is read once.
    revision
        Branch, tag or commit; several, separated by commas, are scanned one after the other.
    """
    from qkform.options import Options

    if not sources:
        return fail("name at least one source, for example: qkform scan sample:minilm")
    options = Options(
        **asdict(reading),
        signature=signature,
        revision=[one.strip() for one in (revision or "").split(",") if one.strip()],
        offset=_distances(offset),
    )
    targets.check(sources, shown.out, shown.html, shown.plots)
    table, faults = scan_all(sources, options, quiet=shown.quiet)
    if table.models:  # files first: a reader that closes our stdout does not cost them
        write(table, shown.out, shown.html, shown.plots, shown.quiet)
    _warn(table)
    for error in table.errors:
        say(f"error: {error.message}")
    print_table(table, shown.format)
    return 1 if faults else 2 if table.errors else 0


@app.command
def diff(
    a: str,
    b: str,
    /,
    *,
    shown: Shown = Shown(),
    reading: Reading = Reading(),
    offset: Annotated[int | None, Parameter(group=FORM, allow_leading_hyphen=True)] = None,
    revision_a: Annotated[str | None, Parameter(group=HUB)] = None,
    revision_b: Annotated[str | None, Parameter(group=HUB)] = None,
) -> int:
    """How every layer and head changed from one checkpoint to another of the same architecture.

    Fine-tuned against pretrained, quantised against full. The band says where the change of symmetry would lie had
    noise on W_Q and W_K turned the form by the same angle.

    Parameters
    ----------
    a
        The checkpoint to compare with; any source that `qkform scan` reads, hf://org/name@revision too.
    b
        The checkpoint that changed.
    offset
        Rotary models: compare W_Q R(N) W_K^T, of a query N positions after its key.
    revision_a
        Branch, tag or commit of A.
    revision_b
        Branch, tag or commit of B.
    """
    from qkform.differ import diff as compared

    targets.check((a, b), shown.out, shown.html, shown.plots)
    for source in (a, b):
        fetch_sample(source, shown.quiet)
    with scan_progress(shown.quiet) as progress:
        table = compared(
            a,
            b,
            progress=progress,
            **asdict(reading),
            revision_a=revision_a,
            revision_b=revision_b,
            offset=offset,
        )
    write(table, shown.out, shown.html, shown.plots, shown.quiet)
    _warn_diff(table)
    print_table(table, shown.format)
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit code."""
    stand_in_streams()
    try:
        code = app(arguments, exit_on_error=False, print_error=False, result_action="return_value")
        return code if isinstance(code, int) else 0
    except CycloptsError as error:
        return fail(f"{plain(str(error))} (see qkform --help)")
    except QKFormError as error:
        return fail(str(error))
    except KeyboardInterrupt:
        say("interrupted")
        return 130
    except MemoryError:
        from qkform.scanner import OUT_OF_MEMORY

        return fail(OUT_OF_MEMORY)


def _distances(text: str | None) -> tuple[int, ...] | None:
    """0,1,2,4 as numbers."""
    if text is None:
        return None
    parts = [part.strip() for part in text.split(",")]
    if not all(re.fullmatch(r"[+-]?[0-9]{1,12}", part) for part in parts):
        raise ConfigError(
            f"--offset {text[:60]!r}: expected whole numbers of positions, as in --offset 0,1,2,4"
        )
    return tuple(int(part) for part in parts)


def _warn(table: ScoreTable) -> None:
    """One line per model and cause for heads without scores that should have some."""
    for model in table.models:
        _warn_rows(
            model.source, (r for r in model.heads if r["effective_rank"] is None or r["bias_share"] is None)
        )
    _warn_steps(table)


def _warn_steps(table: ScoreTable) -> None:
    """A line for a step that a run has more than once: both are shown, and may not have been meant."""
    if sum(model.step is not None for model in table.models) < 2:
        return
    from qkform.report.series import entries

    for entry in entries(table):
        at: dict[int | None, list[str]] = {}
        for model in entry.models if entry.kind == "step" else ():
            at.setdefault(model.step, []).append(model.source)
        for step, names in at.items():
            if len(names) > 1:
                more = ", ..." if len(names) > 5 else ""
                say(
                    f"warning: step {step} is there {len(names)} times in one run: {', '.join(names[:5])}{more}"
                )


def _warn_diff(table: DiffTable) -> None:
    """The same for the heads of a difference, and a line for the layers that stand on one side alone."""
    name = f"{table.source_a} -> {table.source_b}"
    _warn_rows(name, (row for row in table.heads if row["cosine"] is None))
    for alone, side in ((table.only_in_a, "first"), (table.only_in_b, "second")):
        modules = list(dict.fromkeys(alone))  # a layer whose score has several parts is listed for each
        if modules:
            layers = "1 layer is" if len(modules) == 1 else f"{len(modules)} layers are"
            more = f" and {len(modules) - 1} more" if len(modules) > 1 else ""
            say(f"warning: {name}: {layers} in the {side} alone and not compared: {modules[0]}{more}")


def _warn_rows(name: str, rows: Iterable[Row]) -> None:
    broken: dict[str, list[str]] = {}
    for row in rows:
        broken.setdefault(row["reason"], []).append(f"{row['module']} head {row['head']}")
    for reason, where in broken.items():
        more = f" and {len(where) - 1} more" if len(where) > 1 else ""
        say(f"warning: {name}: no scores for {where[0]}{more}: {reason}")
