"""What a person writes for a model of the hub -> repository, revision and path in it.

`org/name`, `hf://[models/]org/name[@revision][/path]`, or an address as a browser shows it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from urllib.parse import unquote, urlsplit

from qkform.errors import SourceError

_PART = r"[A-Za-z0-9](?:[A-Za-z0-9._-]{0,94}[A-Za-z0-9_])?"
_ID = re.compile(rf"{_PART}/{_PART}")
_BARE = re.compile(_PART)
_FILE = re.compile(
    r"\.(safetensors|gguf|bin|pt|pth|onnx|npz|json|h5|ckpt|msgpack|txt|md|py|zip|tar|gz)$", re.I
)


@dataclass(frozen=True)
class HubName:
    """What a person named: a repository, perhaps a revision, and a file or folder in it ("" for all of it)."""

    repo_id: str
    revision: str | None = None
    path: str = ""
    explicit: bool = False  # written as an address, so that it cannot be meant as a path on this machine

    def __str__(self) -> str:
        return f"{self.repo_id}/{self.path}" if self.path else self.repo_id


def hub_name(text: str) -> HubName | None:
    """The hub name that `text` may be, None if it cannot be one. Raises SourceError for a malformed address."""
    for prefix in ("hf://", "https://huggingface.co/", "https://hf.co/", "https://www.huggingface.co/"):
        if text.startswith(prefix):
            rest = text.removeprefix(prefix)
            return _address(text, rest) if prefix == "hf://" else _web_address(text, rest)
    if text.startswith(("http://", "https://")):
        return _own_endpoint(text)
    if _ID.fullmatch(text) and ".." not in text and "--" not in text:
        return HubName(text)
    if _BARE.fullmatch(text) and not _FILE.search(text) and ".." not in text and "--" not in text:
        return HubName(text)
    return None


def _address(text: str, rest: str) -> HubName:
    """hf://[models/]org/name[@revision][/path]; a revision with a slash in it is written with %2F."""
    parts = [p for p in rest.split("/") if p]
    if parts and parts[0] in ("datasets", "spaces", "buckets", "kernels"):
        raise SourceError(f"{text[:200]} is a {parts[0].removesuffix('s')}; models are scanned")
    if parts and parts[0] == "models":
        parts = parts[1:]
    n_id = 1 if parts and (len(parts) == 1 or "@" in parts[0]) else 2
    id_, _, revision = "/".join(parts[:n_id]).partition("@")
    return _checked(text, id_, unquote(revision) or None, parts[n_id:])


def _web_address(text: str, rest: str) -> HubName:
    """org/name[/tree/REVISION[/folder] | /blob/REVISION/file | /resolve/REVISION/file]."""
    parts = [unquote(p) for p in urlsplit("//host/" + rest).path.split("/") if p]
    if parts and parts[0] in ("datasets", "spaces", "buckets", "kernels"):
        raise SourceError(f"{text[:200]} is a {parts[0].removesuffix('s')}; models are scanned")
    for n_id in (2, 1):
        if len(parts) > n_id and parts[n_id] in ("tree", "blob", "resolve", "raw"):
            revision = parts[n_id + 1] if len(parts) > n_id + 1 else None
            return _checked(text, "/".join(parts[:n_id]), revision, parts[n_id + 2 :])
    return _checked(text, "/".join(parts), None, [])


def _own_endpoint(text: str) -> HubName:
    from huggingface_hub import constants

    prefix = constants.ENDPOINT + "/"
    if not text.startswith(prefix):
        raise SourceError(
            f"{text[:200]} is not an address of the hub ({constants.ENDPOINT}); download the file and scan it"
        )
    return _web_address(text, text.removeprefix(prefix))


def _checked(text: str, repo_id: str, revision: str | None, path: Sequence[str]) -> HubName:
    sound = _ID.fullmatch(repo_id) or _BARE.fullmatch(repo_id)
    if not sound or ".." in repo_id or "--" in repo_id or any(p in (".", "..") for p in path):
        raise SourceError(
            f"{text[:200]!r} names no repository; write hf://org/name, hf://org/name@revision or "
            "hf://org/name/path/in/repository"
        )
    return HubName(repo_id, revision, "/".join(path), explicit=True)
