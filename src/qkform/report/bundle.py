"""The Vega javascript (vega, vega-lite, vega-embed) as one text, made by vl-convert, kept in a cache folder.

Making it takes seconds. The cache is only a help: one that cannot be read, written or trusted is passed over.
"""

from __future__ import annotations

import hashlib
import os
from contextlib import suppress
from importlib.metadata import version as package_version
from pathlib import Path

from qkform.cache import cache_folder
from qkform.errors import QKFormError
from qkform.records import write_whole


def javascript(folder: str | os.PathLike[str] | None = None) -> str:
    """An ES module, about 0.9 MB, that sets window.vegaEmbed, window.vega and window.vegaLite.

    `folder` defaults to `qkform.cache.cache_folder()`. The file there is named for the versions it was made from,
    and carries the SHA-256 of its text in its first line: a truncated file is made again.
    """
    version = vega_lite_version()
    name = f"vega-bundle-{package_version('vl-convert-python')}-{version}.js"
    cached = (cache_folder() if folder is None else Path(folder)) / name
    text = _read(cached)
    if text is None:
        text = _inlinable(_made(version))
        _keep(cached, text)
    return text


def vega_lite_version() -> str:
    """The vega-lite that vl-convert carries and altair writes for, as major.minor."""
    import altair
    import vl_convert

    wanted = ".".join(altair.SCHEMA_VERSION.removeprefix("v").split(".")[:2])
    known: list[str] = vl_convert.get_vegalite_versions()
    if wanted in known:
        return wanted
    return max(known, key=lambda version: [int(part) for part in version.split(".")])


def _made(version: str) -> str:
    import vl_convert

    # its type stub leaves out the defaults that its docstring has
    return vl_convert.javascript_bundle(vl_version=version)  # type: ignore[call-arg]


def _inlinable(script: str) -> str:
    """The script so that it may stand inside a <script> element, hashed as the browser will hash it."""
    # HTML reads CR LF as LF before the browser hashes; and no text in a script may end or comment its element
    text = script.replace("\r\n", "\n").replace("\r", "\n")
    return text.replace("</script", "<\\/script").replace("<!--", "<\\!--")


def _stamp(text: str) -> str:
    return f"// sha256 {hashlib.sha256(text.encode()).hexdigest()}"


def _read(path: Path) -> str | None:
    try:
        stamp, _, text = path.read_bytes().decode("utf-8").partition("\n")
    except (OSError, UnicodeDecodeError):
        return None
    return text if stamp == _stamp(text) else None


def _keep(path: Path, text: str) -> None:
    with suppress(OSError, QKFormError):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, lambda to: to.write_bytes(f"{_stamp(text)}\n{text}".encode()))
