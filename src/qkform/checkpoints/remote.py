"""Byte ranges of files on the hub: GET requests that survive a bad line, and refuse a bad server.

A fault that may pass (429, 5xx, a timeout, a cut connection) is waited out, and what had arrived is kept: a read is
resumed where it stopped. Everything is bounded: attempts, waiting, bytes, redirects, the time of a trickle.
"""

from __future__ import annotations

import random
import re
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from qkform.errors import CheckpointError, SourceError

TRIES = 8  # failures in a row; an attempt that brings ENOUGH bytes starts the count again
ENOUGH = 2**18
BACKOFF_SECONDS = 0.5  # doubled after every failure
MAX_BACKOFF_SECONDS = 20.0
MAX_ASKED_SECONDS = (
    330.0  # the hub counts requests over five minutes; a longer Retry-After is an answer, not a pause
)
TRICKLE_SECONDS, TRICKLE_RATE = 30.0, 10_000  # an attempt may take so long, and a second per so many bytes
ANSWER_SECONDS = (
    30.0  # from a request to the head of its answer, and from there on without a byte of the body
)
UNANSWERED = 2  # so many attempts without an answer, each of them that long
MAX_SKIPPED = 64 * 2**20  # of a server that ignores ranges, so many bytes are read to reach a tensor

_CONTENT_RANGE = re.compile(r"\s*bytes\s+(\d{1,19})-(\d{1,19})/(\d{1,19}|\*)\s*", re.IGNORECASE)
_UNANSWERED = "no answer in time, though bytes of one kept coming"
_HOPELESS = re.compile(  # what h11 and the client say of an answer that will be the same the next time
    r"buffer too long|header|control character|illegal|invalid", re.IGNORECASE
)
_FINAL = ("TooManyRedirects", "UnsupportedProtocol", "LocalProtocolError", "DecodingError", "InvalidURL")


@dataclass(frozen=True)
class Target:
    """A file on the hub: where it is, and what to call it in a message."""

    url: str
    name: str
    size: int | None = None


class Passing(Exception):
    """A fault that may be gone at the next attempt."""

    def __init__(self, text: str, wait_seconds: float | None = None) -> None:
        super().__init__(text)
        self.wait_seconds = wait_seconds


class Unreachable(SourceError):
    """No answer from the hub at all."""


class Refused(SourceError):
    """A definite answer that is not the file: its status, and the hub's own code for the reason."""

    def __init__(self, status: int, code: str, name: str) -> None:
        super().__init__(f"the server answered {status} for {name}")
        self.status, self.code, self.name = status, code, name


class _Watch:
    """Closes the hub's connections where nothing was seen for ANSWER_SECONDS.

    The client's own limit is on the wait for any bytes at all: one byte of a header every second is an answer to it,
    and so is "100 Continue" for ever. A closed connection makes its reader fail, whatever it is reading.
    """

    def __init__(self) -> None:
        self.expired = False
        self._seen = time.monotonic()
        self._over = threading.Event()
        threading.Thread(target=self._run, name="qkform-watch", daemon=True).start()

    def seen(self) -> None:
        self._seen = time.monotonic()

    def end(self) -> None:
        self._over.set()

    def _run(self) -> None:
        from huggingface_hub import close_session

        while not self._over.wait(max(self._seen + ANSWER_SECONDS - time.monotonic(), 0.0)):
            if time.monotonic() - self._seen >= ANSWER_SECONDS:
                self.expired = True
                close_session()
                return


class Web:
    """GET requests with the hub's own client, headers and token; safe to use from several threads.

    `bytes_read` counts what came in of files' bodies, repeated bytes and gaps included.
    """

    def __init__(self, token: str | None) -> None:
        from huggingface_hub import constants
        from huggingface_hub.utils import build_hf_headers  # type: ignore[attr-defined]

        self._headers = {
            **build_hf_headers(token=token, library_name="qkform"),
            "Accept-Encoding": "identity",
        }
        self._timeout = constants.HF_HUB_DOWNLOAD_TIMEOUT
        self._moved: dict[str, str] = {}  # where the hub sent us for a file: asked directly the next time
        self._lock = threading.Lock()
        self.bytes_read = 0

    def whole(self, target: Target, limit: int, *, counted: bool = True) -> bytes:
        """All of a small document, of at most `limit` bytes."""
        failures = 0
        while True:
            body = bytearray()
            try:
                with self._response(target, None) as response:
                    if response.status_code != 200:
                        raise CheckpointError(_answered(target, response.status_code))
                    for part in self._parts(response):
                        body += part[: limit + 1 - len(body)]
                        if len(body) > limit:
                            break
                    length = response.headers.get("Content-Length", "")
                if len(body) > limit:
                    raise CheckpointError(f"{target.name} is longer than {limit:,} bytes, and is not read")
                if length.isascii() and length.isdigit() and len(body) < int(length[:19]):
                    raise Passing("the connection was cut")
                if counted:
                    self.count(len(body))
                return bytes(body)
            except Passing as fault:
                failures += 1
                self._pause(failures, fault, target)

    def fill(self, target: Target, begin: int, out: memoryview) -> int | None:
        """Bytes of a file from `begin` into all of `out`; returns the size of the file as the server tells it."""
        filled = failures = 0
        size: int | None = target.size
        while filled < len(out):
            before = filled
            try:
                with self._response(target, (begin + filled, begin + len(out))) as response:
                    skip, told = self._position(response, target, begin + filled, begin + len(out))
                    if told is not None and target.size is not None and told != target.size:
                        raise CheckpointError(
                            f"{target.name} has {target.size:,} bytes by the repository's list, and {told:,} by the "
                            "answer that brings it: not the same file"
                        )
                    size = told if told is not None else size
                    for part in self._parts(response, skip):
                        if filled == len(out):
                            break  # more than was asked for
                        part = part[: len(out) - filled]
                        out[filled : filled + len(part)] = part
                        filled += len(part)
                        self.count(len(part))
                        if filled == len(out) and response.status_code == 200:
                            break  # otherwise read to the end of the answer: its connection serves again
                if filled < len(out):
                    raise Passing("the connection was cut")
            except Passing as fault:
                if filled < len(out):
                    failures = failures + 1 if filled - before < ENOUGH else 1
                    self._pause(failures, fault, target)
        return size

    def count(self, nbytes: int) -> None:
        with self._lock:
            self.bytes_read += nbytes

    @contextmanager
    def _response(self, target: Target, span: tuple[int, int] | None) -> Iterator[Any]:
        """An answer with a body worth reading. Raises Passing, Refused, Unreachable or SourceError."""
        from huggingface_hub import errors, get_session

        web_error = vars(errors)[
            "HTTPError"
        ]  # of httpx, under the name that the installed hub client gives it
        headers = dict(self._headers)
        if span is not None:
            headers["Range"] = f"bytes={span[0]}-{span[1] - 1}"
        direct = self._moved.get(target.url)
        if direct is not None:  # another host: it does not get the token
            headers = {key: value for key, value in headers.items() if key.lower() != "authorization"}
        watch = _Watch()
        try:
            with get_session().stream(
                "GET", direct or target.url, headers=headers, timeout=self._timeout, follow_redirects=True
            ) as response:
                watch.seen()
                response.extensions["qkform"] = watch
                if direct is not None and response.status_code in (400, 401, 403, 404, 410):
                    self._moved.pop(target.url, None)
                    raise Passing("the address that the hub gave out has expired", 0.0)
                self._check(response, target)
                if response.history and not _same_origin(response.url, response.history[0].url):
                    self._moved[target.url] = str(response.url)
                yield response
        except errors.OfflineModeIsEnabled:
            raise Unreachable(f"{target.name}: HF_HUB_OFFLINE is set") from None
        except (web_error, OSError, ValueError) as error:
            kind = type(error).__name__
            if watch.expired:
                raise Passing(_UNANSWERED) from None
            if kind in _FINAL or (kind == "RemoteProtocolError" and _HOPELESS.search(str(error))):
                raise SourceError(f"{target.name} cannot be fetched: {_words(error)}") from None
            if kind in ("ConnectError", "ConnectTimeout"):
                raise Passing(f"no connection: {_words(error)}") from None
            raise Passing(_words(error)) from None
        except RuntimeError as error:  # another thread, or the watch, has closed the client that all share
            if "closed" not in str(error):
                raise
            raise Passing(_UNANSWERED if watch.expired else "the client was closed") from None
        finally:
            watch.end()

    def _check(self, response: Any, target: Target) -> None:
        status, headers = response.status_code, response.headers
        if status in (408, 425, 429) or status >= 500:
            raise Passing(f"the server answered {status}", _asked_wait(headers))
        if status not in (200, 206):
            raise Refused(status, _code(headers), target.name)
        if headers.get("Content-Encoding", "identity").strip().lower() not in ("", "identity"):
            raise CheckpointError(
                f"{target.name} comes compressed ({headers['Content-Encoding'][:40]!r}), which was not asked for: "
                "byte ranges of it mean nothing; a proxy in between may do this"
            )

    def _position(self, response: Any, target: Target, begin: int, end: int) -> tuple[int, int | None]:
        """(bytes of the body before byte `begin`, size of the file or None where the server does not say)."""
        if response.status_code == 200:
            if end > MAX_SKIPPED:
                raise CheckpointError(
                    f"the server ignores byte ranges: reading {target.name} would fetch it from its start to byte "
                    f"{end:,}; fetch the repository with `hf download` and scan the folder"
                )
            length = response.headers.get("Content-Length", "")
            known = length.isascii() and length.isdigit() and len(length) < 20
            return begin, int(length) if known else None
        found = _CONTENT_RANGE.fullmatch(response.headers.get("Content-Range", ""))
        if found is None or int(found[1]) != begin or not begin <= int(found[2]) < end:
            sent = response.headers.get("Content-Range", "")[:80]
            if not sent:
                raise SourceError(
                    f"{target.name} cannot be fetched: the server sent a part of it (206) without saying which "
                    "(Content-Range); a proxy in between may do this"
                )
            raise Passing(f"asked for bytes {begin}-{end - 1}, the server sent {sent!r}")
        return 0, None if found[3] == "*" else int(found[3])

    def _parts(self, response: Any, skip: int = 0) -> Iterator[memoryview]:
        """The body after its first `skip` bytes, in pieces; Passing for a trickle."""
        started, got = time.monotonic(), 0
        watch = response.extensions.get("qkform")
        for (
            part
        ) in response.iter_raw():  # as they arrive: with a size, what a cut leaves unfilled would be lost
            if watch is not None:
                watch.seen()
            before = min(max(skip - got, 0), len(part))
            got += len(part)
            self.count(before)
            yield memoryview(part)[before:]
            if time.monotonic() - started > TRICKLE_SECONDS + got / TRICKLE_RATE:
                raise Passing(f"{got:,} bytes in {TRICKLE_SECONDS:.0f} s: too slow")

    def _pause(self, failures: int, fault: Passing, target: Target) -> None:
        """Wait before the next attempt, or say that there is none."""
        asked = fault.wait_seconds
        lost = str(fault).startswith("no connection")
        tries = UNANSWERED if str(fault) == _UNANSWERED else 3 if lost and not self.bytes_read else TRIES
        if failures >= tries:
            kind = Unreachable if lost else SourceError
            raise kind(
                f"{target.name} cannot be fetched: {fault} ({failures} attempts); try again later"
            ) from None
        if asked is not None and asked > MAX_ASKED_SECONDS:
            raise SourceError(
                f"{target.name} cannot be fetched now: {fault} and asks to wait {asked:,.0f} seconds"
            ) from None
        sleep(asked if asked is not None else backoff(failures))


def backoff(failures: int) -> float:
    """Seconds before the next attempt: doubled each time, and spread so that many readers do not march in step."""
    longest: float = min(MAX_BACKOFF_SECONDS, BACKOFF_SECONDS * 2.0 ** (failures - 1))
    return longest * random.uniform(0.5, 1.0)


def sleep(seconds: float) -> None:
    time.sleep(seconds)


def _asked_wait(headers: Any) -> float | None:
    """Seconds that the server asks for: Retry-After, or the hub's RateLimit (`"api";r=0;t=55`)."""
    text = headers.get("Retry-After", "").strip()
    if text.isascii() and text.isdigit() and len(text) < 10:
        return float(text)
    limit = re.search(r";\s*r\s*=\s*0\s*;\s*t\s*=\s*(\d{1,9})", headers.get("RateLimit", "")[:200])
    return float(limit[1]) + 1 if limit else None


def _code(headers: Any) -> str:
    """The hub's word for why it refuses; nothing else that a server writes reaches a message."""
    if headers.get("X-Error-Message", "") == "Access to this resource is disabled.":
        return "Disabled"
    code = headers.get("X-Error-Code", "")
    return code if code in ("RepoNotFound", "RevisionNotFound", "EntryNotFound", "GatedRepo") else ""


def refused(response: Any, name: str) -> Refused:
    """The definite answer that another part of the hub's client ran into."""
    return Refused(response.status_code, _code(response.headers), name)


def _answered(target: Target, status: int) -> str:
    return f"the server answered {status} for the whole of {target.name}"


def _words(error: Exception) -> str:
    """A transport error in short. Its text may hold a signed address: only the system's own words are passed on."""
    text = str(error)
    return type(error).__name__ if "://" in text or not text else text[:200]


def _same_origin(a: Any, b: Any) -> bool:
    return (a.scheme, a.host, a.port) == (b.scheme, b.host, b.port)
