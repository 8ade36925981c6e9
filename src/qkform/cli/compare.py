"""`qkform compare`: arms of an experiment, paired by seed. docs/comparing.md is the page about it."""

from __future__ import annotations

from pathlib import Path

from qkform import targets
from qkform.cli.flags import Shown
from qkform.cli.output import fail, print_table, say, write


def compare(
    *paths: Path,
    at_loss: float | None = None,
    baseline: str | None = None,
    window: int = 3,
    shown: Shown = Shown(),
) -> int:
    """Compare trained arms with a baseline, seed by seed: loss, time to loss, symmetry, sharpness, with intervals.

    Runs that differ in their seed alone are one arm. The baseline is the arm with standard attention, the standard
    start and one learning rate for all, unless another is named.

    Parameters
    ----------
    paths
        Run folders, or folders of run folders, as `qkform train` and `qkform sweep` write them.
    at_loss
        Held-out loss, in nats, at which symmetry and sharpness are compared; unless given, the least one that every
        run reaches.
    baseline
        Name of the arm that the others are compared with.
    window
        Tracked steps over which the held-out loss is smoothed, by a running median, before it is said to be reached;
        1 takes it as it is.
    """
    from qkform.training.comparing import compare as compared

    if not paths:
        return fail("name at least one folder of runs, for example: qkform compare runs/")
    targets.check([str(path) for path in paths], shown.out, shown.html, shown.plots)
    table = compared(paths, at_loss=at_loss, baseline=baseline, window=window)
    write(table, shown.out, shown.html, shown.plots, shown.quiet)
    if not shown.quiet and shown.format != "human":
        for note in table.notes:
            say(f"note: {note}")
    print_table(table, shown.format)
    return 0
