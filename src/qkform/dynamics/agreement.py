"""The agreement task: English sentences in which one known word, the subject, decides which verb is right.

"The keys near the cabinet are old ." has its subject at 1, an attractor (a noun in between) at 4 and its verb at 5.
`sentences` makes them, `encode` turns them into tokens with the subject marked. Kind of task: arXiv 1611.01368.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from random import Random
from typing import Any, Literal, get_args

from qkform.dynamics import agreement_words as words
from qkform.dynamics.agreement_tokens import Encoded, encode
from qkform.dynamics.agreement_words import Pair, vocabulary
from qkform.errors import DynamicsError

__all__ = ["Encoded", "Sentence", "encode", "sentences", "vocabulary"]

Kind = Literal["prepositional", "object relative", "subject relative"]
Part = Literal["train", "held out"]
By = Literal["sentence", "template", "lemma"]
Number = Literal["singular", "plural"]

MOST = 8  # attractors
HELD = 5  # one in so many sentences, templates or lemmas is held out
_ENOUGH = 50  # draws without a new sentence, times the sentences there are, after which no more are expected


@dataclass(frozen=True)
class Sentence:
    """One sentence, its parts by position in `words`, from 0.

    >>> sentences(2, seed=0, attractors=1)[0].text  # doctest: +SKIP
    'The keys near the cabinet are old.'
    """

    words: tuple[str, ...]  # with the right verb; "." is the last
    subject: int
    verb: int
    attractors: tuple[int, ...]  # nouns between subject and verb, of either number
    number: Number  # of the subject, and so of the right verb
    opposite: int  # how many of the attractors have the other number
    correct: str  # the verb, as in `words`
    wrong: str  # the same verb in the other number

    @property
    def text(self) -> str:
        return " ".join(self.words[:-1]) + self.words[-1]

    @property
    def distance(self) -> int:
        """Words between subject and verb."""
        return self.verb - self.subject - 1


@dataclass(frozen=True)
class _Template:
    """What a sentence is made of, without its words."""

    kinds: tuple[Kind, ...]  # one for each attractor, from left to right
    adjectives: tuple[bool, ...]  # of attractors
    place: bool  # an adverb after the subject
    adverb: bool  # an adverb before the verb

    @property
    def distance(self) -> int:
        """Words between subject and verb; a relative clause has one more than a preposition."""
        extra = sum(kind != "prepositional" for kind in self.kinds)
        return 3 * len(self.kinds) + extra + sum(self.adjectives) + self.place + self.adverb

    @property
    def persons(self) -> tuple[bool, ...]:
        """Which nouns (the subject, then the attractors) must be persons: those that like, notice or find."""
        found = [False] * (len(self.kinds) + 1)
        for i, kind in enumerate(self.kinds):
            if kind == "object relative":
                found[i + 1] = True
            if kind == "subject relative":
                found[i] = True
        return tuple(found)


def sentences(
    n: int,
    seed: int,
    *,
    attractors: int | tuple[int, int] = (0, 2),
    opposite: int | Literal["all"] | None = None,
    distance: int | tuple[int, int] | None = None,
    kinds: Sequence[Kind] = get_args(Kind),
    verbs: Sequence[str] | None = None,
    part: Part | None = None,
    by: By = "sentence",
) -> list[Sentence]:
    """n different sentences in which the verb agrees with the subject, half of them singular, half plural.

    attractors  how many nouns stand between subject and verb, or (least, most); up to 8
    opposite    how many of them have the number that the subject has not; "all"; by default any, each equally often
    distance    words between subject and verb, or (least, most); by default any
    kinds       of the phrases that bring attractors: "prepositional" (near the cabinet), "object relative" (that the
                teacher found), "subject relative" (that noticed the teacher). At most one in a sentence is a relative
    verbs       main verbs by their singular, as ("is", "was"); by default all of `agreement_words.VERBS`
    part        "train" or "held out": which share of all there is. What is held out is the same for every seed and
                every request, one in five
    by          what the parts do not share: "sentence"; "template", the pattern of phrases; or "lemma": no noun of one
                part is in the other (of use for models that know English: to one that learns from these sentences
                alone, a noun that it never saw has no number)

    Sentences 2i and 2i+1 are a pair. With `opposite` left open it differs in the number of subject and verb alone:
    whatever the other words are, both labels are equally frequent. With `opposite` given, every noun of the pair
    changes its number, and the attractors do tell of the label: all opposite means that they say it, inverted.
    An odd n leaves the last sentence alone. The first n of m > n sentences are those of n.

    The same seed gives the same sentences everywhere (only `random.Random.random` is drawn from, which Python keeps).
    DynamicsError for a request that no sentence fits, or that fewer than n do.
    """
    _whole("n", n, 0)
    _whole("seed", seed, 0)
    low, high = _range("attractors", attractors)
    if high > MOST:
        raise DynamicsError(f"attractors goes up to {high}; a sentence has {MOST} at most")
    kinds, pairs = _kinds(kinds), _verbs(verbs)
    if opposite is not None and opposite != "all":
        _whole("opposite", opposite, 0)
        if opposite > low:
            raise DynamicsError(
                f"opposite is {opposite} of {low} attractors; ask for as many attractors, or more"
            )
    if part is not None and part not in get_args(Part):
        raise DynamicsError(f"part is {part!r:.40}; known: {', '.join(get_args(Part))}, None for all")
    if by not in get_args(By):
        raise DynamicsError(f"by is {by!r:.40}; known: {', '.join(get_args(By))}")
    found = [
        template
        for template in _templates(low, high, kinds)
        if distance is None or _within(template.distance, _range("distance", distance))
    ]
    if not found:
        reach = [template.distance for template in _templates(low, high, kinds)]
        raise DynamicsError(
            f"no sentence with {_said((low, high))} attractors has distance {_said(distance)}; "
            f"{f'theirs are {min(reach)} to {max(reach)}' if reach else 'there is no kind of phrase for them'}"
        )
    if by == "template" and part is not None:
        kept = [template for template in found if _held_template(template) == (part == "held out")]
        if not kept:
            raise DynamicsError(
                f"none of the {len(found)} templates that fit is in the part {part!r}; allow more attractors, "
                "distances or kinds"
            )
        found = kept
    nouns = [(_side(words.PERSONS, part, by), True), (_side(words.THINGS, part, by), False)]
    grammar = _Grammar([(noun, person) for group, person in nouns for noun in group], pairs, opposite)
    return grammar.drawn(n, Random(seed), found, None if by != "sentence" else part)


class _Grammar:
    """Templates filled with words."""

    def __init__(
        self, nouns: list[tuple[Pair, bool]], verbs: tuple[Pair, ...], opposite: int | Literal["all"] | None
    ) -> None:
        self._nouns, self._verbs, self._opposite = nouns, verbs, opposite

    def drawn(self, n: int, rng: Random, templates: list[_Template], part: Part | None) -> list[Sentence]:
        """n sentences, in pairs, none twice: every number of attractors, and among them every template, as often."""
        there = 2 * sum(map(self._count, templates))
        share = 1.0 if part is None else 0.7 / HELD if part == "held out" else 0.7 * (1 - 1 / HELD)
        if (
            n > share * there
        ):  # a part by sentence has its share on average, and is asked for no more than 7/10 of it
            more = " in this part that can be counted on" if part else ""
            raise DynamicsError(
                f"n is {n:,}, and there are {int(share * there):,} such sentences{more}; allow more attractors, "
                "distances or verbs"
            )
        by_count: dict[int, list[_Template]] = {}
        for template in filter(self._count, templates):
            by_count.setdefault(len(template.kinds), []).append(template)
        counts = sorted(by_count)
        made: list[Sentence] = []
        seen: set[tuple[str, ...]] = set()
        vain = 0
        while len(made) < n:
            pair, key = self._pair(_one(rng, by_count[_one(rng, counts)]), rng)
            first = min(one.words for one in pair)
            if first in seen or (part and _held(key) != (part == "held out")):
                vain += 1
                if vain > _ENOUGH * there:
                    raise DynamicsError(f"no more than {len(made):,} of {n:,} such sentences were found")
                continue
            seen.add(first)
            made += pair
            vain = 0
        return made[:n]

    def _count(self, template: _Template) -> int:
        """How many pairs of sentences a template has."""
        persons, every = sum(person for _, person in self._nouns), len(self._nouns)
        needed = sum(template.persons)
        nouns = math.perm(persons, needed) * math.perm(max(every - needed, 0), len(template.persons) - needed)
        a = len(template.kinds)
        numbers = (
            2**a if self._opposite is None else 1 if self._opposite == "all" else math.comb(a, self._opposite)
        )
        relative = sum(kind != "prepositional" for kind in template.kinds)
        found: int = (
            nouns
            * numbers
            * len(words.PREPOSITIONS) ** (a - relative)
            * len(words.PAST) ** relative
            * len(words.ADJECTIVES) ** sum(template.adjectives)
            * (len(words.PLACES) if template.place else 1)
            * (len(words.ADVERBS) if template.adverb else 1)
            * len(self._verbs)
            * len(words.PREDICATES)
        )
        return found

    def _pair(self, template: _Template, rng: Random) -> tuple[tuple[Sentence, Sentence], str]:
        """A sentence and its partner, in either order; and what is left of both without their numbers."""
        a = len(template.kinds)
        nouns = self._distinct(template.persons, rng)
        if self._opposite is None:
            differs = [rng.random() < 0.5 for _ in range(a)]
        else:
            count = a if self._opposite == "all" else self._opposite
            chosen = set(_order(rng, a)[:count])
            differs = [i in chosen for i in range(a)]
        text = [_one(rng, words.PREPOSITIONS if k == "prepositional" else words.PAST) for k in template.kinds]
        adjectives = [_one(rng, words.ADJECTIVES) if has else "" for has in template.adjectives]
        place = _one(rng, words.PLACES) if template.place else ""
        adverb = _one(rng, words.ADVERBS) if template.adverb else ""
        verb, predicate = _one(rng, self._verbs), _one(rng, words.PREDICATES)
        plural = rng.random() < 0.5
        kept = [plural != other for other in differs]  # the numbers of the attractors beside this subject

        def made(subject: bool, numbers: Sequence[bool]) -> Sentence:
            line, places = ["The", nouns[0][subject], place], []
            for i, kind in enumerate(template.kinds):
                phrase = ["the", adjectives[i], nouns[i + 1][numbers[i]]]
                if kind == "prepositional":
                    phrase = [text[i], *phrase]
                elif kind == "object relative":
                    phrase = ["that", *phrase, text[i]]
                else:
                    phrase = ["that", text[i], *phrase]
                before = len([word for word in line if word])
                said = [word for word in phrase if word]
                places.append(before + said.index(nouns[i + 1][numbers[i]]))
                line += said
            line = [word for word in (*line, adverb) if word]
            return Sentence(
                words=(*line, verb[subject], predicate, "."),
                subject=1,
                verb=len(line),
                attractors=tuple(places),
                number="plural" if subject else "singular",
                opposite=sum(number != subject for number in numbers),
                correct=verb[subject],
                wrong=verb[not subject],
            )

        others = kept if self._opposite is None else [not number for number in kept]
        return (made(plural, kept), made(not plural, others)), " ".join(made(False, [False] * a).words)

    def _distinct(self, persons: Sequence[bool], rng: Random) -> list[Pair]:
        """A noun for every slot, none twice; the slots of persons are filled first."""
        free = list(self._nouns)
        found: dict[int, Pair] = {}
        for slot in sorted(range(len(persons)), key=lambda i: not persons[i]):
            fitting = [i for i, (_, person) in enumerate(free) if person or not persons[slot]]
            found[slot] = free.pop(fitting[_below(rng, len(fitting))])[0]
        return [found[i] for i in range(len(persons))]


def _templates(low: int, high: int, kinds: Sequence[Kind]) -> Iterator[_Template]:
    for a in range(low, high + 1):
        for row in product(kinds, repeat=a):
            if sum(kind != "prepositional" for kind in row) > 1:
                continue
            for adjectives in product((False, True), repeat=a):
                for place, adverb in product((False, True), repeat=2):
                    yield _Template(row, adjectives, place, adverb)


def _held_template(template: _Template) -> bool:
    bits = "".join("01"[has] for has in (*template.adjectives, template.place, template.adverb))
    return _held(f"{'/'.join(template.kinds)}:{bits}")


def _held(text: str) -> bool:
    """Whether what this text names is held out: the same on every machine."""
    return zlib.crc32(text.encode()) % HELD == 0


def _side(nouns: Sequence[Pair], part: Part | None, by: By) -> list[Pair]:
    if by != "lemma" or part is None:
        return list(nouns)
    return [noun for i, noun in enumerate(nouns) if (i % HELD == HELD - 1) == (part == "held out")]


def _below(rng: Random, n: int) -> int:
    """A number from 0 to n - 1, from the one method whose values Python promises to keep."""
    return int(rng.random() * n)


def _one(rng: Random, choices: Sequence[Any]) -> Any:
    return choices[_below(rng, len(choices))]


def _order(rng: Random, n: int) -> list[int]:
    left = list(range(n))
    return [left.pop(_below(rng, len(left))) for _ in range(n)]


def _kinds(kinds: Sequence[Kind]) -> tuple[Kind, ...]:
    found = (kinds,) if isinstance(kinds, str) else tuple(dict.fromkeys(kinds))
    wrong = [kind for kind in found if kind not in get_args(Kind)]
    if wrong or not found:
        raise DynamicsError(
            f"kinds is {wrong[0] if wrong else 'empty'!r:.40}; known: {', '.join(get_args(Kind))}"
        )
    return tuple(kind for kind in get_args(Kind) if kind in found)


def _verbs(verbs: Sequence[str] | None) -> tuple[Pair, ...]:
    if verbs is None:
        return words.VERBS
    wanted = {verbs} if isinstance(verbs, str) else set(verbs)
    unknown = sorted(map(str, wanted - {pair[0] for pair in words.VERBS}))
    if unknown or not wanted:
        known = ", ".join(pair[0] for pair in words.VERBS)
        raise DynamicsError(
            f"verbs has {unknown[0] if unknown else 'none'!r:.40}; known, by their singular: {known}"
        )
    return tuple(pair for pair in words.VERBS if pair[0] in wanted)


def _whole(name: str, value: Any, least: int) -> None:
    if type(value) is not int or value < least:
        raise DynamicsError(f"{name} is {value!r:.40}; expected a whole number, {least} or more")


def _range(name: str, value: Any) -> tuple[int, int]:
    """(least, most) of what is one number or two."""
    pair = tuple(value) if isinstance(value, (tuple, list)) else (value, value)
    if len(pair) != 2:
        raise DynamicsError(
            f"{name} is {value!r:.40}; expected a whole number, or two: the least and the most"
        )
    for one in pair:
        _whole(name, one, 0)
    if pair[0] > pair[1]:
        raise DynamicsError(f"{name} is {value!r:.40}: the least is more than the most")
    return pair[0], pair[1]


def _within(value: int, limits: tuple[int, int]) -> bool:
    return limits[0] <= value <= limits[1]


def _said(value: Any) -> str:
    pair = value if isinstance(value, (tuple, list)) else (value, value)
    return str(pair[0]) if pair[0] == pair[1] else f"{pair[0]} to {pair[1]}"
