"""What a disk is asked for beside reading and writing: to lock a file, and to keep what was written for good."""

from __future__ import annotations

import errno
import os
import sys
from pathlib import Path

_HELD = (errno.EWOULDBLOCK, errno.EAGAIN, errno.EACCES)


def locked(handle: int) -> bool | None:
    """Whether an open file is locked by us now; False: another process has it. Nobody waits.

    A file system without locks holds nobody back: True. None where the operating system has no such locks (Windows).
    """
    if sys.platform == "win32":
        return None
    import fcntl

    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return error.errno not in _HELD
    return True


def synced(path: Path) -> None:
    """Force a file, or the names in a folder, to the disk. OSError where it cannot be; folders cannot be everywhere."""
    windows = sys.platform == "win32"
    try:
        handle = os.open(path, os.O_RDWR if windows else os.O_RDONLY)
    except PermissionError:
        if path.is_dir():
            return
        raise
    try:
        os.fsync(handle)
    except OSError as error:
        if not path.is_dir() or error.errno not in (errno.EINVAL, errno.EBADF):
            raise
    finally:
        os.close(handle)
