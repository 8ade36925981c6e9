"""The words of the agreement task: nouns, verbs in agreeing pairs, and what carries no number.

Only nouns and the main verb show a number. "the", prepositions, adjectives, adverbs and verbs in the past tense are
the same in singular and plural: nothing but the subject says which main verb is right.
"""

from __future__ import annotations

Pair = tuple[str, str]  # (singular, plural)

PERSONS: tuple[Pair, ...] = (
    ("teacher", "teachers"),
    ("farmer", "farmers"),
    ("child", "children"),
    ("pilot", "pilots"),
    ("doctor", "doctors"),
    ("woman", "women"),
    ("lawyer", "lawyers"),
    ("painter", "painters"),
    ("man", "men"),
    ("guard", "guards"),
    ("nurse", "nurses"),
    ("student", "students"),
    ("singer", "singers"),
    ("writer", "writers"),
    ("king", "kings"),
    ("lady", "ladies"),
    ("baker", "bakers"),
    ("judge", "judges"),
    ("dancer", "dancers"),
    ("boy", "boys"),
)
THINGS: tuple[Pair, ...] = (
    ("key", "keys"),
    ("cabinet", "cabinets"),
    ("door", "doors"),
    ("box", "boxes"),
    ("book", "books"),
    ("table", "tables"),
    ("shelf", "shelves"),
    ("window", "windows"),
    ("lamp", "lamps"),
    ("chair", "chairs"),
    ("knife", "knives"),
    ("car", "cars"),
    ("tree", "trees"),
    ("house", "houses"),
    ("bridge", "bridges"),
    ("tower", "towers"),
    ("clock", "clocks"),
    ("bench", "benches"),
    ("picture", "pictures"),
    ("garden", "gardens"),
)
# Each takes an adjective: "is old", "seem old".
VERBS: tuple[Pair, ...] = (
    ("is", "are"),
    ("was", "were"),
    ("seems", "seem"),
    ("looks", "look"),
    ("appears", "appear"),
    ("remains", "remain"),
    ("becomes", "become"),
    ("stays", "stay"),
)
PREPOSITIONS = ("near", "behind", "beside", "beyond", "opposite", "below")
PAST = ("liked", "noticed", "remembered", "described", "mentioned", "painted", "watched", "found")
ADJECTIVES = ("old", "new", "small", "famous", "strange", "quiet", "clean", "ordinary")  # of attractors
PREDICATES = (
    "beautiful",
    "ugly",
    "perfect",
    "unusual",
    "important",
    "invisible",
    "heavy",
    "ready",
    "dirty",
    "different",
)
PLACES = ("outside", "inside", "upstairs", "downstairs", "nearby", "there")  # after the subject
ADVERBS = ("certainly", "probably", "always", "still", "often", "really")  # before the verb

PAD, MASK = "[PAD]", "[MASK]"


def vocabulary() -> tuple[str, ...]:
    """Every word of the task in an order that stays: the token of the built-in encoding is a word's place in it.

    "[PAD]" is 0 and "[MASK]" 1; "The" and "the" are two words.
    """
    pairs = [word for pair in (*PERSONS, *THINGS, *VERBS) for word in pair]
    others = [*PREPOSITIONS, *PAST, *ADJECTIVES, *PREDICATES, *PLACES, *ADVERBS]
    return (PAD, MASK, ".", "The", "the", "that", *pairs, *others)
