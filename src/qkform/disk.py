"""What a disk is asked for beside reading and writing: to lock a file, to keep what was written, to walk folders."""

from __future__ import annotations

import errno
import os
import shutil
import sys
from collections.abc import Callable, Iterator
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


def take_place(aside: Path, target: Path) -> None:
    """Rename a folder to `target` when everything in it is on the disk; what stood there goes when that is done.

    A kill in between may leave the folder that stood there beside it, as NAME-old; the next call removes that.
    """
    for path in [*aside.rglob("*"), aside]:
        synced(path)
    old = aside.with_name(f"{aside.name}-old")
    shutil.rmtree(old, ignore_errors=True)
    if target.exists():
        target.rename(old)
    try:
        aside.rename(target)
    except OSError:
        if old.exists():
            old.rename(target)
        raise
    synced(target.parent)
    shutil.rmtree(old, ignore_errors=True)


def walked(
    top: Path, refuse: Callable[[OSError], None] | None = None
) -> Iterator[tuple[Path, list[str], list[str]]]:
    """(folder, folders in it, files in it), as `os.walk` has them, without hidden folders.

    Links to folders are followed, each folder once and after all that is no link, so that it has its own name; those
    to folders around `top` are not, which would bring in everything beside it. A folder that is cleared of its folders
    is not walked any deeper. `refuse` is called with the error of a folder that cannot be listed.
    """
    seen = set(map(str, Path(os.path.realpath(top)).parents))
    waiting = [top]
    for start in waiting:
        for folder, inside, files in os.walk(start, onerror=refuse):
            if (real := os.path.realpath(folder)) in seen:
                inside.clear()
                continue
            seen.add(real)
            inside[:] = sorted(name for name in inside if not name.startswith("."))
            yield Path(folder), inside, files
            waiting += [link for name in inside if (link := Path(folder, name)).is_symlink()]
