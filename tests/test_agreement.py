"""The agreement task: every sentence agrees, nothing but the subject tells, and tokens know which words they are of."""

from __future__ import annotations

import hashlib
from collections import Counter
from dataclasses import replace

import pytest
import torch

from qkform.dynamics import agreement, attention_mass, comprehensiveness
from qkform.dynamics import agreement_words as words
from qkform.dynamics.agreement import encode, sentences, vocabulary
from qkform.errors import DynamicsError

NOUNS = {form: (pair, n) for pair in (*words.PERSONS, *words.THINGS) for n, form in enumerate(pair)}
VERBS = {form: (pair, n) for pair in words.VERBS for n, form in enumerate(pair)}


def agrees(one: agreement.Sentence) -> bool:
    """Read from the words alone, knowing nothing of how they were made."""
    nouns = [i for i, word in enumerate(one.words) if word in NOUNS]
    verbs = [i for i, word in enumerate(one.words) if word in VERBS]
    return (
        nouns == [one.subject, *one.attractors]
        and verbs == [one.verb]
        and NOUNS[one.words[one.subject]][1] == VERBS[one.words[one.verb]][1] == (one.number == "plural")
    )


def parses(line: tuple[str, ...]) -> bool:
    """Whether a sentence is one of: The N [place] phrases [adverb] V predicate ."""
    persons = {form for pair in words.PERSONS for form in pair}

    def noun_phrase(i: int) -> int:
        """Behind "the [adjective] noun", or -1."""
        if line[i] != "the":
            return -1
        i += 1 + (line[i + 1] in words.ADJECTIVES)
        return i + 1 if line[i] in NOUNS else -1

    if line[0] != "The" or line[1] not in NOUNS:
        return False
    i, before = 2 + (line[2] in words.PLACES), line[1]
    while line[i] in words.PREPOSITIONS or line[i] == "that":
        if line[i] in words.PREPOSITIONS:
            end = noun_phrase(i + 1)
        elif line[i + 1] in words.PAST:  # that noticed the teacher: the noun in front must be a person
            end = noun_phrase(i + 2) if before in persons else -1
        else:  # that the teacher noticed
            end = noun_phrase(i + 1)
            if end < 0 or line[end - 1] not in persons or line[end] not in words.PAST:
                return False
            end += 1
        if end < 0:
            return False
        before = line[end - 1] if line[end - 1] in NOUNS else line[end - 2]
        i = end
    i += line[i] in words.ADVERBS
    return line[i] in VERBS and line[i + 1] in words.PREDICATES and line[i + 2 :] == (".",)


def test_every_sentence_agrees_and_parses():
    found = sentences(3001, 5, attractors=(0, 3))
    assert len(found) == 3001 == len({one.words for one in found})
    for one in found:
        assert agrees(one), one
        assert parses(one.words), one
        assert one.correct == one.words[one.verb] != one.wrong
        assert VERBS[one.correct][0] == VERBS[one.wrong][0]
        nouns = [NOUNS[one.words[i]][0] for i in (one.subject, *one.attractors)]
        assert len(set(nouns)) == len(nouns), "one noun twice: which of them is the subject would be unclear"
        other = [VERBS[one.correct][1] != NOUNS[one.words[i]][1] for i in one.attractors]
        assert sum(other) == one.opposite
        assert one.distance == one.verb - 2
    assert all(
        agrees(replace(one, words=(*one.words[: one.verb], one.wrong, "x", "."))) is False
        for one in found[:9]
    )


def test_nothing_but_the_subject_tells_the_label():
    found = sentences(2000, 1, attractors=(0, 2))
    assert Counter(one.number for one in found) == {"singular": 1000, "plural": 1000}
    for one, other in zip(found[::2], found[1::2], strict=True):
        differ = [i for i, pair in enumerate(zip(one.words, other.words, strict=True)) if pair[0] != pair[1]]
        assert differ == [one.subject, one.verb]
        assert (one.correct, one.wrong) == (other.wrong, other.correct)
    # so of all that stands before the verb but the subject, whatever it is, half goes with either label
    seen = Counter((one.words[: one.subject] + one.words[2 : one.verb], one.number) for one in found)
    assert all(seen[key, "plural"] == seen[key, "singular"] for key, _ in seen)
    # and the words as a bag, by the number of each alone, leave a tie but for the subject
    first = Counter(one.number for one in found[::2])
    assert abs(first["plural"] - 500) < 4 * (1000 * 0.25) ** 0.5


def test_every_number_of_attractors_is_as_frequent():
    found = Counter(len(one.attractors) for one in sentences(3000, 2, attractors=(1, 3)))
    assert set(found) == {1, 2, 3}
    assert all(abs(n - 1000) < 4 * (3000 * 2 / 9 * 2) ** 0.5 for n in found.values())


@pytest.mark.parametrize("opposite", [0, 1, 2, "all"])
def test_attractors_oppose_as_asked(opposite):
    found = sentences(60, 0, attractors=2, opposite=opposite)
    assert {one.opposite for one in found} == {2 if opposite == "all" else opposite}
    assert all(map(agrees, found))
    assert Counter(one.number for one in found) == {"singular": 30, "plural": 30}


def test_distance_kinds_and_verbs_are_as_asked():
    found = sentences(
        200, 0, attractors=(0, 3), distance=(4, 6), kinds=["prepositional"], verbs=["is", "was"]
    )
    assert {one.distance for one in found} == {4, 5, 6}
    assert {one.correct for one in found} == {"is", "are", "was", "were"}
    assert not any("that" in one.words for one in found)
    relatives = sentences(200, 0, attractors=3, kinds=["object relative", "prepositional"])
    assert {one.words.count("that") for one in relatives} == {0, 1}
    assert {one.distance for one in sentences(20, 0, attractors=0, distance=0)} == {0}


def test_the_same_seed_gives_the_same_sentences_everywhere():
    text = "\n".join(one.text for one in sentences(100, 7))
    assert hashlib.sha256(text.encode()).hexdigest()[:16] == "66242010236e3fdc"
    assert sentences(7, 7) == sentences(100, 7)[:7]
    assert sentences(100, 8) != sentences(100, 7)
    assert hashlib.sha256(" ".join(vocabulary()).encode()).hexdigest()[:16] == "8d2d72e8b8f25fe0"


def key(one: agreement.Sentence, by: str) -> object:
    if by == "sentence":
        return one.words
    if by == "lemma":
        return NOUNS[one.words[one.subject]][0]
    kinds = {"N": NOUNS, "V": VERBS} | {
        name: getattr(words, name)
        for name in ("PREPOSITIONS", "PAST", "ADJECTIVES", "PREDICATES", "PLACES", "ADVERBS")
    }
    return tuple(next((name for name, kind in kinds.items() if word in kind), word) for word in one.words)


@pytest.mark.parametrize("by", ["sentence", "template", "lemma"])
def test_the_parts_share_nothing(by):
    options = {"attractors": (0, 2), "by": by}
    train = sentences(1500, 0, part="train", **options)
    held = sentences(600, 3, part="held out", **options)
    assert not {key(one, by) for one in train} & {key(one, by) for one in held}
    if by == "lemma":
        nouns = [{NOUNS[w][0] for one in part for w in one.words if w in NOUNS} for part in (train, held)]
        assert not nouns[0] & nouns[1]
        assert nouns[0] | nouns[1] == {pair for pair, _ in NOUNS.values()}


def test_numbers_do_not_move_a_sentence_to_the_other_part():
    """What is held out is held out for every request: with attractors as they come, and all opposite."""
    train = sentences(4000, 0, attractors=1, part="train", verbs=["is"], distance=3)
    held = sentences(4000, 1, attractors=1, part="held out", opposite="all", verbs=["is"], distance=3)
    assert not {one.words for one in train} & {one.words for one in held}


def test_all_that_there_are_can_be_had_and_no_more():
    asked = {"attractors": 0, "distance": 0, "verbs": ["is"]}
    every = 2 * 40 * 10
    assert len({one.words for one in sentences(every, 0, **asked)}) == every
    with pytest.raises(DynamicsError, match="n is 801, and there are 800 such sentences"):
        sentences(every + 1, 0, **asked)
    held = {"part": "held out", "by": "lemma", "kinds": ["prepositional"]}  # 8 nouns are held out
    assert {len(one.attractors) for one in sentences(99, 0, attractors=(6, 8), **held)} == {6, 7}
    with pytest.raises(DynamicsError, match="n is 1, and there are 0 such sentences"):
        sentences(1, 0, attractors=8, **held)
    with pytest.raises(DynamicsError, match="in this part that can be counted on"):
        sentences(200, 0, part="held out", **asked)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"n": -1}, "n is -1"),
        ({"seed": True}, "seed is True"),
        ({"attractors": 9}, "8 at most"),
        ({"attractors": (2, 1)}, "the least is more than the most"),
        ({"attractors": 1.5}, "attractors is 1.5"),
        ({"attractors": (0, 2), "opposite": 1}, "opposite is 1 of 0 attractors"),
        ({"attractors": 1, "distance": 2}, "1 attractors has distance 2; theirs are 3 to 7"),
        ({"kinds": ["adverbial"]}, "known: prepositional"),
        ({"kinds": []}, "kinds is"),
        ({"verbs": ["are"]}, "known, by their singular: is, was"),
        ({"verbs": []}, "verbs has"),
        ({"part": "test"}, "known: train, held out"),
        ({"by": "word"}, "known: sentence, template, lemma"),
        (
            {
                "attractors": 1,
                "distance": 3,
                "part": "held out",
                "by": "template",
                "kinds": ["prepositional"],
            },
            "none of",
        ),
        (
            {"attractors": 8, "part": "held out", "by": "lemma", "kinds": ["prepositional"], "distance": 0},
            "distance",
        ),
    ],
)
def test_a_request_that_cannot_be_says_why(options, said):
    with pytest.raises(DynamicsError, match=said):
        sentences(**{"n": 4, "seed": 0} | options)


def test_a_token_for_every_word():
    found = sentences(31, 0, attractors=(0, 3))
    e = encode(found)
    known = vocabulary()
    for i, one in enumerate(found):
        n = len(one.words)
        assert tuple(known[t] for t in e.input_ids[i, :n]) == one.words
        assert e.attention_mask[i].tolist() == [1] * n + [0] * (e.input_ids.shape[1] - n)
        assert e.relevant[i].nonzero().flatten().tolist() == [one.subject]
        assert tuple(e.attractors[i].nonzero().flatten().tolist()) == one.attractors
        assert e.labels[i].tolist() == [
            int(e.input_ids[i, j]) if j == one.verb else -100 for j in range(len(e.labels[i]))
        ]
        assert (known[e.correct[i]], known[e.wrong[i]]) == (one.correct, one.wrong)
        assert int(e.row[i]) == one.verb - 1 == int(e.verb[i]) - 1
    masked = encode(found, objective="masked")
    assert (masked.row == masked.verb).all()
    assert (masked.input_ids[torch.arange(31), masked.verb] == 1).all()
    assert ((masked.input_ids == e.input_ids).sum(1) == e.input_ids.shape[1] - 1).all()
    assert (masked.labels == e.labels).all()


def tokenizers():
    """A byte-level one, whose tokens hold the space before a word, and one of word pieces with special tokens."""
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    texts = [one.text for one in sentences(400, 0, verbs=["is"])]
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.post_processor = processors.ByteLevel(trim_offsets=False)
    bpe.decoder = decoders.ByteLevel()
    bpe.train_from_iterator(texts, trainers.BpeTrainer(vocab_size=180, show_progress=False))
    yield "bytes", PreTrainedTokenizerFast(tokenizer_object=bpe)
    pieces = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    pieces.normalizer = normalizers.Lowercase()
    pieces.pre_tokenizer = pre_tokenizers.Whitespace()
    special = ["[UNK]", "[PAD]", "[CLS]", "[SEP]", "[MASK]"]
    pieces.train_from_iterator(
        texts, trainers.WordPieceTrainer(vocab_size=150, special_tokens=special, show_progress=False)
    )
    pieces.decoder = decoders.WordPiece()
    pieces.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    yield (
        "pieces",
        PreTrainedTokenizerFast(
            tokenizer_object=pieces,
            pad_token="[PAD]",
            mask_token="[MASK]",
            cls_token="[CLS]",
            sep_token="[SEP]",
        ),
    )


def test_any_fast_tokenizer_keeps_the_words_apart():
    found = sentences(41, 3, attractors=(0, 3), verbs=["is"])
    for name, tokenizer in tokenizers():
        e = encode(found, tokenizer)
        several = 0
        for i, one in enumerate(found):
            ids = e.input_ids[i, : int(e.attention_mask[i].sum())].tolist()
            assert ids == tokenizer(one.text)["input_ids"]
            subject = tokenizer.decode([ids[j] for j in e.relevant[i].nonzero().flatten()]).strip()
            assert subject == one.words[one.subject], name
            several += int(e.relevant[i].sum()) > 1
            nouns = tokenizer.decode([ids[j] for j in e.attractors[i].nonzero().flatten()]).split()
            assert "".join(nouns) == "".join(one.words[j] for j in one.attractors)
            assert tokenizer.decode([int(e.correct[i])]).strip() == one.correct
            assert tokenizer.decode([int(e.wrong[i])]).strip() == one.wrong
            assert ids[int(e.verb[i])] == int(e.correct[i]) == int(e.labels[i, e.verb[i]])
        assert several > 3, "no subject of several tokens was there to test"
        if name == "pieces":
            masked = encode(found, tokenizer, objective="masked")
            assert (masked.input_ids == tokenizer.mask_token_id).sum(1).tolist() == [1] * 41
            assert (masked.input_ids[masked.attention_mask == 0] == tokenizer.pad_token_id).all()
        else:
            with pytest.raises(DynamicsError, match="needs a mask token"):
                encode(found, tokenizer, objective="masked")
        rare = sentences(20, 3, verbs=["becomes"])
        with pytest.raises(DynamicsError, match=r"the verb 'becomes?' is [2-9] tokens"):
            encode(rare, tokenizer)


def test_encoding_says_what_it_cannot_use():
    one = sentences(2, 0)
    with pytest.raises(DynamicsError, match="no sentences"):
        encode([])
    with pytest.raises(DynamicsError, match="known: causal, masked"):
        encode(one, objective="prefix")
    with pytest.raises(DynamicsError, match="expected a fast one"):
        encode(one, str)
    with pytest.raises(DynamicsError, match="not in the built-in vocabulary"):
        encode([replace(one[0], words=("The", "cat", *one[0].words[2:]))])
    e = encode(one)
    with pytest.raises(DynamicsError, match="logits have shape"):
        e.margin(torch.zeros(2, 3))
    with pytest.raises(DynamicsError, match="the verbs need"):
        e.margin(torch.zeros(*e.input_ids.shape, 5))


def test_a_model_that_attends_to_the_subject_has_all_its_mass_there():
    e = encode(sentences(12, 0, attractors=(1, 2)))
    b, n = e.input_ids.shape
    weights = torch.zeros(1, b, 1, n, n)
    weights[0, :, 0, :, :] = e.relevant[:, None, :].float()
    keys = e.attention_mask[:, None, None, :].bool()
    for row, mass in ((e.row, 1.0), (torch.zeros_like(e.row), 1.0)):
        assert torch.allclose(
            attention_mass(weights, e.relevant, keys, row=row), torch.tensor(mass, dtype=torch.float64)
        )
    assert float(attention_mass(weights, e.attractors, keys, row=e.row).max()) == 0.0
    # a reader of the subject's number alone: sure with it, undecided without it
    plural = {i for i, word in enumerate(vocabulary()) if NOUNS.get(word, (0, 0))[1]}

    def sure(tokens):
        number = [t in plural for t in tokens if vocabulary()[t] in NOUNS][:1]
        return 1.0 if number == [bool(e.correct[0] == max(e.correct[0], e.wrong[0]))] else 0.0

    ids = e.input_ids[0, : int(e.row[0]) + 1].tolist()
    assert comprehensiveness(sure, ids[:2], e.relevant[0, :2].double(), share=0.5) == 1.0
    logits = torch.zeros(b, n, len(vocabulary()))
    logits[torch.arange(b), e.row, e.correct] = 2.0
    assert e.margin(logits).tolist() == [2.0] * b


def trained(steps: int, seed: int = 0):
    """A tiny GPT-2 on sentences with an attractor: its accuracy on held-out ones, and its attention on the subject
    and on the attractor, from where the verb is predicted, as the mean over layers."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(seed)
    options = {"attractors": 1, "distance": 3, "kinds": ["prepositional"], "verbs": ["is"]}
    train = encode(sentences(2000, 0, part="train", **options))
    held = encode(sentences(400, 1, part="held out", **options))
    config = GPT2Config(
        vocab_size=len(vocabulary()),
        n_positions=16,
        n_embd=48,
        n_layer=2,
        n_head=2,
        bos_token_id=None,
        eos_token_id=None,
        attn_implementation="eager",
    )
    model = GPT2LMHeadModel(config)
    opt = torch.optim.Adam(model.parameters(), lr=3e-3)
    for _ in range(steps):
        part = torch.randperm(len(train))[:64]
        loss = model(**{name: x[part] for name, x in train.batch.items()}).loss
        opt.zero_grad()
        loss.backward()
        opt.step()
    model.eval()
    with torch.no_grad():
        out = model(**held.batch, output_attentions=True)
    keys = held.attention_mask[:, None, None, :].bool()
    masses = (
        attention_mass(out.attentions, held.relevant, keys, row=held.row),
        attention_mass(out.attentions, held.attractors, keys, row=held.row),
    )
    return float((held.margin(out.logits) > 0).float().mean()), *(float(mass.mean()) for mass in masses)


@pytest.mark.slow
def test_a_tiny_model_learns_agreement_and_attends_to_the_subject():
    """Chance is .5, and five words share attention evenly: .2 each."""
    before, at_first, _ = trained(steps=0)
    accuracy, on_subject, on_attractor = trained(steps=100)
    print(f"accuracy {before:.3f} -> {accuracy:.3f}; mass on the subject {at_first:.3f} -> {on_subject:.3f}")
    assert 0.4 < before < 0.6
    assert abs(at_first - 0.2) < 0.02
    assert accuracy > 0.95
    assert on_subject > 0.4 > 0.2 > on_attractor
