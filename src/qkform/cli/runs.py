"""`qkform runs`: the records of training runs on the screen, as a page, charts or rows. docs/runs.md is its page."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from qkform import targets
from qkform.cli.flags import Shown
from qkform.cli.output import fail, print_table, say, write

if TYPE_CHECKING:
    from qkform.flows import FlowTable
    from qkform.report.runset import RunSet

RATIOS = (1 / 16, 1 / 4, 1.0, 4.0, 16.0)  # of the one-layer model, where no run says its own
LOSS = 0.1  # of the one-layer model, at which its training ends


def runs(
    *folders: str,
    shown: Shown = Shown(),
    every_step: Annotated[bool, Parameter(negative="")] = False,
) -> int:
    """What training did to the form: the records of one or more runs, finished or still going on.

    Parameters
    ----------
    folders
        The folder of a run, its record.jsonl, or a folder of such folders.
    every_step
        Rows of every tracked step, not of the first and the last alone.
    """
    from qkform.report.runset import RunSet

    if not folders:
        return fail("name the folder of a run, or its record.jsonl, for example: qkform runs runs/a")
    targets.check(folders, shown.out, shown.html, shown.plots)
    found = RunSet.read(folders, every_step=every_step, on_error="record")
    if found.runs:
        if shown.html is not None or shown.plots is not None:
            found = _with_model(found, shown.quiet)
        write(found, shown.out, shown.html, shown.plots, shown.quiet)
    for error in found.errors:
        say(f"error: {error.message}")
    if found.runs or shown.format != "human":
        print_table(found, shown.format)
    return 2 if found.errors else 0


def _with_model(found: RunSet, quiet: bool) -> RunSet:
    """The runs with the one-layer model at their ratios of learning rates; without it where scipy is missing."""
    from dataclasses import replace

    flow = one_layer(ratios_of(found))
    if flow is None and not quiet:
        say('note: no one-layer model beside the runs; it comes with: pip install "qkform[theory]"')
    return replace(found, flow=flow)


def ratios_of(found: RunSet) -> Sequence[float]:
    """The ratios of learning rates that the experiments of the runs name, and 1; the default ones where none does."""
    from math import isfinite

    named = [run.experiment.get("qk_lr_ratio") for run in found.runs]
    known = {float(r) for r in named if isinstance(r, (int, float)) and not isinstance(r, bool)}
    ratios = {1.0, *(ratio for ratio in known if isfinite(ratio) and ratio > 0)}
    return sorted(ratios) if len(ratios) > 1 else RATIOS


def one_layer(ratios: Sequence[float]) -> FlowTable | None:
    """Both circuits factorized, as W_Q W_K and W_O W_V of a transformer are; None without the extra `theory`."""
    from qkform.errors import DynamicsError

    try:
        from qkform.dynamics.one_layer import Flow
    except ImportError:
        return None
    try:
        flow = Flow(attention="factorized", output="factorized")
        return flow.table(ratios[:8], LOSS, simulated=False)
    except DynamicsError:  # a ratio so extreme that the loss is out of reach
        return None
