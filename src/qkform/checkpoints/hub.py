"""Hub ids: a name -> a repository at one commit -> a checkpoint whose Q and K are read by byte ranges.

`hf://org/name[@revision][/path]`, an address of the hub, or plain `org/name`. The revision is resolved to a commit
first and everything is read at that commit. What the user's hub cache holds of it is read from there.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any, cast
from urllib.parse import quote

from qkform.checkpoints.adapter import AdapterFolder, is_adapter
from qkform.checkpoints.ahead import AheadReader
from qkform.checkpoints.base import MAX_JSON_BYTES, Checkpoint, Local, parse_json, refuse_pointer
from qkform.checkpoints.choice import GGUF, INDEX, ONNX, suffix_of
from qkform.checkpoints.hub_cache import COMMIT, cache_folder, cached_commit, snapshot, snapshot_file
from qkform.checkpoints.hub_names import HubName, hub_name
from qkform.checkpoints.listing import Ranges, Whole, listed
from qkform.checkpoints.opening import logical, open_checkpoint
from qkform.checkpoints.ranged import Headers, HubCheckpoint
from qkform.checkpoints.remote import Refused, Target, Unreachable, Web, refused
from qkform.checkpoints.safetensors import Incomplete, parse_index
from qkform.errors import CheckpointError, ConfigError, SourceError


def open_hub(
    repo_id: str, *, revision: str | None, token: str | None, download: bool, source: str
) -> Checkpoint | AdapterFolder:
    """A model of the hub at one commit; `repo_id` is anything that `hub_name` knows.

    Raises SourceError (missing, gated, offline, or readable only with `download`), CheckpointError or ConfigError.
    """
    name = hub_name(repo_id)
    if name is None:
        raise SourceError(f"{repo_id[:200]!r} is not a hub id; write org/name")
    if revision and name.revision and revision != name.revision:
        raise SourceError(f"{source[:200]} names revision {name.revision!r}, and --revision {revision!r}")
    revision = (revision or name.revision or "").strip() or None
    _refuse_bad_token(token)
    try:
        return _Opening(name, revision, token, source, download=download).checkpoint()
    except Unreachable as error:
        raise SourceError(f"{source[:200]}: {error}{_otherwise(name, source)}") from None


class _Opening:
    """One repository on its way to a checkpoint."""

    def __init__(
        self, name: HubName, revision: str | None, token: str | None, source: str, *, download: bool
    ) -> None:
        from huggingface_hub import constants

        self.name, self.revision, self.token, self.source = name, revision, token, source
        self.download = download
        self.endpoint, self.offline = constants.ENDPOINT, constants.is_offline_mode()

    def checkpoint(self) -> Checkpoint | AdapterFolder:
        if self.offline:
            return self._offline(f"{self.source[:200]}: HF_HUB_OFFLINE is set")
        if self.revision and COMMIT.fullmatch(self.revision):
            found = self._cached(self.revision)
            if found is not None:
                return found
        self.web = Web(self.token)
        try:
            commit, sizes = self._listing()
        except Unreachable as error:
            return self._offline(f"{self.source[:200]}: {self.endpoint} cannot be reached ({error})")
        except Refused as error:
            raise self._refusal(error) from None
        chosen = listed(
            sizes, self.name, commit
        )  # what of it the cache holds is read from there, file by file
        try:
            if isinstance(chosen, Whole):
                return self._downloaded(chosen, commit, sizes)
            return self._ranged(chosen, commit, sizes)
        except Refused as error:
            raise self._refusal(error) from None

    def _listing(self) -> tuple[str, dict[str, int | None]]:
        """The commit, and every file of the repository with its size."""
        address = f"{self.endpoint}/api/models/{self.name.repo_id}/revision/"
        address += quote(self.revision or "main", safe="") + "?blobs=true"
        where = f"the list of files of {self.name.repo_id}"
        body = self.web.whole(Target(address, where), MAX_JSON_BYTES, counted=False)
        try:
            answer = parse_json(body, where)
        except ConfigError as error:
            raise SourceError(f"{error}; is {self.endpoint} a hub?") from None
        commit, siblings = (answer.get("sha"), answer.get("siblings")) if isinstance(answer, dict) else (0, 0)
        if not isinstance(commit, str) or not COMMIT.fullmatch(commit) or not isinstance(siblings, list):
            raise SourceError(
                f"{self.endpoint} answers for {self.name.repo_id} without a commit and its files"
            )
        return commit, dict(_files(siblings))

    def _cached(self, commit: str) -> Checkpoint | AdapterFolder | None:
        """The checkpoint in the user's cache, if it is beyond doubt without the repository's list.

        That is a file that was named and needs no others, or safetensors called "model" to the last shard; beside
        their config.
        """
        folder = snapshot(self.name.repo_id, commit)
        place = folder / self.name.path if folder is not None else None
        if place is None or not place.exists():
            return None
        inside = place if place.is_dir() else place.parent
        standard = [place / f"model.safetensors{end}" for end in (INDEX, "")] if inside is place else [place]
        alone = suffix_of(place.name) not in (*GGUF, *ONNX)  # parts and data lie beside those
        if not (alone and any(file.is_file() for file in standard) and (inside / "config.json").is_file()):
            return None
        try:
            return self._local(place, commit)
        except Incomplete:
            return None

    def _local(self, place: Path, commit: str) -> Checkpoint | AdapterFolder:
        if is_adapter(place):
            return AdapterFolder(place, commit)
        checkpoint = open_checkpoint(place, source=self.source)
        cast(Local, checkpoint).revision = commit
        return checkpoint

    def _offline(self, why: str) -> Checkpoint | AdapterFolder:
        """Whatever the cache has of the revision."""
        commit = cached_commit(self.name.repo_id, self.revision or "main")
        folder = snapshot(self.name.repo_id, commit) if commit else None
        place = folder / self.name.path if folder is not None else None
        if commit is None or place is None or not place.exists():
            at = f" at {self.revision[:80]}" if self.revision else ""
            raise SourceError(
                f"{why}, and your hub cache does not have {self.name}{at}; "
                f"when online, `hf download {self.name.repo_id}` puts it there{_otherwise(self.name, self.source)}"
            )
        try:
            return self._local(place, commit)
        except SourceError as error:
            if isinstance(error, CheckpointError) and not isinstance(error, Incomplete):
                raise  # a damaged file is not a missing one
            raise SourceError(
                f"{why}, and your hub cache has not all of {self.name} at {commit[:12]}: {error}"
            ) from None

    def _target(self, file: str, commit: str, sizes: Mapping[str, int | None]) -> Target:
        from huggingface_hub import hf_hub_url

        url = hf_hub_url(self.name.repo_id, file, revision=commit, endpoint=self.endpoint)
        return Target(url, f"{self.name.repo_id}/{file}", sizes.get(file))

    def _ranged(
        self, chosen: Ranges, commit: str, sizes: Mapping[str, int | None]
    ) -> Checkpoint | AdapterFolder:
        root = Path(self.name.repo_id)
        folder = root / PurePosixPath(chosen.folder)
        config_file = str(PurePosixPath(chosen.folder) / "config.json")
        config, config_path, expected = None, None, None
        if config_file in sizes:
            config_path = folder / "config.json"
            config = self._document(config_file, commit, sizes)
            if not isinstance(config, dict):
                raise ConfigError(
                    f"{config_path} holds a JSON {type(config).__name__}; a model config is an object"
                )
        files = [root / file for file in chosen.files]
        if chosen.index is not None:
            expected = parse_index(self._document(chosen.index, commit, sizes), root / chosen.index)
            files = sorted(set(expected.values()))
        targets, local = {}, {}
        for path in files:
            file = path.relative_to(root).as_posix()
            if file not in sizes:
                raise CheckpointError(
                    f"{root / (chosen.index or '')} names {file[:200]}, which the repository does not have"
                )
            targets[path] = self._target(file, commit, sizes)
            cached = snapshot_file(self.name.repo_id, commit, file)
            if cached is not None:
                local[path] = cached
        reader = AheadReader(self.web, targets, local, self._refusal)
        return logical(
            HubCheckpoint(
                self.source,
                commit,
                Headers(self.web, reader, targets, local),
                reader,
                config,
                config_path,
                expected,
            )
        )

    def _document(self, file: str, commit: str, sizes: Mapping[str, int | None]) -> Any:
        target = self._target(file, commit, sizes)
        cached = snapshot_file(self.name.repo_id, commit, file)
        data = cached.read_bytes() if cached is not None else self.web.whole(target, MAX_JSON_BYTES)
        refuse_pointer(Path(target.name), data[:64])
        return parse_json(data, target.name)

    def _downloaded(
        self, chosen: Whole, commit: str, sizes: Mapping[str, int | None]
    ) -> Checkpoint | AdapterFolder:
        """The files that ranges cannot serve, in the user's hub cache, opened there."""
        files, what = chosen.files, chosen.what
        if chosen.index is not None:
            places = parse_index(self._document(chosen.index, commit, sizes), Path(chosen.index))
            shards = sorted({path.as_posix() for path in places.values()})
            for file in shards:
                if file not in sizes:
                    raise CheckpointError(
                        f"{chosen.index} names {file[:200]}, which the repository does not have"
                    )
            files, what = (*shards, *files), f"{len(shards)} {what}"
        missing = [f for f in files if snapshot_file(self.name.repo_id, commit, f) is None]
        if missing and not (self.download or chosen.small):
            raise SourceError(
                f"{self.source[:200]} has no safetensors that can be read in parts, only {what}; "
                f"--download would fetch {_amount(missing, sizes)} into your hub cache ({cache_folder()}) and scan it"
            )
        for file in missing:
            self._fetch(file, commit)
        folder = snapshot(self.name.repo_id, commit)
        if folder is None:
            raise SourceError(f"{self.source[:200]} was downloaded, and is not in {cache_folder()}")
        return self._local(folder / chosen.open, commit)

    def _fetch(self, file: str, commit: str) -> None:
        from huggingface_hub import hf_hub_download

        try:
            hf_hub_download(
                self.name.repo_id,
                file,
                revision=commit,
                token=self.token,
                endpoint=self.endpoint,
                library_name="qkform",
            )
        except Exception as error:  # of many kinds: the client's, the system's, the transport's
            response = getattr(error, "response", None)
            if response is not None:
                raise self._refusal(refused(response, f"{self.name.repo_id}/{file}")) from None
            words = getattr(error, "strerror", None) or type(error).__name__
            raise SourceError(f"{self.name.repo_id}/{file} could not be downloaded: {words}") from None

    def _refusal(self, answer: Refused) -> SourceError:
        """A definite answer in words, with what would work."""
        repo, status = self.name.repo_id, answer.status
        page = f"{self.endpoint}/{repo}"
        given = "the token that was used" if self._has_token() else "no token was given"
        log_in = "log in with `hf auth login`, or pass --token"
        if answer.code == "GatedRepo":
            text = (
                f"{self.source[:200]} is gated (status {status} for {answer.name}; {given}): accept its terms at "
                f"{page}, then {log_in}"
            )
        elif answer.code == "Disabled":
            text = f"{self.source[:200]} is disabled on the hub (status {status} for {answer.name})"
        elif answer.code == "RevisionNotFound":
            text = (
                f"{self.source[:200]} has no revision {(self.revision or 'main')[:80]!r} (status {status}); branches, "
                f"tags and commits are listed at {page}/tree/main"
            )
        elif answer.code == "EntryNotFound" or (status == 404 and answer.code != "RepoNotFound"):
            text = f"{answer.name} is not in the repository (status {status}); see {page}/tree/main"
        elif status in (401, 404):
            text = (
                f"the hub has no model {repo!r} that you may see (status {status}; {given}): check the name at "
                f"{page}; if it is private, {log_in}{_otherwise(self.name, self.source)}"
            )
        elif status == 403:
            text = f"the hub does not give out {answer.name} (status 403; {given}): {log_in} with the right to read it"
        else:
            text = f"{answer.name} cannot be fetched: the server answered {status}"
        return SourceError(text)

    def _has_token(self) -> bool:
        from huggingface_hub import get_token

        return bool(self.token or get_token())


def _files(siblings: Sequence[Any]) -> Iterator[tuple[str, int | None]]:
    """(path in the repository, bytes) of every file with a name that stays inside it."""
    for entry in siblings:
        file, size = (entry.get("rfilename"), entry.get("size")) if isinstance(entry, dict) else (None, None)
        if isinstance(file, str) and _stays_inside(file):
            yield file, size if type(size) is int and 0 <= size < 2**63 else None


def _stays_inside(file: str) -> bool:
    return not any(c in file for c in "\0\\") and not any(p in ("", ".", "..") for p in file.split("/"))


def _refuse_bad_token(token: str | None) -> None:
    """A token with a line break in it would make the client quote it in an error."""
    from huggingface_hub import get_token

    for value, where in ((token, "the token"), (token or get_token(), "the saved token")):
        if value is not None and not re.fullmatch(r"[\x21-\x7e]{1,4096}", value):
            raise SourceError(f"{where} holds characters that no token has (a space, a line break?)")


def _amount(files: Sequence[str], sizes: Mapping[str, int | None]) -> str:
    known = [sizes.get(file) for file in files]
    total = sum(size for size in known if size is not None)
    size = f"{total / 1e9:,.2f} GB" if total >= 1e9 else f"{total / 1e6:,.1f} MB"
    more = "at least " if None in known else ""
    return f"{more}{size} ({', '.join(files[:3])}{f' and {len(files) - 3} more' if len(files) > 3 else ''})"


def _otherwise(name: HubName, source: str) -> str:
    """The other reading of a name that is not written as an address."""
    return "" if name.explicit else f"; and there is no file or folder named {source[:200]!r}"
