"""The tokenizer: one trained on the corpus and cached by content, or one by name; its special tokens for a config.

The trained one is a byte-level BPE (Radford et al. 2019, GPT-2) in transformers' own class, saved and loaded as any.
"""

from __future__ import annotations

import hashlib
import json
import operator
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from filelock import FileLock

from qkform.cache import cache_folder
from qkform.errors import DataError
from qkform.training.data.documents import Corpus, Skipped
from qkform.training.data.extras import imported
from qkform.training.data.writing import published, said_plainly

SPECIALS = {
    "pad_token": "[PAD]",
    "unk_token": "[UNK]",
    "cls_token": "[CLS]",
    "sep_token": "[SEP]",
    "mask_token": "[MASK]",
}
TEXT_LIMIT = 2**27  # characters of the corpus that a tokenizer is trained on, at most
SUMS = "sha256.json"  # beside the tokenizer's files: what they were when they were written
_FORMAT = 1

Progress = Callable[[str], None]


def tokenizer(
    name: str | Path = "trained",
    corpus: Corpus | None = None,
    *,
    vocab_size: int = 512,
    cache: Path | None = None,
    on_progress: Progress | None = None,
) -> Any:
    """The tokenizer `name`: "trained" on `corpus` with `vocab_size` tokens, or of a folder or hub id.

    A trained one has a token for each byte that occurs in the text it saw (at most TEXT_LIMIT characters), the special
    tokens, and merges for the rest; a byte that it never saw becomes [UNK]. A small text may not have merges enough.
    Training is deterministic and its result kept in the cache, by the text, the size and the version of `tokenizers`.
    """
    if str(name) != "trained":
        return _named(str(name))
    if corpus is None:
        raise DataError("a tokenizer is trained on a corpus; pass one, or the name or folder of a tokenizer")
    try:
        vocab_size = operator.index(vocab_size)
    except TypeError:
        raise DataError(f"vocab_size={vocab_size!r:.60}: expected a whole number") from None
    if not len(SPECIALS) < vocab_size <= 2**24:
        raise DataError(f"vocab_size={vocab_size}: at least 300 is useful, at most {2**24} possible")
    tokenizers = imported("tokenizers", "a tokenizer")
    identity = corpus.identity()
    settings = {
        "format": _FORMAT,
        "tokenizers": tokenizers.__version__,
        "vocab_size": vocab_size,
        "specials": SPECIALS,
        "text_limit": TEXT_LIMIT,
        "corpus": identity,
    }
    key = hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()
    shelf = (cache_folder() if cache is None else cache).absolute() / "tokenizers"
    with said_plainly(f"the tokenizer of {corpus.name}", shelf):
        shelf.mkdir(parents=True, exist_ok=True)
        with FileLock(shelf / f"{key}.lock"):
            folder = shelf / key
            if not _is_whole(folder):
                if on_progress:
                    on_progress(f"training a tokenizer of {vocab_size} tokens on {corpus.name}")
                _train(corpus, identity, vocab_size, folder)
    found = _named(str(folder))
    found.name_or_path = f"trained on {corpus.name}"  # not where this machine keeps it
    return found


def special_ids(tokenizer: Any) -> dict[str, int]:
    """Vocabulary size and special tokens under the names of a model's config; what the tokenizer lacks is left out.

    A beginning that it does not have is its [CLS], an end its [SEP].
    """
    ids = {
        "vocab_size": size_of(tokenizer),
        "pad_token_id": tokenizer.pad_token_id,
        "bos_token_id": _first(tokenizer.bos_token_id, tokenizer.cls_token_id),
        "eos_token_id": _first(tokenizer.eos_token_id, tokenizer.sep_token_id),
        "cls_token_id": tokenizer.cls_token_id,
        "sep_token_id": tokenizer.sep_token_id,
        "mask_token_id": tokenizer.mask_token_id,
    }
    return {name: value for name, value in ids.items() if value is not None}


def size_of(tokenizer: Any) -> int:
    """The room that its ids need: one more than the largest. Some tokenizers number with gaps."""
    return max(len(tokenizer), max(tokenizer.get_vocab().values(), default=-1) + 1)


def separator_id(tokenizer: Any) -> int:
    """The token that ends a document: the tokenizer's end of text, or its [SEP]."""
    found = _first(tokenizer.eos_token_id, tokenizer.sep_token_id)
    if found is None:
        raise DataError(
            f"the tokenizer {name_of(tokenizer)} has neither eos_token nor sep_token to put between documents; "
            "give it one: tokenizer.add_special_tokens({'eos_token': ...})"
        )
    return found


def fingerprint(tokenizer: Any) -> str:
    """The sha256 of everything that decides which ids a text gets."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:
        text = json.dumps([backend.to_str(), special_ids(tokenizer)], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()
    with tempfile.TemporaryDirectory() as folder:
        tokenizer.save_pretrained(folder)
        found = hashlib.sha256(type(tokenizer).__name__.encode())
        for path in sorted(Path(folder).rglob("*")):
            if path.is_file():
                found.update(path.name.encode() + b"\0" + path.read_bytes())
    return found.hexdigest()


def encoder(tokenizer: Any) -> Callable[[list[str]], list[list[int]]]:
    """Texts -> ids, without special tokens: what looks like one in a text is text."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return lambda texts: [
            tokenizer.encode(text, add_special_tokens=False, split_special_tokens=True) for text in texts
        ]
    own = type(backend).from_str(backend.to_str())
    own.no_truncation()
    own.no_padding()
    own.encode_special_tokens = True
    return lambda texts: [coded.ids for coded in own.encode_batch_fast(texts, add_special_tokens=False)]


def name_of(tokenizer: Any) -> str:
    return getattr(tokenizer, "name_or_path", "") or type(tokenizer).__name__


def _first(*ids: int | None) -> int | None:
    return next((i for i in ids if i is not None), None)


def _named(name: str) -> Any:
    transformers = imported("transformers", "a tokenizer")
    try:
        return transformers.AutoTokenizer.from_pretrained(name)
    except Exception as error:  # tokenizers raises no other for a broken file
        said = " ".join(str(error).split())[:300]
        raise DataError(f"no tokenizer in {name!r}: {said}; pass a folder, a hub id, or 'trained'") from None


def _texts(corpus: Corpus, skipped: Skipped) -> Iterator[str]:
    left = TEXT_LIMIT
    for piece in corpus.pieces(skipped):
        yield piece.text[:left]
        left -= len(piece.text)
        if left <= 0:
            return


def _train(corpus: Corpus, identity: dict[str, Any], vocab_size: int, folder: Path) -> None:
    from transformers import PreTrainedTokenizerFast

    skipped = Skipped()
    backend = _merges(_texts(corpus, skipped), vocab_size)
    have = backend.get_vocab_size()
    if have <= len(SPECIALS):
        said = f" ({skipped})" if skipped.counts else ""
        raise DataError(f"{corpus.name}: no text to train a tokenizer on{said}")
    if have > vocab_size:
        raise DataError(
            f"vocab_size={vocab_size}: {corpus.name} has {have - len(SPECIALS)} different bytes, which with "
            f"{len(SPECIALS)} special tokens make {have} tokens before any are merged; ask for more"
        )
    trained = PreTrainedTokenizerFast(tokenizer_object=backend, **SPECIALS)  # type: ignore[no-untyped-call]
    if corpus.identity() != identity:
        raise DataError(f"{corpus.name} changed while it was read; nothing was kept, run it again")
    with published(folder) as work:
        trained.save_pretrained(work)
        (work / SUMS).write_text(json.dumps(_sums(work)), encoding="utf-8")


def _sums(folder: Path) -> dict[str, str]:
    files = sorted(path for path in folder.iterdir() if path.name != SUMS)
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def _is_whole(folder: Path) -> bool:
    """Whether the files of a tokenizer that was kept are those that were written."""
    try:
        return bool(json.loads((folder / SUMS).read_bytes()) == _sums(folder))
    except (OSError, ValueError):
        return False


def _merges(texts: Iterator[str], vocab_size: int) -> Any:
    """The byte-level BPE of `texts`, special tokens first."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    backend = Tokenizer(models.BPE(unk_token=SPECIALS["unk_token"]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=list(SPECIALS.values()), show_progress=False
    )
    backend.train_from_iterator(texts, trainer)
    return backend
