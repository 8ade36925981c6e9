"""Folders that take a place, and folders that are walked: nothing is lost, nothing is met twice or by accident."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from qkform import disk
from qkform.errors import DataError
from qkform.training.data import Skipped, corpus


def folder(path: Path, text: str) -> Path:
    path.mkdir()
    (path / "a").write_text(text)
    return path


def test_a_folder_takes_the_place_of_another(tmp_path):
    folder(tmp_path / ".new-old", "left by a kill")
    disk.take_place(folder(tmp_path / ".new", "new"), folder(tmp_path / "it", "old"))
    assert [path.name for path in tmp_path.iterdir()] == ["it"]
    assert (tmp_path / "it" / "a").read_text() == "new"


def test_what_stood_there_stands_again_where_the_new_cannot(tmp_path, monkeypatch):
    new, it = folder(tmp_path / ".new", "new"), folder(tmp_path / "it", "old")
    rename = Path.rename

    def refused(self, target):
        if self == new:
            raise OSError(28, "No space left on device")
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", refused)
    with pytest.raises(OSError, match="No space left"):
        disk.take_place(new, it)
    assert (it / "a").read_text() == "old"


def walked(top: Path, *more) -> list[str]:
    return [str(each.relative_to(top)) for each, _, _ in disk.walked(top, *more)]


def test_links_are_followed_once_and_none_leads_out_of_the_folder_around(tmp_path):
    top, elsewhere = tmp_path / "top", tmp_path / "elsewhere"
    for path in (top / "b", top / ".hidden", elsewhere / "c", tmp_path / "beside"):
        path.mkdir(parents=True)
    (top / "a").symlink_to(elsewhere)
    (top / "again").symlink_to(elsewhere / "c")
    (elsewhere / "round").symlink_to(top)
    (top / "up").symlink_to("..")
    (elsewhere / "c" / "root").symlink_to("/")
    assert walked(top) == [".", "b", "a", "a/c"]


def test_a_folder_that_cannot_be_listed_is_told(tmp_path, monkeypatch):
    (tmp_path / "shut").mkdir()
    (tmp_path / "a.txt").write_text("one")
    listing = os.scandir

    def scandir(path):
        if Path(path).name == "shut":
            raise PermissionError(13, "Permission denied", str(path))
        return listing(path)

    monkeypatch.setattr(os, "scandir", scandir)
    found = []
    assert walked(tmp_path, found.append) == ["."]
    assert [error.filename for error in found] == [str(tmp_path / "shut")]
    with pytest.raises(DataError, match=r"shut: this folder cannot be read: Permission denied"):
        list(corpus(tmp_path).pieces(Skipped()))
