"""The same sweep on a Ray cluster: every run a task that starts its process on some node, and is tried again if the
node goes away. The folder of the sweep is one that all nodes see.
"""

from __future__ import annotations

import importlib
import os
import re
import socket
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from qkform.errors import MissingExtra, TrainingError
from qkform.training import job as jobs
from qkform.training.grid import Grid
from qkform.training.job import Job, Outcome, Say
from qkform.training.sweeping import COMMAND, check, held, planned, stopped, surroundings, told

_LOOK_SECONDS = 0.5
_PATIENCE_SECONDS = 10


def ray_sweep(
    grid: Grid,
    out: str | os.PathLike[str],
    *,
    address: str = "auto",
    workers: int = 1,
    threads: int | None = None,
    gpus: float = 0,
    retries: int = 1,
    command: Sequence[str] | None = None,
    environment: Mapping[str, str] | None = None,
    say: Say = lambda _: None,
) -> list[Outcome]:
    """Train every run of `grid` as a task of the cluster at `address`, `workers` at a time; how each ended.

    address   of a cluster; "auto" is the one that this machine belongs to, "local" one that lives as long as this call
    threads   of a run, and the CPUs that it asks the cluster for; CPUs divided by workers unless given
    gpus      that a run asks for
    retries   how often a run that fails is tried again, and how often a task whose node or worker is lost
    The others are those of `sweep`, and so is what is on disk: a sweep that began on one machine
    goes on on a cluster. `out` must be the same folder on every node, with locks that hold between them.

    Raises MissingExtra without Ray, TrainingError where there is no cluster; else what `sweep` raises.
    """
    check(workers=workers, threads=threads, retries=retries, gpus=gpus)
    ray = _ray()
    found = planned(grid, out)
    own = not ray.is_initialized()
    if own:
        _connect(ray, address)
    try:
        share = threads or max(1, int(ray.cluster_resources().get("CPU", 1)) // workers)
        task = ray.remote(num_cpus=share, num_gpus=gpus, max_retries=retries)(_task)
        more = dict(environment) if environment is not None else None
        with held(Path(out)), stopped():
            return _all_of(ray, task, found, (command and tuple(command), share, retries, more), workers, say)
    finally:
        if own:
            ray.shutdown()


def _all_of(
    ray: Any, task: Any, found: Sequence[Job], arguments: tuple[Any, ...], workers: int, say: Say
) -> list[Outcome]:
    waiting = list(reversed(found))
    going: dict[Any, Job] = {}
    ended: dict[str, Outcome] = {}
    try:
        while waiting or going:
            while waiting and len(going) < workers:
                job = waiting.pop()
                going[task.remote(job, *arguments)] = job
                say(f"{job.name}: handed to the cluster")
            done, _ = ray.wait(list(going), timeout=_LOOK_SECONDS)
            for reference in done:
                job = going.pop(reference)
                ended[job.name] = told(_outcome(ray, reference, job), say)
    except BaseException:
        for reference in going:
            ray.cancel(reference)  # a KeyboardInterrupt in the task, which ends its process as Ctrl-C does
        ray.wait(list(going), num_returns=len(going), timeout=jobs.GRACE_SECONDS) if going else None
        raise
    return [ended[job.name] for job in found]


def _task(
    job: Job, command: Sequence[str] | None, threads: int, retries: int, environment: Mapping[str, str] | None
) -> Outcome:
    """What a worker does: one run, in the environment of its node."""
    return jobs.execute(
        job, command or COMMAND, environment=surroundings(environment, threads, None), retries=retries
    )


def _outcome(ray: Any, reference: Any, job: Job) -> Outcome:
    try:
        found: Outcome = ray.get(reference)
        return found
    except ray.exceptions.RayError as error:  # the worker was lost once too often, or the task raised
        words = str(error).strip().splitlines() or [type(error).__name__]
        return replace(jobs.outcome(job, "failed"), message=f"lost on the cluster: {words[-1][:300]}")


def _connect(ray: Any, address: str) -> None:
    try:
        if match := re.fullmatch(
            r"([^/:]+):(\d+)", address
        ):  # ray itself waits minutes for one that is not there
            socket.create_connection((match[1], int(match[2])), _PATIENCE_SECONDS).close()
        ray.init(
            address=None if address == "local" else address,
            include_dashboard=False if address == "local" else None,
            log_to_driver=False,
            configure_logging=False,
        )
    except (ConnectionError, ValueError, RuntimeError, OSError) as error:
        raise TrainingError(f"--ray {address}: no cluster there: {error}") from None


def _ray() -> Any:
    try:
        return importlib.import_module("ray")
    except ModuleNotFoundError:
        raise MissingExtra('ray is not installed; it comes with: pip install "qkform[ray]"') from None
