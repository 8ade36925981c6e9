"""The training step that the name of a checkpoint tells, and where in the name it stands.

A step is a word that trainers write, its number, and nothing that makes the two part of another name: checkpoint-500,
step1000, global_step2000, iter_0001000, epoch=1-step=500.ckpt, stage1-step1000-tokens5B. "step-1b" is a size,
"footstep3" another word, "step-3.5" a version, "checkpoint-00001-of-00002" a shard.
"""

from __future__ import annotations

import re

_STEP = re.compile(
    r"(?:^|(?<=[-_./\\@=]))(?:checkpoint|ckpt|global[-_]?step|step|iter(?:ation)?)[-_=]?"
    r"(?P<number>[0-9]{1,15})(?=$|[-_/\\@=]| \(|\.(?![0-9]))(?![-_]of[-_])"
)
_PART = re.compile(r"[^/\\]+")
_REPOSITORY = re.compile(r"(?:hf://(?:models/)?|https?://[^/]*/)?[^/@]*(?:/[^/@]*)?")
_PARTS = (
    3  # of a path: the file, its folder, and the one above, as in checkpoint-500/weights/model.safetensors
)
_CACHED = "models--"  # a repository in the hub's cache: what follows is its name


def step_of(source: str, revision: str | None = None, *, hub: bool = False) -> int | None:
    """The step that a revision tells, or else the source; None where neither does.

    `hub`: the source is a repository of the hub, whose own name tells nothing, only what stands behind it.
    """
    for found in reversed(list(_STEP.finditer(revision or ""))):
        return int(found["number"])
    place = step_place(source, hub=hub)
    return None if place is None else int(source[slice(*place)])


def step_place(source: str, *, hub: bool = False) -> tuple[int, int] | None:
    """Where in a source the digits of its step stand; None where it tells no step."""
    if hub:
        repository = _REPOSITORY.match(source)
        spans = [(repository.end() if repository else 0, len(source))]
    else:
        parts = [p for p in _PART.finditer(source) if p[0] != "." and not p[0].startswith(_CACHED)]
        spans = [part.span() for part in reversed(parts[-_PARTS:])]
    for start, end in spans:
        for found in reversed(list(_STEP.finditer(source, start, end))):
            return found.span("number")
    return None
