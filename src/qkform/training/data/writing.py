"""A folder of the cache appears whole, by one rename, or not at all; what the system refuses is said in plain words."""

from __future__ import annotations

import contextlib
import errno
import shutil
from collections.abc import Iterator
from pathlib import Path

from qkform import disk
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
        shutil.rmtree(final, ignore_errors=True)  # it is damaged, or it would have been used
        disk.take_place(work, final)
    finally:
        shutil.rmtree(work, ignore_errors=True)


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
