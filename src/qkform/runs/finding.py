"""Where the records of runs lie: every command that takes folders of runs looks for them here."""

from __future__ import annotations

import os
from pathlib import Path

from qkform import disk
from qkform.errors import RecordError
from qkform.runs.fields import NAME


def records_at(path: str | os.PathLike[str]) -> list[Path]:
    """The records at a place: the one in a folder, or those in the folders below, in order; a file is its own.

    Hidden folders are not looked into, nor are the folders of a run. Links are followed, once each. RecordError for a
    place that is not there, or holds no record.
    """
    place = Path(path)
    if not os.path.isdir(place):  # False for names that cannot be, too
        if not os.path.lexists(place):
            raise RecordError(f"{place} is not there; name the folder of a run, or a folder of such folders")
        return [place]
    found = []
    for folder, inside, _ in disk.walked(place, _refuse):
        if os.path.lexists(folder / NAME):  # a folder of this name too: reading it says what is wrong
            inside.clear()
            found.append(folder / NAME)
    if not found:
        raise RecordError(
            f"there is no {NAME} in {place} or below; name the folder of a run, or one of such folders"
        )
    return found


def _refuse(error: OSError) -> None:
    raise RecordError(f"{error.filename}: this folder cannot be read: {error.strerror or error}") from None
