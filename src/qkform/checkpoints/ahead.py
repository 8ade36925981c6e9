"""Reading ahead over a network: ranges in the order they will be asked for, joined, fetched in parallel, bounded.

The needs of a scan are known before its first read. Neighbours in a file are joined into one request where the gap
between them costs next to nothing; a few threads fetch ahead of the reader, never more than AHEAD_BYTES.
"""

from __future__ import annotations

import queue
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from qkform.checkpoints.base import ByteReader
from qkform.checkpoints.remote import Refused, Target, Web
from qkform.errors import SourceError

Range = tuple[Path, int, int]  # file, first byte, bytes

AHEAD_BYTES = 256 * 2**20  # fetched and not yet read; a larger tensor is fetched alone
KEPT_BYTES = 256 * 2**20  # of tensors that several layers read, so that they are fetched once
SMALL_BYTES, SMALL_IN_ALL = 2**17, 2**23  # biases: read once for queries and once for keys
WINDOW_BYTES = 64 * 2**20  # ranges so near each other in the reading order may share a request
REQUEST_BYTES = 8 * 2**20  # a longer range is cut, and its parts fetched side by side
PARALLEL = 8
GAP = 0.01  # of the bytes asked for: what joining ranges may fetch in vain

Job = Callable[[], None]


@dataclass(eq=False)
class Piece:
    """One stretch of a file: the ranges in it, and its bytes once they are there."""

    file: Path
    begin: int
    end: int
    needed: int
    ranges: list[Range]
    started: bool = False
    fault: BaseException | None = None
    data: NDArray[np.uint8] = field(default_factory=lambda: np.empty(0, np.uint8))
    parts_left: int = 0
    done: threading.Event = field(default_factory=threading.Event)
    lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def nbytes(self) -> int:
        return self.end - self.begin


def pieces(ranges: Sequence[Range]) -> list[Piece]:
    """Distinct ranges, in reading order, joined where the bytes between them are at most GAP of those wanted."""
    found: list[Piece] = []
    for window in _windows(list(dict.fromkeys(ranges))):
        place = {item: i for i, item in enumerate(window)}
        joined: list[Piece] = []
        for item in sorted(window):
            file, begin, nbytes = item
            last = joined[-1] if joined else None
            if last is not None and last.file == file:
                new = max(begin + nbytes - max(begin, last.end), 0)  # not in the piece yet
                end, needed = max(last.end, begin + nbytes), last.needed + new
                if end - last.begin - needed <= GAP * needed:
                    last.end, last.needed = end, needed
                    last.ranges.append(item)
                    continue
            joined.append(Piece(file, begin, begin + nbytes, nbytes, [item]))
        joined.sort(key=lambda piece: min(place[item] for item in piece.ranges))
        found += joined
    return found


def _windows(ranges: Sequence[Range]) -> Iterator[list[Range]]:
    window: list[Range] = []
    total = 0
    for item in ranges:
        if window and total + item[2] > WINDOW_BYTES:
            yield window
            window, total = [], 0
        window.append(item)
        total += item[2]
    if window:
        yield window


class AheadReader:
    """Positioned reads of files on the hub; `plan` says what will be read, and in which order.

    A read that was not planned is fetched when it is asked for. Files that are in `local` are read from there.
    Used from one thread; the threads that fetch are its own.
    """

    def __init__(
        self,
        web: Web,
        targets: Mapping[Path, Target],
        local: Mapping[Path, Path] | None = None,
        in_words: Callable[[Refused], SourceError] = lambda answer: SourceError(str(answer)),
    ) -> None:
        """`in_words` says what the hub's definite answers mean for a person; no other error of this part gets out."""
        self._web, self._targets, self._local = web, targets, dict(local or {})
        self._in_words = in_words
        self._disk = ByteReader()
        self._waiting: list[Piece] = []  # not started, the next one last
        self._place: dict[Range, Piece] = {}
        self._longest: dict[tuple[Path, int], int] = {}  # of ranges with one begin: fetched once
        self._uses: Counter[Range] = Counter()
        self._kept: dict[Range, NDArray[np.uint8]] = {}
        self._small: dict[Range, NDArray[np.uint8]] = {}
        self._held = 0  # bytes of started pieces that are not read to the end
        self._jobs: queue.Queue[Job | None] = queue.Queue()
        self._threads = 0

    @property
    def bytes_read(self) -> int:
        return self._web.bytes_read + self._disk.bytes_read

    def plan(self, ranges: Sequence[Range]) -> None:
        """Start to fetch what `read` will be asked for, as often as it will be asked.

        A second plan takes the place of what is left of the first: what is on its way is waited for and let go.
        """
        self._abandon()
        self._jobs.join()
        remote = [item for item in ranges if item[0] not in self._local and item[2]]
        self._longest = {}
        for file, offset, nbytes in remote:
            self._longest[file, offset] = max(nbytes, self._longest.get((file, offset), 0))
        remote = [(file, offset, self._longest[file, offset]) for file, offset, _ in remote]
        self._uses, self._kept = Counter(remote), {}
        self._waiting = pieces([item for item in remote if item not in self._small])[::-1]
        self._place = {item: piece for piece in self._waiting for item in piece.ranges}
        self._start_some()

    def read(self, path: Path, offset: int, nbytes: int) -> NDArray[np.uint8]:
        """`nbytes` bytes of a file from `offset`; the errors of `Web.fill`, refusals in words."""
        if path in self._local:
            return self._disk.read(self._local[path], offset, nbytes)
        if not nbytes:
            return np.empty(0, np.uint8)
        longest = self._longest.get((path, offset), nbytes)
        if longest > nbytes:
            return self.read(path, offset, longest)[:nbytes]
        item = (path, offset, nbytes)
        if item in self._kept or item in self._small:
            out = self._kept[item] if item in self._kept else self._small[item]
            self._keep(item, out)
            return out
        piece = self._place.pop(item, None)
        if piece is None:
            piece = Piece(path, offset, offset + nbytes, nbytes, [item])
        if not piece.started:
            self._start(piece)
        piece.done.wait()
        if piece.fault is not None:
            self._abandon()
            raise self._told(piece.fault) from None
        out = piece.data
        if piece.nbytes > nbytes:
            out = out[
                offset - piece.begin : offset - piece.begin + nbytes
            ].copy()  # aligned, and free of the rest
        piece.ranges.remove(item)
        if not piece.ranges:
            self._held -= piece.nbytes
        self._keep(item, out)
        self._start_some()
        return out

    def each(self, jobs: Sequence[Job]) -> None:
        """Run several jobs side by side; the first fault of any is raised."""
        faults: list[BaseException] = []
        left = threading.Semaphore(0)

        def guarded(job: Job) -> None:
            try:
                if not faults:
                    job()
            except BaseException as fault:
                faults.append(fault)
            finally:
                left.release()

        for job in jobs:
            self._put(partial(guarded, job))
        for _ in jobs:
            left.acquire()
        if faults:
            raise self._told(faults[0]) from None

    def _told(self, fault: BaseException) -> BaseException:
        return self._in_words(fault) if isinstance(fault, Refused) else fault

    def _keep(self, item: Range, out: NDArray[np.uint8]) -> None:
        """Hold on to bytes that the plan asks for again, and for a while to those of small tensors."""
        if out.nbytes <= SMALL_BYTES:
            if sum(a.nbytes for a in self._small.values()) > SMALL_IN_ALL:
                self._small.clear()
            self._small[item] = out
        self._uses[item] -= 1
        self._kept.pop(item, None)
        if self._uses[item] > 0 and out.nbytes <= KEPT_BYTES:
            self._kept[item] = out  # the last one asked for is the last to go
            while sum(a.nbytes for a in self._kept.values()) > KEPT_BYTES:
                del self._kept[next(iter(self._kept))]

    def _start_some(self) -> None:
        while self._waiting:
            piece = self._waiting[-1]
            if not piece.started:
                if self._held and self._held + piece.nbytes > AHEAD_BYTES:
                    return
                self._start(piece)
            self._waiting.pop()

    def _start(self, piece: Piece) -> None:
        piece.started = True
        self._held += piece.nbytes
        piece.data = np.empty(piece.nbytes, np.uint8)
        cuts = range(0, piece.nbytes, REQUEST_BYTES)
        piece.parts_left = len(cuts)
        web, target = self._web, self._targets[piece.file]
        for at in cuts:
            self._put(partial(_fetch, web, target, piece, at))

    def _abandon(self) -> None:
        """Forget the plan: what is not fetched yet is not fetched, and a later read asks for itself."""
        _drain(self._jobs)
        self._waiting, self._place, self._held = [], {}, 0

    def _put(self, job: Job) -> None:
        self._jobs.put(job)
        if self._threads < PARALLEL:  # daemons: an interrupted scan does not wait for the network
            if not self._threads:
                weakref.finalize(self, _dismiss, self._jobs)
            self._threads += 1
            threading.Thread(target=_work, args=(self._jobs,), daemon=True, name="qkform-fetch").start()


def _fetch(web: Web, target: Target, piece: Piece, at: int) -> None:
    """One request's part of a piece."""
    try:
        if piece.fault is None:
            view = memoryview(piece.data)[at : at + REQUEST_BYTES]  # type: ignore[arg-type]
            web.fill(target, piece.begin + at, view)
    except BaseException as fault:
        piece.fault = fault
    with piece.lock:
        piece.parts_left -= 1
        if not piece.parts_left or piece.fault is not None:
            piece.done.set()


def _work(jobs: queue.Queue[Job | None]) -> None:
    while (job := jobs.get()) is not None:
        job()
        del job
        jobs.task_done()


def _drain(jobs: queue.Queue[Job | None]) -> None:
    try:
        while True:
            jobs.get_nowait()
            jobs.task_done()
    except queue.Empty:
        return


def _dismiss(jobs: queue.Queue[Job | None]) -> None:
    """Let the threads of a reader that is gone end: what it had asked for is not fetched."""
    _drain(jobs)
    for _ in range(PARALLEL):
        jobs.put(None)
