"""`prepare(...)`: a corpus as tokens in a memory map, made once and found again by its content.

    CACHE/tokens/<key>/manifest.json          what was made, with size, sha256 and time of each file; written last
    CACHE/tokens/<key>/train.bin              little-endian uint16, or uint32 for more than 65,536 tokens
    CACHE/tokens/<key>/held_out.bin
    CACHE/tokens/<key>/counts.npy             (2, vocabulary) how often each token stands in train, in held_out
    CACHE/tokens/<key>.lock                   held while it is made: a second process waits, then finds it
    CACHE/tokens/.tmp-<key>/                  being made; what a killed process left is thrown away by the next

The key is the sha256 of the text (the bytes of the files), the tokenizer and the settings: a changed text, another key.
A document ends with the separator; the stream is cut into sequences when it is opened, so that the length is no part of
the key, and what is left over at the end of a stream (less than one sequence) is not used.
"""

from __future__ import annotations

import hashlib
import json
from array import array
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt
from filelock import FileLock, Timeout

from qkform.cache import cache_folder
from qkform.errors import DataError
from qkform.training.data import split as splitting
from qkform.training.data.documents import Corpus, Piece, Skipped
from qkform.training.data.tokens import Tokens
from qkform.training.data.vocabulary import encoder, fingerprint, name_of, separator_id, size_of
from qkform.training.data.writing import published, said_plainly

FORMAT = 1
BATCH_CHARACTERS = 2**22  # encoded at a time
BATCH_PIECES = 4096
BLOCK = 2**22  # tokens copied at a time
TOLD_CHARACTERS = 2**26  # between two words of progress

Progress = Callable[[str], None]


def prepare(
    corpus: Corpus,
    tokenizer: Any,
    seq_len: int,
    *,
    held_out: float = 0.05,
    cache: Path | None = None,
    on_progress: Progress | None = None,
) -> Tokens:
    """The tokens of `corpus`, from the cache or made now; DataError when there is not one sequence to train on.

    held_out   share of the tokens that is never trained on, 0 to .5: whole documents, chosen by their text
    """
    if seq_len < 2:
        raise DataError(f"seq_len={seq_len}: a sequence has at least two tokens")
    if not 0 <= held_out <= 0.5:
        raise DataError(f"held_out={held_out}: a share from 0 to 0.5 is wanted")
    say = on_progress or (lambda _: None)
    shelf = (cache_folder() if cache is None else cache).absolute() / "tokens"
    identity = corpus.identity()
    made_of = {
        "format": FORMAT,
        "corpus": _sha256(identity),
        "tokenizer": fingerprint(tokenizer),
        "held_out": held_out,
    }
    key = _sha256(made_of)
    folder = shelf / key
    with said_plainly(f"the tokens of {corpus.name}", shelf):
        manifest = _whole(folder)
        if manifest is None:
            shelf.mkdir(parents=True, exist_ok=True)
            with _locked(shelf / f"{key}.lock", say):
                manifest = _whole(folder)  # another process may have made it meanwhile
                if manifest is None:
                    if folder.exists():
                        say(f"the tokens in {folder} are damaged; making them again")
                    say(f"tokenizing {corpus.name}")
                    manifest = _made(folder, corpus, tokenizer, identity, made_of, say)
    names = {"corpus": corpus.name, "tokenizer": name_of(tokenizer)}  # as they are called now
    tokens = Tokens(folder, key, seq_len, manifest | names)
    _enough(tokens, corpus.name, held_out)
    return tokens


def _enough(tokens: Tokens, name: str, share: float) -> None:
    for part, count in (("to train on", "n_tokens"), ("held out", "held_out_tokens")):
        have = int(tokens.manifest[count])
        if have < tokens.seq_len and (part == "to train on" or share > 0):
            skipped = Skipped(Counter(tokens.manifest["skipped"]), list(tokens.manifest["skipped_places"]))
            said = f" ({skipped})" if skipped.counts else ""
            raise DataError(
                f"{name}: {have} tokens {part}, fewer than one sequence of {tokens.seq_len}{said}; "
                "use more text, shorter sequences, or another share of held-out text"
            )


def _locked(path: Path, say: Progress) -> AbstractContextManager[Any]:
    """The lock, taken, to be let go at the end of a `with`; says so when it has to wait."""
    lock = FileLock(path)
    try:
        return lock.acquire(timeout=0)
    except Timeout:
        say("another process is making these tokens; waiting for it")
        return lock.acquire()


# ---- making


def _made(
    folder: Path,
    corpus: Corpus,
    tokenizer: Any,
    identity: dict[str, Any],
    made_of: dict[str, Any],
    say: Progress,
) -> dict[str, Any]:
    size = size_of(tokenizer)
    dtype = np.dtype("<u2" if size <= 2**16 else "<u4")
    skipped = Skipped()
    separator = separator_id(tokenizer)
    with published(folder) as work:
        stream = work / "all.bin"
        with stream.open("wb") as out:
            pieces = _told(corpus.pieces(skipped), corpus.name, say)
            lengths, hashes = _encode(pieces, tokenizer, separator, dtype, out)
        parts = splitting.split(lengths, hashes, made_of["held_out"])
        counts = np.zeros((2, size), np.int64)
        files = _divide(stream, work, parts, dtype, separator, counts)
        stream.unlink()
        np.save(work / "counts.npy", counts)
        files["counts.npy"] = _file_entry(work / "counts.npy")
        if corpus.identity() != identity:
            raise DataError(f"{corpus.name} changed while it was read; nothing was kept, run it again")
        manifest = {
            "corpus": corpus.name,
            "made_of": made_of,
            "tokenizer": name_of(tokenizer),
            "vocab_size": size,
            "separator": separator,
            "specials": sorted(set(tokenizer.all_special_ids)),
            "dtype": dtype.str,
            "documents": len(lengths),
            "n_tokens": int(counts[0].sum()),
            "held_out_tokens": int(counts[1].sum()),
            "unknown_tokens": 0
            if tokenizer.unk_token_id is None
            else int(counts[:, tokenizer.unk_token_id].sum()),
            "held_out_by": parts.by,
            "held_out_documents": parts.documents,
            "skipped": dict(skipped.counts),
            "skipped_places": skipped.places,
            "files": files,
        }
        (work / "manifest.json").write_text(json.dumps(manifest, indent=1), encoding="utf-8")
    return manifest


def _encode(
    pieces: Iterator[Piece], tokenizer: Any, separator: int, dtype: np.dtype[Any], out: IO[bytes]
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.uint64]]:
    """Writes the ids of all documents, each with its separator; (n_documents,) lengths and hashes of their texts."""
    lengths, hashes = array("q"), array("Q")
    encode = encoder(tokenizer)
    running = hashlib.blake2b(digest_size=8)
    length = -1  # of the document that is under way; -1: none

    def close() -> None:
        nonlocal length, running
        if length >= 0:
            out.write(np.array([separator], dtype).tobytes())
            lengths.append(length + 1)
            hashes.append(int.from_bytes(running.digest(), "little"))
        length, running = 0, hashlib.blake2b(digest_size=8)

    for batch in _batched(pieces):
        for piece, ids in zip(batch, encode([piece.text for piece in batch]), strict=True):
            if piece.begins:
                close()
            running.update(piece.text.encode())
            length += len(ids)
            out.write(np.asarray(ids, dtype).tobytes())
    close()
    return np.frombuffer(lengths, np.int64), np.frombuffer(hashes, np.uint64)


def _told(pieces: Iterator[Piece], name: str, say: Progress) -> Iterator[Piece]:
    """The pieces, and a word at every TOLD_CHARACTERS of them."""
    characters, told = 0, TOLD_CHARACTERS
    for piece in pieces:
        yield piece
        characters += len(piece.text)
        if characters >= told:
            say(f"tokenizing {name}: {characters / 1e6:,.0f} million characters")
            told = characters + TOLD_CHARACTERS


def _batched(pieces: Iterator[Piece]) -> Iterator[list[Piece]]:
    batch: list[Piece] = []
    characters = 0
    for piece in pieces:
        batch.append(piece)
        characters += len(piece.text)
        if characters >= BATCH_CHARACTERS or len(batch) >= BATCH_PIECES:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch


def _divide(
    stream: Path,
    work: Path,
    parts: splitting.Split,
    dtype: np.dtype[Any],
    separator: int,
    counts: npt.NDArray[np.int64],
) -> dict[str, dict[str, Any]]:
    """Copies each stretch into its file and counts its tokens; a document that was cut ends with a separator too."""
    digests = [hashlib.sha256(), hashlib.sha256()]
    with (
        stream.open("rb") as source,
        (work / "train.bin").open("wb") as train,
        (work / "held_out.bin").open("wb") as held_out,
    ):
        files = [train, held_out]
        at = 0
        for stop, held in zip(parts.stops.tolist(), parts.is_held_out.tolist(), strict=True):
            while at < stop:
                block = np.fromfile(source, dtype, min(BLOCK, stop - at))
                at += len(block)
                if at == stop:
                    block[-1] = separator
                counts[int(held)] += np.bincount(block, minlength=counts.shape[1])
                data = block.tobytes()
                digests[held].update(data)
                files[held].write(data)
    return {
        name: _file_entry(work / name, digest.hexdigest())
        for name, digest in zip(("train.bin", "held_out.bin"), digests, strict=True)
    }


def _sha256(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def _file_entry(path: Path, sha256: str | None = None) -> dict[str, Any]:
    if sha256 is None:
        sha256 = hashlib.sha256(path.read_bytes()).hexdigest()
    status = path.stat()
    return {"bytes": status.st_size, "sha256": sha256, "mtime_ns": status.st_mtime_ns}


def _whole(folder: Path) -> dict[str, Any] | None:
    """The manifest, if every file is what it says: sizes always, sha256 where a time moved."""
    try:
        manifest: dict[str, Any] = json.loads((folder / "manifest.json").read_bytes())
        for name, entry in manifest["files"].items():
            path = folder / name
            status = path.stat()
            if status.st_size != entry["bytes"]:
                return None
            if status.st_mtime_ns != entry["mtime_ns"]:
                with path.open("rb") as file:
                    if hashlib.file_digest(file, "sha256").hexdigest() != entry["sha256"]:
                        return None
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    return manifest
