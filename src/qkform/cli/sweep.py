"""`qkform sweep`: arms times seeds, each run a process of its own. docs/comparing.md is the page about it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import Group, Parameter

from qkform.cli.flags import Quiet
from qkform.cli.output import print_lines, put, say

if TYPE_CHECKING:
    from qkform.training.job import Outcome

SCHEMA = "qkform.sweep/1"
_cluster = Group("Cluster", sort_key=2)


def sweep(
    grid: Path,
    /,
    *,
    out: Path = Path("runs"),
    workers: int = 1,
    threads: int | None = None,
    devices: str | None = None,
    retries: int = 1,
    list_: Annotated[bool, Parameter(name="--list", negative="")] = False,
    format: Literal["human", "json"] = "human",
    quiet: Quiet = False,
    ray: Annotated[str | None, Parameter(group=_cluster)] = None,
    gpus: Annotated[float, Parameter(group=_cluster)] = 0,
) -> int:
    """Train every arm of a grid with every seed; what is finished does not run again, what was killed goes on.

    Run the same command again after any kill. Ctrl-C ends the runs, each with a checkpoint. `qkform compare OUT` has
    the results.

    Parameters
    ----------
    grid
        A YAML file with `base` (options of all runs), `arms` (names, and what each changes) or `axes` (options and
        their values, every combination an arm), and `seeds`. Options are the flags of `qkform train` by name.
    out
        Where the runs go: OUT/ARM/seed-N, beside it the log of the run.
    workers
        Runs at a time.
    threads
        Threads of a run; unless given, the cores divided by the workers.
    devices
        GPUs, as CUDA_VISIBLE_DEVICES names them: 0,1 gives the first worker 0 and the second 1.
    retries
        How often a run that fails is tried again, from its newest checkpoint.
    list
        Print the runs and where each stands, and start nothing.
    format
        What goes to stdout: a table to read, or one JSON document.
    ray
        Run on the Ray cluster at this address (auto: the one this machine belongs to; local: one of its own). OUT is
        a folder that all nodes see.
    gpus
        GPUs that a run asks the cluster for.
    """
    from qkform.training.grid import Grid
    from qkform.training.on_ray import ray_sweep
    from qkform.training.sweeping import check, listing
    from qkform.training.sweeping import sweep as swept

    check(workers=workers, threads=threads, retries=retries, gpus=gpus)
    asked = Grid.load(grid)
    quietly = (lambda _: None) if quiet else say
    if list_:
        outcomes = listing(asked, out)
    elif ray is not None:
        outcomes = ray_sweep(
            asked,
            out,
            address=ray,
            workers=workers,
            threads=threads,
            gpus=gpus,
            retries=retries,
            say=quietly,
        )
    else:
        names = [name.strip() for name in (devices or "").split(",") if name.strip()]
        outcomes = swept(
            asked,
            out,
            workers=workers,
            threads=threads,
            devices=names,
            retries=retries,
            say=quietly,
        )
    if format == "json":
        document = {"schema": SCHEMA, "out": str(out), "runs": [asdict(one) for one in outcomes]}
        put(json.dumps(document, allow_nan=False) + "\n")
    else:
        _print(outcomes, out)
    failed = [one for one in outcomes if one.state == "failed"]
    for one in failed:
        say(f"error: {one.name} failed: {one.message}")
    return 2 if failed else 0


def _print(outcomes: Sequence[Outcome], out: Path) -> None:
    from qkform.report.terminal import Column, number, one_line, table_of

    def step(one: Outcome) -> str:
        return "" if one.step is None else f"{one.step:,}"

    columns = [
        Column("run", "", lambda one: one_line(one.name, 60), justify="left"),
        Column("state", "", lambda one: one.state, justify="left"),
        Column("step", "", step),
        Column("held-out loss", "", lambda one: "" if one.held_out is None else f"{one.held_out:.3f}"),
        Column("seconds", "", lambda one: "" if one.seconds is None else number(one.seconds)),
        Column("attempts", "", lambda one: str(one.attempts) if one.attempts else ""),
    ]
    print_lines(lambda width, unicode: [table_of(str(out), columns, outcomes, unicode=unicode)])
