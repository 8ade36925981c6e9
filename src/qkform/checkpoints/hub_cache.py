"""What the hub client's own cache folder holds: snapshots of commits, and what a branch last was."""

from __future__ import annotations

import re
from pathlib import Path, PurePosixPath

COMMIT = re.compile(r"[0-9a-f]{40}")


def cache_folder() -> Path:
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE)


def _repository_folder(repo_id: str) -> Path:
    return cache_folder() / ("models--" + repo_id.replace("/", "--"))


def snapshot(repo_id: str, commit: str) -> Path | None:
    folder = _repository_folder(repo_id) / "snapshots" / commit
    return folder if folder.is_dir() else None


def snapshot_file(repo_id: str, commit: str, file: str) -> Path | None:
    folder = snapshot(repo_id, commit)
    return folder / file if folder is not None and (folder / file).is_file() else None


def cached_commit(repo_id: str, revision: str) -> str | None:
    """The commit that a revision was when it was last fetched."""
    if COMMIT.fullmatch(revision):
        return revision
    parts = PurePosixPath(revision).parts
    if not parts or ".." in parts or revision.startswith("/") or "\0" in revision:
        return None
    try:
        commit = (_repository_folder(repo_id) / "refs" / revision).read_text().strip()
    except (OSError, ValueError):
        return None
    return commit if COMMIT.fullmatch(commit) else None
