"""`encode`: sentences of the agreement task as tokens, with the subject, the attractors and both verbs marked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, get_args

from qkform.dynamics.agreement_words import MASK, PAD, vocabulary
from qkform.errors import DynamicsError

if TYPE_CHECKING:
    from qkform.dynamics.agreement import Sentence

Objective = Literal["causal", "masked"]
Tensor = Any
IGNORED = -100  # the label of a token that no loss counts


@dataclass(frozen=True, eq=False)
class Encoded:
    """B sentences of N tokens, padded on the right; torch tensors.

    input_ids       (B, N) int64; under "masked" the verb is the mask token
    attention_mask  (B, N) int64, 1 for tokens, 0 for padding
    labels          (B, N) int64: the right verb where it stands, -100 elsewhere, as models of transformers take them
                    (a causal model shifts them itself)
    relevant        (B, N) bool: the tokens of the subject
    attractors      (B, N) bool: the tokens of the nouns in between
    verb            (B,) int64: where the verb stands
    row             (B,) int64: whose output predicts the verb: `verb` under "masked", under "causal" the token before
    correct, wrong  (B,) int64: the tokens of the right verb, and of the same verb in the other number
    """

    input_ids: Tensor
    attention_mask: Tensor
    labels: Tensor
    relevant: Tensor
    attractors: Tensor
    verb: Tensor
    row: Tensor
    correct: Tensor
    wrong: Tensor
    objective: Objective

    def __len__(self) -> int:
        return len(self.input_ids)

    @property
    def batch(self) -> dict[str, Tensor]:
        """What a model of transformers takes: model(**encoded.batch)."""
        return {name: getattr(self, name) for name in ("input_ids", "attention_mask", "labels")}

    def margin(self, logits: Tensor) -> Tensor:
        """(B,): the logit of the right verb over that of the wrong one, from logits (B, N, vocabulary).

        Above 0 the model has the agreement right; (margin > 0).float().mean() is its accuracy, chance .5.
        """
        import torch

        wanted = (*self.input_ids.shape,)
        if getattr(logits, "ndim", 0) != 3 or tuple(logits.shape[:2]) != wanted:
            raise DynamicsError(
                f"logits have shape {tuple(getattr(logits, 'shape', ()))}; expected {wanted} and the vocabulary"
            )
        least = int(max(self.correct.max(), self.wrong.max())) + 1 if len(self) else 0
        if logits.shape[2] < least:
            raise DynamicsError(f"logits are of {logits.shape[2]} tokens; the verbs need {least} or more")
        at = logits[
            torch.arange(len(self), device=logits.device), self.row.to(logits.device)
        ]  # (B, vocabulary)
        chosen = torch.stack([self.correct, self.wrong]).T.to(logits.device)
        found = at.gather(1, chosen)
        return found[:, 0] - found[:, 1]


def encode(
    sentences: Sequence[Sentence], tokenizer: Any = None, *, objective: Objective = "causal"
) -> Encoded:
    """Sentences as tokens of a fast tokenizer of transformers; without one, every word is a token.

    tokenizer   any `PreTrainedTokenizerFast`, with the special tokens that it adds by itself. None: the built-in
                encoding, a token for each word of `vocabulary()`, no special tokens
    objective   "causal": the verb is predicted from what stands before it; "masked": the mask token stands in its
                place, and all other words are seen

    A subject of several tokens is relevant in all of them. Both verbs must be one token each: DynamicsError names one
    that is not, and choosing `verbs=("is",)` helps.
    """
    import torch

    if objective not in get_args(Objective):
        raise DynamicsError(f"objective is {objective!r:.40}; known: {', '.join(get_args(Objective))}")
    if not len(sentences):
        raise DynamicsError("there are no sentences to encode")
    spell = _Words() if tokenizer is None else _Tokens(tokenizer)
    masked = objective == "masked"
    if masked and spell.mask is None:
        raise DynamicsError(
            f"objective='masked' needs a mask token, and {type(tokenizer).__name__} has none; use 'causal'"
        )
    lines = [spell(sentence) for sentence in sentences]
    shape = (len(lines), max(len(line.ids) for line in lines))
    ids = torch.full(shape, spell.pad, dtype=torch.int64)
    attended, labels = torch.zeros(shape, dtype=torch.int64), torch.full(shape, IGNORED, dtype=torch.int64)
    relevant, attractors = torch.zeros(shape, dtype=torch.bool), torch.zeros(shape, dtype=torch.bool)
    for i, (line, sentence) in enumerate(zip(lines, sentences, strict=True)):
        n = len(line.ids)
        ids[i, :n] = torch.tensor(line.ids)
        attended[i, :n] = 1
        labels[i, line.verb] = line.ids[line.verb]
        if masked:
            ids[i, line.verb] = spell.mask
        word = torch.tensor([-1 if w is None else w for w in line.words])
        relevant[i, :n] = word == sentence.subject
        attractors[i, :n] = torch.isin(word, torch.tensor(sentence.attractors, dtype=torch.int64))
    verb = torch.tensor([line.verb for line in lines])
    return Encoded(
        input_ids=ids,
        attention_mask=attended,
        labels=labels,
        relevant=relevant,
        attractors=attractors,
        verb=verb,
        row=verb if masked else verb - 1,
        correct=torch.tensor([line.ids[line.verb] for line in lines]),
        wrong=torch.tensor([line.wrong for line in lines]),
        objective=objective,
    )


@dataclass(frozen=True)
class _Line:
    """One sentence in tokens."""

    ids: list[int]
    words: list[int | None]  # of every token, which word it is of; None for special tokens
    verb: int  # the token
    wrong: int  # the id of the other verb


class _Words:
    """A token for every word."""

    def __init__(self) -> None:
        self._ids = {word: i for i, word in enumerate(vocabulary())}
        self.pad, self.mask = self._ids[PAD], self._ids[MASK]

    def __call__(self, sentence: Sentence) -> _Line:
        try:
            ids = [self._ids[word] for word in sentence.words]
            wrong = self._ids[sentence.wrong]
        except KeyError as error:
            raise DynamicsError(f"{error} is not in the built-in vocabulary; pass a tokenizer") from None
        return _Line(ids, list(range(len(ids))), sentence.verb, wrong)


class _Tokens:
    """The tokens of a tokenizer, told apart by the characters that they stand for."""

    def __init__(self, tokenizer: Any) -> None:
        if not getattr(tokenizer, "is_fast", False):
            raise DynamicsError(
                f"tokenizer is a {type(tokenizer).__name__}; expected a fast one of transformers, which tells where "
                "its tokens come from"
            )
        self._tokenizer = tokenizer
        self.mask: int | None = getattr(tokenizer, "mask_token_id", None)
        pad = getattr(tokenizer, "pad_token_id", None)
        self.pad: int = pad if pad is not None else 0  # closed by the attention mask, whatever it is

    def __call__(self, sentence: Sentence) -> _Line:
        ids, words = self._spelt(sentence.words)
        verb = self._only(words, sentence.verb, sentence.correct)
        other = list(sentence.words)
        other[sentence.verb] = sentence.wrong
        ids_other, words_other = self._spelt(other)
        wrong = ids_other[self._only(words_other, sentence.verb, sentence.wrong)]
        if wrong == ids[verb]:
            raise DynamicsError(
                f"{sentence.correct!r} and {sentence.wrong!r} are the same token to this tokenizer"
            )
        if sentence.subject not in words:
            raise DynamicsError(
                f"{sentence.words[sentence.subject]!r} has no token of its own in this tokenizer"
            )
        return _Line(ids, words, verb, wrong)

    def _spelt(self, words: Sequence[str]) -> tuple[list[int], list[int | None]]:
        """The ids, and of each the word that it is of."""
        text, ends = "", []
        for word in words:
            text += word if word == "." or not text else f" {word}"
            ends.append(len(text))
        found = self._tokenizer(text, return_offsets_mapping=True)
        of: list[int | None] = []
        for start, end in found["offset_mapping"]:
            # a token may hold the space before its word: its last character tells
            of.append(None if start == end else next(i for i, stop in enumerate(ends) if end <= stop))
        return list(found["input_ids"]), of

    @staticmethod
    def _only(words: list[int | None], at: int, verb: str) -> int:
        """The one token of a verb."""
        found = [i for i, word in enumerate(words) if word == at]
        if len(found) != 1:
            raise DynamicsError(
                f"the verb {verb!r} is {len(found)} tokens to this tokenizer; it must be one: choose others, as in "
                "sentences(..., verbs=('is',))"
            )
        return found[0]
