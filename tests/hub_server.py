"""A hub on this machine: the addresses that the real client asks, ranges, redirects to a second port, and faults.

`Hub` serves folders as repositories, counts the bytes of files that it sends, and misbehaves when asked.
"""

from __future__ import annotations

import hashlib
import json
import re
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

COMMIT = "0123456789abcdef0123456789abcdef01234567"
OTHER = "fedcba9876543210fedcba9876543210fedcba98"


class Hub:
    """Repositories by id; `faults` is called with (method, path, number of the request for it) and may misbehave.

    fault               "500", "429", "cut" (half of the body), "hang": for what `failing` says
    ignore_ranges       200 and the whole file
    content_range       a header that is sent instead of the right one
    gated, private, disabled, token   who may read files
    cdn                 files are sent from a second port, as large files of the real hub are
    custom              path -> a function that answers in our stead
    """

    def __init__(self) -> None:
        self.repositories: dict[str, dict[str, Path]] = {}  # id -> {commit: folder}
        self.branches = {"main": COMMIT}
        self.served: Counter[str] = Counter()  # bytes of bodies by file
        self.requests: list[tuple[str, str, dict[str, str]]] = []  # (method, path, headers), files and lists
        self.cdn_requests: list[dict[str, str]] = []
        self.fault: str | None = None
        self.failing: Callable[[int], bool] = lambda nth: nth % 2 == 1
        self._seen: Counter[tuple[str, str]] = Counter()
        self.failed = 0
        self.ignore_ranges = False
        self.content_range: str | None = None
        self.gated = self.private = self.disabled = False
        self.token: str | None = None
        self.cdn = False
        self.sign = "1"
        self.delay = 0.0
        self.running = self.most_running = 0
        self.custom: dict[str, Callable[[BaseHTTPRequestHandler], None]] = {}
        self.lock = threading.Lock()
        self._servers = [self._start(False), self._start(True)]
        self.address = f"http://127.0.0.1:{self._servers[0].server_port}"
        self.cdn_address = f"http://127.0.0.1:{self._servers[1].server_port}"

    def _start(self, is_cdn: bool) -> ThreadingHTTPServer:
        hub = self

        class Handler(_Handler):
            pass

        Handler.hub, Handler.is_cdn = hub, is_cdn
        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
        return server

    def close(self) -> None:
        for server in self._servers:
            server.shutdown()
            server.server_close()

    def add(self, repo_id: str, folder: Path, commit: str = COMMIT) -> None:
        self.repositories.setdefault(repo_id, {})[commit] = folder

    def fails(self, path: str, span: str) -> bool:
        """Every second request for the same end of the same file, so that no luck is involved."""
        if self.fault is None:
            return False
        with self.lock:
            self._seen[path, span] += 1
            fails = self.failing(self._seen[path, span])
            self.failed += fails
        return fails

    def bytes_of(self, pattern: str = "") -> int:
        return sum(n for file, n in self.served.items() if re.search(pattern, file))


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: Hub
    is_cdn = False

    def log_message(self, *_: object) -> None:
        pass

    def handle(self) -> None:
        with suppress(ConnectionError):
            super().handle()

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def _answer(self) -> None:
        hub = self.hub
        path = unquote(urlsplit(self.path).path)
        with hub.lock:
            headers = {key.lower(): value for key, value in self.headers.items()}
            hub.requests.append((self.command, path, headers))
            if self.is_cdn:
                hub.cdn_requests.append(headers)
        if path in hub.custom:
            hub.custom[path](self)
            return
        api = re.fullmatch(r"/api/models/(.+?)/revision/(.+)", path)
        file = re.fullmatch(r"/(.+?)/resolve/([^/]+)/(.+)", path)
        if api:
            self._list(api[1], api[2])
        elif file:
            self._file(file[1], file[2], file[3])
        else:
            self._refuse(404, "")

    def _refuse(self, status: int, code: str, message: str = "") -> None:
        self.send_response(status)
        if code:
            self.send_header("X-Error-Code", code)
        # an ill-behaved server would have the client repeat what it was sent
        self.send_header("X-Error-Message", message or f"you sent {self.headers.get('Authorization')}")
        if status == 429:
            self.send_header("Retry-After", "0")
        self.send_header("Content-Length", "0")
        self.end_headers()

    def _folder(self, repo_id: str, revision: str) -> tuple[str, Path] | None:
        hub = self.hub
        authorised = hub.token is not None and self.headers.get("Authorization") == f"Bearer {hub.token}"
        commits = hub.repositories.get(repo_id)
        if commits is None or (hub.private and not authorised):
            self._refuse(401 if not self.headers.get("Authorization") else 404, "RepoNotFound")
            return None
        commit = hub.branches.get(revision, revision)
        if commit not in commits:
            self._refuse(404, "RevisionNotFound")
            return None
        return commit, commits[commit]

    def _list(self, repo_id: str, revision: str) -> None:
        found = self._folder(repo_id, revision)
        if found is None:
            return
        if self.hub.fails(self.path, ""):
            self._refuse(500 if self.hub.fault != "429" else 429, "")
            return
        commit, folder = found
        siblings = [
            {"rfilename": p.relative_to(folder).as_posix(), "size": p.stat().st_size}
            for p in sorted(folder.rglob("*"))
            if p.is_file()
        ]
        self._json({"id": repo_id, "modelId": repo_id, "sha": commit, "siblings": siblings})

    def _json(self, value: object) -> None:
        body = json.dumps(value).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def _file(self, repo_id: str, revision: str, name: str) -> None:
        hub = self.hub
        found = self._folder(repo_id, revision)
        if found is None:
            return
        commit, folder = found
        authorised = hub.token is not None and self.headers.get("Authorization") == f"Bearer {hub.token}"
        if hub.disabled:
            self._refuse(403, "", "Access to this resource is disabled.")
        elif hub.gated and not authorised and not self.is_cdn:
            self._refuse(403 if self.headers.get("Authorization") else 401, "GatedRepo")
        elif not (folder / name).is_file():
            self._refuse(404, "EntryNotFound")
        elif hub.cdn and not self.is_cdn and not name.endswith(".json"):
            self.send_response(302)
            self._file_headers(commit, folder / name)
            self.send_header("Location", f"{hub.cdn_address}{self.path}?Signature={hub.sign}")
            self.send_header("Content-Length", "0")
            self.end_headers()
        elif self.is_cdn and f"Signature={hub.sign}" not in self.path:
            self._refuse(403, "")
        else:
            self._send(name, folder / name, commit)

    def _file_headers(self, commit: str, path: Path) -> None:
        self.send_header("X-Repo-Commit", commit)
        self.send_header("ETag", f'"{hashlib.sha256(str(path).encode()).hexdigest()}"')
        self.send_header("X-Linked-Size", str(path.stat().st_size))
        self.send_header("Accept-Ranges", "bytes")

    def _send(self, name: str, path: Path, commit: str) -> None:
        hub, size = self.hub, path.stat().st_size
        span = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        begin, end = 0, size
        ranged = span is not None and not hub.ignore_ranges
        if ranged and span is not None:
            begin, end = int(span[1]), min(int(span[2] or size - 1) + 1, size)
        fault = hub.fault if self.command == "GET" and hub.fails(name, str(end)) else None
        if fault in ("500", "429"):
            self._refuse(int(fault), "")
            return
        if fault == "hang":
            time.sleep(1.0)
            self.close_connection = True
            return
        self.send_response(206 if ranged else 200)
        self._file_headers(commit, path)
        if ranged:
            self.send_header("Content-Range", hub.content_range or f"bytes {begin}-{end - 1}/{size}")
        self.send_header("Content-Length", str(end - begin))
        self.end_headers()
        if self.command == "HEAD":
            return
        with hub.lock:
            hub.running += 1
            hub.most_running = max(hub.most_running, hub.running)
        try:
            time.sleep(hub.delay)
            left = (end - begin) // 2 if fault == "cut" else end - begin
            for part in _parts(path, begin, left):
                with hub.lock:  # first: whoever has read the last byte may ask at once
                    hub.served[name] += len(part)
                self.wfile.write(part)
        finally:
            with hub.lock:
                hub.running -= 1
        if fault == "cut":
            self.close_connection = True


def _parts(path: Path, begin: int, nbytes: int) -> Iterator[bytes]:
    with path.open("rb") as file:
        file.seek(begin)
        while nbytes:
            part = file.read(min(nbytes, 2**16))
            nbytes -= len(part)
            yield part
