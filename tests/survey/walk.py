"""The walk over all model types, in worker processes that a hanging or crashing type cannot stop."""

from __future__ import annotations

import gc
import multiprocessing
import os
import resource
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any

import psutil

SECONDS = 60.0  # of processor time for one model type
PATIENCE = 6.0  # times as many seconds by the clock, on a busy machine
MEMORY = 8 << 30  # bytes of address space of a worker
RECYCLED = 150  # model types after which a worker starts afresh: modeling files stay in memory


def model_types() -> list[str]:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    return sorted(CONFIG_MAPPING_NAMES)


def _serve(pipe: Connection) -> None:
    sys.stdout = sys.stderr = open(os.devnull, "w")  # noqa: SIM115
    import torch

    from tests.survey import verify

    torch.set_num_threads(1)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    while (model_type := pipe.recv()) is not None:
        pipe.send(verify.examine(model_type))
        gc.collect()


@dataclass
class _Worker:
    process: Any
    pipe: Connection
    model_type: str = ""
    since: float = 0.0  # by the clock
    before: float = 0.0  # processor time used until then
    served: int = 0

    @classmethod
    def start(cls) -> _Worker:
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe()
        process = context.Process(target=_serve, args=(theirs,), daemon=True)
        process.start()
        theirs.close()
        return cls(process, ours)

    def used(self) -> float:
        """Seconds of processor time since the process started."""
        try:
            times = psutil.Process(self.process.pid).cpu_times()
        except psutil.Error:
            return self.before
        return float(times.user + times.system)

    def spent(self) -> float:
        return self.used() - self.before

    def stop(self) -> None:
        self.process.kill()
        self.process.join()
        self.pipe.close()


def results(names: Sequence[str], jobs: int, *, seconds: float = SECONDS) -> Iterator[dict[str, Any]]:
    """The result of each model type, as they come."""
    waiting = list(reversed(names))
    workers: list[_Worker] = []
    try:
        for _ in range(min(jobs, len(names))):
            workers.append(_given(_Worker.start(), waiting))
        while workers:
            ready = wait([w.pipe for w in workers], timeout=1.0)
            for worker in list(workers):
                answer: dict[str, Any] | None = None
                if worker.pipe in ready:
                    try:
                        answer = worker.pipe.recv()
                    except (EOFError, OSError):
                        answer = _lost(worker, f"the process ended with code {_code(worker)}")
                elif worker.spent() > seconds or time.monotonic() - worker.since > PATIENCE * seconds:
                    answer = _lost(worker, f"took more than {seconds:.0f} seconds")
                if answer is None:
                    continue
                workers.remove(worker)
                worker.served += 1
                if answer.get("lost") or worker.served >= RECYCLED or not waiting:
                    worker.stop()
                    worker = _Worker.start() if waiting else worker
                if waiting:
                    workers.append(_given(worker, waiting))
                yield answer
    finally:
        for worker in workers:
            worker.stop()


def _given(worker: _Worker, waiting: list[str]) -> _Worker:
    worker.model_type, worker.since = waiting.pop(), time.monotonic()
    worker.before = worker.used()
    worker.pipe.send(worker.model_type)
    return worker


def _code(worker: _Worker) -> int | None:
    worker.process.join(5)
    return worker.process.exitcode  # type: ignore[no-any-return]


def _lost(worker: _Worker, reason: str) -> dict[str, Any]:
    return {
        "model_type": worker.model_type,
        "status": "not yet",
        "reason": reason,
        "step": "run",
        "lost": True,
    }


Progress = Callable[[dict[str, Any]], None]
