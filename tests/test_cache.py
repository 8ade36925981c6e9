"""One cache folder, where the person or the system wants it."""

from __future__ import annotations

import sys

from qkform.cache import cache_folder


def test_the_cache_is_where_it_was_asked_to_be(tmp_path, monkeypatch):
    for name in ("QKFORM_CACHE", "XDG_CACHE_HOME", "LOCALAPPDATA"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(sys, "platform", "linux")
    assert cache_folder() == tmp_path / ".cache" / "qkform"
    monkeypatch.setattr(sys, "platform", "darwin")
    assert cache_folder() == tmp_path / "Library" / "Caches" / "qkform"
    monkeypatch.setattr(sys, "platform", "win32")
    assert cache_folder() == tmp_path / "AppData" / "Local" / "qkform"
    monkeypatch.setenv("LOCALAPPDATA", str(tmp_path / "local"))
    assert cache_folder() == tmp_path / "local" / "qkform"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_folder() == tmp_path / "xdg" / "qkform"
    monkeypatch.setenv("QKFORM_CACHE", "~/mine")
    assert cache_folder() == tmp_path / "mine"
    monkeypatch.delenv("QKFORM_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")  # the XDG specification: to be ignored
    assert cache_folder() == tmp_path / "local" / "qkform"
