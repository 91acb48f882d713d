"""Two vocabularies for the same tasks: English, and the demonstration models' own language.

A lexicon knows how its records, questions and filler lines read, and where new keys, values and
rare words come from. Every line ends with a line break; in the ``demo`` lexicon words are written
as that language's tokenizer has them, with a space before each.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from tllm_wmtp.bench.inputs import words
from tllm_wmtp.bench.inputs.chance import Chance, Permutation
from tllm_wmtp.demo import language
from tllm_wmtp.demo import tokenizer as tk

#: How often a slot of an English sentence takes its favourite word.
FAVOURITE = 0.85
VALUE_TYPES = ("words", "numbers", "uuid")
FILLERS = ("repeat", "prose", "random", "needles")


@dataclass(frozen=True)
class Supply:
    """A sequence of different items, such as keys: ``supply[i]`` for ``i`` below ``size``.

    Beyond ``size`` the items after the first ``kept`` come again, never the first ones.
    """

    order: Permutation
    spell: Callable[[int], str]
    kept: int

    @property
    def size(self) -> int:
        return self.order.size

    def __getitem__(self, index: int) -> str:
        if index >= self.size:
            index = self.kept + (index - self.kept) % (self.size - self.kept)
        return self.spell(self.order[index])


def _pairs(first: Sequence[str], second: Sequence[str], between: str) -> Callable[[int], str]:
    return lambda code: first[code // len(second)] + between + second[code % len(second)]


def _triples(items: Sequence[str], between: str) -> Callable[[int], str]:
    n = len(items)
    return lambda code: between.join(
        (items[code // (n * n)], items[code // n % n], items[code % n])
    )


class English:
    """Sentences, records and questions in English."""

    name = "english"
    #: Different words that the counting tasks can draw from.
    n_list_words = 26**5
    words = (*words.SHORT, *words.PEOPLE, *words.PLACES)
    value_types = VALUE_TYPES
    head = (
        'The text below is long. Here and there it states the code of a key, as in "The code of'
        ' grey-goose is 1234." Remember every code: a question about them follows the text.\n\n'
    )
    vt_head = (
        "The text below is long. Here and there it assigns a variable: a number, or the value of"
        " another variable. Remember every assignment: a question follows the text.\n\n"
    )
    count_head = "The list below has one word on each line. Some words are on it more often.\n\n"

    def keys(self, chance: Chance, count: int, kept: int) -> Supply:
        """``silver-kettle``; three words where so many keys are needed."""
        pairs = len(words.ADJECTIVES) * len(words.NOUNS)
        if count <= pairs:
            spell = _pairs(words.ADJECTIVES, words.NOUNS, "-")
            return Supply(chance.permutation(pairs), spell, kept)
        spell = _triples((*words.ADJECTIVES, *words.NOUNS), "-")
        size = (len(words.ADJECTIVES) + len(words.NOUNS)) ** 3
        return Supply(chance.permutation(size), spell, kept)

    def values(self, chance: Chance, value_type: str, kept: int) -> Supply:
        if value_type == "words":
            items = (*words.NOUNS, *words.PEOPLE, *words.PLACES)
            return Supply(chance.permutation(len(items) ** 3), _triples(items, " "), kept)
        if value_type == "numbers":
            return Supply(chance.permutation(9_000_000), lambda n: str(1_000_000 + n), kept)
        salt = str(chance.below(2**52))
        return Supply(chance.permutation(2**40), lambda n: _uuid(f"{salt}/{n}"), kept)

    def variables(self, chance: Chance, count: int, kept: int) -> Supply:
        letters = "ABCDEFGHJKLMNPQRSTUVWXYZ"
        n = len(letters)
        return Supply(
            chance.permutation(n**4),
            lambda code: "".join(letters[code // n**place % n] for place in range(4)),
            kept,
        )

    def rare_words(self, chance: Chance, kept: int) -> Supply:
        """Made-up words of two syllables or three, all different."""
        syllables = [a + b for a in words.ONSETS for b in words.VOWELS]
        closed = [s + c for s in syllables for c in words.CODAS]
        n, m = len(syllables), len(closed)
        return Supply(
            chance.permutation(n * n * m),
            lambda code: syllables[code // (n * m)] + syllables[code // m % n] + closed[code % m],
            kept,
        )

    def coded_words(self, chance: Chance, kept: int) -> Supply:
        return Supply(chance.permutation(self.n_list_words), _letters, kept)

    def record(self, key: str, value: str) -> str:
        return f"The code of {key} is {value}.\n"

    def ask(self, keys: Sequence[str], several_values: bool) -> str:
        if len(keys) == 1 and not several_values:
            return f"\nQuestion: what is the code of {keys[0]}?\nAnswer: the code is"
        whose = f"{', '.join(keys[:-1])} and {keys[-1]}" if len(keys) > 1 else keys[0]
        return f"\nQuestion: what are all the codes of {whose}?\nAnswer: the codes are"

    def ask_enumeration(self, keys: Sequence[str], several_values: bool) -> str:
        if several_values:
            return (
                f"\nQuestion: list all the codes of {keys[0]} in the order of the text, each on a"
                " line of its own.\nAnswer:\n"
            )
        return (
            f"\nQuestion: list the codes of these keys, in this order: {', '.join(keys)}. Write"
            ' each on a line of its own as "key: code".\nAnswer:\n'
        )

    def assign(self, variable: str, source: str, is_variable: bool) -> str:
        return f"Let {variable} = {source}.\n"

    def ask_variables(self, value: str) -> str:
        return (
            f"\nQuestion: which variables have the value {value}, given directly or by way of"
            " other variables?\nAnswer: the variables are"
        )

    def entry(self, word: str) -> str:
        return word + "\n"

    def ask_words(self, count: int) -> str:
        return f"\nQuestion: which {count} words are most often on the list?\nAnswer: the words are"

    def filler(self, kind: str, chance: Chance) -> Iterator[str]:
        """An endless run of lines of the kinds ``repeat``, ``prose`` and ``random``."""
        if kind == "repeat":
            while True:
                yield from (line + "\n" for line in words.REPEATED)
        if kind == "random":
            everything = (*words.ADJECTIVES, *words.NOUNS, *words.PEOPLE, *words.VERBS)
            while True:
                count = 8 + chance.below(8)
                yield " ".join(chance.pick(everything) for _ in range(count)) + ".\n"
        yield from _english_prose(chance)


def _letters(code: int) -> str:
    return "".join(chr(ord("a") + code // 26**place % 26) for place in range(5))


def _uuid(name: str) -> str:
    digits = hashlib.sha256(name.encode()).hexdigest()
    return "-".join((digits[:8], digits[8:12], digits[12:16], digits[16:20], digits[20:32]))


def _english_prose(chance: Chance) -> Iterator[str]:
    """Sentences about a cast of six people, each with favourite things, so of little entropy."""
    cast = [
        (
            person,
            chance.pick(words.ADJECTIVES),
            chance.pick(words.VERBS),
            chance.pick(words.ADJECTIVES),
            chance.pick(words.NOUNS),
            chance.pick(words.PLACES),
            chance.pick(words.TIMES),
            chance.below(3),
        )
        for person in chance.sample(words.PEOPLE, 6)
    ]
    current = 0

    def slot(favourite: str, others: Sequence[str]) -> str:
        return favourite if chance.random() < FAVOURITE else chance.pick(others)

    while True:
        person, trait, verb, look, thing, place, time, pattern = cast[current]
        who = f"the {trait} {person}"
        does = slot(verb, words.VERBS)
        what = f"the {slot(look, words.ADJECTIVES)} {slot(thing, words.NOUNS)}"
        where = slot(place, words.PLACES)
        when = slot(time, words.TIMES)
        if pattern == 0:
            line = f"The {trait} {person} {does} {what} near the {where}."
        elif pattern == 1:
            line = f"In the {where}, {who} {does} {what}."
        else:
            line = f"One {when} {who} {does} {what} and goes to the {where}."
        yield line + "\n"
        follows = chance.random() < FAVOURITE
        current = (current + 1) % len(cast) if follows else chance.below(len(cast))


class Demo:
    """The language of the shipped models: their sentences, records and questions."""

    name = "demo"
    list_words = (*tk.KEYS, *tk.VALUES, *tk.NOUNS, *tk.ADJECTIVES, *tk.VERBS, *tk.PLACES)
    n_list_words = len(list_words)
    words = (*tk.NOUNS, *tk.ADJECTIVES, *tk.VERBS, *tk.PLACES)
    value_types = ("words",)
    head = vt_head = count_head = ""

    def keys(self, chance: Chance, count: int, kept: int) -> Supply:
        """One word, two beyond 64 keys as in that language, and three beyond 1,024."""
        n = len(tk.KEYS)
        if count <= n:
            return Supply(chance.permutation(n), lambda code: tk.KEYS[code], kept)
        if count <= language.MAX_RECORDS:
            half = n // 2
            spell = _pairs(tk.KEYS[:half], tk.KEYS[half:], " ")
            return Supply(chance.permutation(half * half), spell, kept)
        return Supply(chance.permutation(n**3), _triples(tk.KEYS, " "), kept)

    def values(self, chance: Chance, value_type: str, kept: int) -> Supply:
        size = len(tk.VALUES) ** 2
        return Supply(chance.permutation(size), _pairs(tk.VALUES, tk.VALUES, " "), kept)

    def variables(self, chance: Chance, count: int, kept: int) -> Supply:
        return self.keys(chance, count, kept)

    def rare_words(self, chance: Chance, kept: int) -> Supply:
        order = chance.permutation(self.n_list_words)
        return Supply(order, lambda code: self.list_words[code], kept)

    coded_words = rare_words

    def record(self, key: str, value: str) -> str:
        return f"key {key} = {value} .\n"

    def ask(self, keys: Sequence[str], several_values: bool) -> str:
        if len(keys) == 1 and not several_values:
            return f"? {keys[0]} ->"
        return f"? {' '.join(keys)}\n"

    def ask_enumeration(self, keys: Sequence[str], several_values: bool) -> str:
        return f"? {' '.join(keys)}\n"

    def assign(self, variable: str, source: str, is_variable: bool) -> str:
        return f"key {variable} = {'key ' if is_variable else ''}{source} .\n"

    def ask_variables(self, value: str) -> str:
        return f"? = {value}\n"

    def entry(self, word: str) -> str:
        return f" {word}\n"

    def ask_words(self, count: int) -> str:
        return "? count\n"

    def filler(self, kind: str, chance: Chance) -> Iterator[str]:
        """As :meth:`English.filler`, from :func:`tllm_wmtp.demo.language.sentences`."""
        if kind == "repeat":
            lines = [line for line, _ in zip(_demo_prose(chance), range(4), strict=False)]
            while True:
                yield from lines
        if kind == "random":
            while True:
                count = 8 + chance.below(8)
                yield "".join(f" {chance.pick(tk.WORDS)}" for _ in range(count)) + " .\n"
        yield from _demo_prose(chance)


def _demo_prose(chance: Chance) -> Iterator[str]:
    """One sentence a line, in casts of 4,096 tokens."""
    while True:
        text = language.text_of(language.sentences(chance, 4096).ids)
        for paragraph in text.split("\n")[:-1]:
            for sentence in paragraph.removesuffix(" .").split(" . "):
                yield sentence + " .\n"


Lexicon = English | Demo
LEXICONS: dict[str, Lexicon] = {"english": English(), "demo": Demo()}
