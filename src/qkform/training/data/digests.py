"""The sha256 of a file's bytes, remembered while size, times and inode of the file stand.

A file that was touched within the last two seconds is read again each time: a second write could leave the same times.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import time
from pathlib import Path

from qkform.errors import DataError

SETTLED_SECONDS = 2.0


def digest(path: Path, cache: Path) -> str:
    """The sha256 in hex; `cache` is the folder of what is remembered, which need not exist or be writable."""
    try:
        status = path.stat()
        mark = [status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino]
        place = cache / "digests" / hashlib.sha256(os.fsencode(path.absolute())).hexdigest()
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            known = json.loads(place.read_bytes())
            if known["mark"] == mark:
                return str(known["sha256"])
        with path.open("rb") as file:
            found = hashlib.file_digest(file, "sha256").hexdigest()
        after = path.stat()
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror or error}") from None
    settled = time.time() - max(status.st_mtime, status.st_ctime) > SETTLED_SECONDS
    if settled and mark == [after.st_size, after.st_mtime_ns, after.st_ctime_ns, after.st_ino]:
        with contextlib.suppress(OSError):
            place.parent.mkdir(parents=True, exist_ok=True)
            aside = place.with_name(f"{place.name}.{os.getpid()}")
            try:
                aside.write_text(
                    json.dumps({"path": str(path), "mark": mark, "sha256": found}), encoding="utf-8"
                )
                aside.replace(place)
            finally:  # on a full disk nothing is left of it
                aside.unlink(missing_ok=True)
    return found
