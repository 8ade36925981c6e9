"""`python -m qkform` is the command line, and so is `qkform`. Ctrl-C ends it with one line, at any moment.

Little is imported before that is sure: the rest takes long enough for a person to change their mind.
"""

from __future__ import annotations

import os
import signal
import sys
from contextlib import suppress
from typing import Any


def main() -> int:
    """The command line of this process; returns its exit code."""
    try:
        from qkform.cli import main as command

        return command()
    except KeyboardInterrupt:
        _told()
        return 130
    finally:  # what is left to do is to end: an interrupt then, or a second one, has nothing to wait for
        signal.signal(signal.SIGINT, _at_once)


def _told() -> None:
    with suppress(OSError):  # a stderr that is closed has nobody to read it
        os.write(2, b"interrupted\n")


def _at_once(*_: Any) -> None:
    _told()
    os._exit(130)


if __name__ == "__main__":
    sys.exit(main())
