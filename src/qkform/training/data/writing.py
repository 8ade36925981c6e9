"""A folder of the cache appears whole, by one rename, or not at all; what the system refuses is said in plain words."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

from qkform.errors import DataError

_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@contextlib.contextmanager
def published(final: Path) -> Iterator[Path]:
    """A folder to write into, which becomes `final` when the block ends well. The caller holds the lock of `final`.

    What an earlier, killed build left is removed first; a `final` that stands in the way is replaced.
    """
    work = final.with_name(f".tmp-{final.name}")
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    try:
        yield work
        for path in work.iterdir():
            _sync(path)
        _sync(work)
        if final.exists():
            shutil.rmtree(final)
        work.rename(final)
        _sync(final.parent)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _sync(path: Path) -> None:
    if sys.platform == "win32" and path.is_dir():
        return
    descriptor = os.open(path, os.O_RDWR if sys.platform == "win32" else os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def said_plainly(what: str, folder: Path) -> Iterator[None]:
    """OSError as DataError: what could not be kept, in which folder, and what would help."""
    try:
        yield
    except OSError as error:
        where = f"cannot keep {what} in {folder}"
        if error.errno in _NO_ROOM:
            with contextlib.suppress(OSError):
                where += f" ({shutil.disk_usage(folder).free / 1e6:,.0f} MB free)"
            raise DataError(
                f"{where}: {error.strerror}; nothing half-written was left. Make room, or name another folder: "
                "cache=, or the variable QKFORM_CACHE"
            ) from None
        raise DataError(
            f"{where}: {error.strerror or error}; name a folder that can be written: "
            "cache=, or the variable QKFORM_CACHE"
        ) from None
