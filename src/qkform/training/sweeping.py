"""`sweep`: every run of a grid in a process of its own, on this machine; what is on disk is all that it knows."""

from __future__ import annotations

import math
import os
import queue
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from qkform import disk
from qkform.errors import ExperimentError, TrainingError
from qkform.training import job as jobs
from qkform.training.grid import Grid
from qkform.training.job import Job, Outcome, Say

COMMAND = (sys.executable, "-m", "qkform", "train")  # what follows: EXPERIMENT.yaml --out FOLDER [--resume]
_LOCK = ".sweep.lock"


def check(*, workers: int, threads: int | None, retries: int, gpus: float = 0) -> None:
    """ExperimentError, by name, for a number of which there cannot be so many."""
    asked = {"workers": (workers, 1), "threads": (threads, 1), "retries": (retries, 0), "gpus": (gpus, 0)}
    for name, (value, least) in asked.items():
        if value is not None and not (math.isfinite(value) and value >= least):
            raise ExperimentError(f"--{name} {value}: expected {least} or more")


def planned(grid: Grid, out: str | os.PathLike[str]) -> list[Job]:
    """The runs of a grid and their folders; ExperimentError where one cannot be, or its folder holds another."""
    found = [Job.of(run, Path(out)) for run in grid.runs()]
    for one in found:
        jobs.state(one)
    return found


def listing(grid: Grid, out: str | os.PathLike[str]) -> list[Outcome]:
    """Where every run of a grid stands; nothing is started or written."""
    return [
        jobs.outcome(one, "running" if jobs.is_running(one) else jobs.state(one))
        for one in planned(grid, out)
    ]


def sweep(
    grid: Grid,
    out: str | os.PathLike[str],
    *,
    workers: int = 1,
    threads: int | None = None,
    devices: Sequence[str] = (),
    retries: int = 1,
    command: Sequence[str] | None = None,
    environment: Mapping[str, str] | None = None,
    say: Say = lambda _: None,
) -> list[Outcome]:
    """Train every run of `grid` in OUT/ARM/seed-N, `workers` at a time; how each ended, in the order of the grid.

    threads      of each run; unless given those of OMP_NUM_THREADS, or cores divided by workers (a run that is resumed
                 with others is not exact)
    devices      values of CUDA_VISIBLE_DEVICES, handed to the workers in turn
    retries      how often a run that fails is tried again, from its newest checkpoint
    command      what trains a run, `COMMAND` unless given: it gets EXPERIMENT.yaml --out FOLDER and, where the run has
                 begun, --resume
    environment  of the processes; this one's unless given
    say          called with a line for a person when a run begins, ends or fails, and once a minute on the way

    A run that is finished does not run again; a sweep that was killed goes on where its runs are. Ctrl-C, SIGTERM or a
    closed terminal ends the runs as Ctrl-C does, each with a checkpoint, and raises KeyboardInterrupt; a second one
    ends them at once.

    Raises ExperimentError before anything is started where a run cannot be or its folder holds another experiment, and
    TrainingError where another sweep works in `out`.
    """
    check(workers=workers, threads=threads, retries=retries)
    found = planned(grid, out)
    share = threads or own_threads(environment) or max(1, cores() // workers)
    with held(Path(out)), stopped() as stop, ThreadPoolExecutor(workers) as pool:
        slots: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        for number in range(workers):
            slots.put(devices[number % len(devices)] if devices else None)

        def one(job: Job) -> Outcome:
            device = slots.get()
            try:
                return told(
                    jobs.execute(
                        job,
                        command or COMMAND,
                        environment=surroundings(environment, share, device),
                        retries=retries,
                        stop=lambda: stop.level,
                        say=say,
                    ),
                    say,
                )
            finally:
                slots.put(device)

        return _all_of([pool.submit(one, job) for job in found], stop, say)


class _Stop:
    """How the runs are to end: 0 not at all, 1 with a checkpoint, 2 at once."""

    level = 0


def _all_of(futures: Sequence[Future[Outcome]], stop: _Stop, say: Say) -> list[Outcome]:
    waiting = set(futures)
    try:
        while waiting:
            done, waiting = wait(waiting, timeout=0.2, return_when=FIRST_COMPLETED)
            for future in done:
                future.result()  # a fault of ours ends the sweep
    except BaseException as error:
        stop.level = 1
        if isinstance(error, KeyboardInterrupt):
            say("stopping: every run saves a checkpoint and ends; a second interrupt ends them at once")
        try:
            wait(futures)
        except KeyboardInterrupt:
            stop.level = 2
            wait(futures)
        raise
    return [future.result() for future in futures]


def told(outcome: Outcome, say: Say) -> Outcome:
    """The outcome, said to a person."""
    if outcome.state == "finished":
        loss = "" if outcome.held_out is None else f", held-out loss {outcome.held_out:.3f}"
        before = "" if outcome.attempts else " before"
        say(f"{outcome.name}: finished{before} at step {outcome.step}{loss}")
    elif outcome.state == "failed":
        say(f"{outcome.name}: failed {outcome.attempts} times: {outcome.message}")
    return outcome


def own_threads(environment: Mapping[str, str] | None) -> int | None:
    """The threads that a person has set for all that runs; None where there is no such number."""
    said = (os.environ if environment is None else environment).get("OMP_NUM_THREADS", "")
    return int(said) if said.isdecimal() and int(said) else None


def cores() -> int:
    """Cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def surroundings(environment: Mapping[str, str] | None, threads: int, device: str | None) -> dict[str, str]:
    """The environment of a run: that many threads, and this device alone."""
    found = dict(os.environ if environment is None else environment)
    found["OMP_NUM_THREADS"] = str(threads)
    if device is not None:
        found["CUDA_VISIBLE_DEVICES"] = device
    return found


@contextmanager
def held(out: Path) -> Iterator[None]:
    """The folder of a sweep, made if need be, while no other sweep works in it."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        handle = os.open(out / _LOCK, os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        raise TrainingError(f"{out}: cannot be written to: {error.strerror or error}") from None
    try:
        if disk.locked(handle) is False:
            raise TrainingError(
                f"{out}: another sweep works in this folder; wait for it, or give another --out"
            )
        yield
    finally:
        os.close(handle)


@contextmanager
def stopped() -> Iterator[_Stop]:
    """How workers are to end; SIGTERM and a closed terminal come as Ctrl-C does while it is used."""
    stop = _Stop()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    numbers = [getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name)]
    before: dict[int, Callable[..., Any] | int | None] = {n: signal.signal(n, interrupt) for n in numbers}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
