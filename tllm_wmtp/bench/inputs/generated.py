"""Our own long-context tasks in the manner of RULER (Hsieh et al. 2024).

Retrieval, tracing of variables, and counting of words. Each function makes a
:class:`tllm_wmtp.bench.inputs.fit.Layout` and the answers to its question.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import accumulate, count
from typing import Any

from tllm_wmtp.bench.inputs.chance import Chance
from tllm_wmtp.bench.inputs.fit import Layout
from tllm_wmtp.bench.inputs.lexicon import Lexicon, Supply
from tllm_wmtp.bench.inputs.options import FREQUENT_ANSWERS, UNIFORM
from tllm_wmtp.errors import ConfigError

#: Fewer tokens than this hold no record in any lexicon, so it bounds how many distractors fit.
LEAST_RECORD_TOKENS = 5
#: Rare words that are shuffled together.
RARE_GROUP = 50
#: Weights stay below 2**53, where a product with a random number is exact enough.
ZIPF_SCALE = 10**12


class UndeterminedError(ConfigError):
    """The text that was made leaves open what the answers are."""


@dataclass(frozen=True)
class Draft:
    """A task before its filler is cut to length.

    ``answers_in`` gives the answers once the text is there; it raises UndeterminedError where
    the text does not determine them.
    """

    layout: Layout
    answers_in: Callable[[str], tuple[str, ...]]


Maker = Callable[[str, Lexicon, Mapping[str, Any], int, Chance], Draft]


def needles(
    task: str, lexicon: Lexicon, options: Mapping[str, Any], tokens: int, chance: Chance
) -> Draft:
    """Records ``key: value`` in filler, and a question for some of the keys.

    Every key has ``values`` records; filler of the kind ``needles`` is made of further records
    under keys that are not asked for.
    """
    n_keys, n_values = options["keys"], options["values"]
    n_records = n_keys * n_values
    distractors = tokens // LEAST_RECORD_TOKENS if options["filler"] == "needles" else 0
    keys = lexicon.keys(chance.child("keys"), n_keys + distractors, n_keys)
    values = lexicon.values(chance.child("values"), options["value_type"], n_records)
    # Records that distract need values of their own.
    needed = n_records + (options["filler"] == "needles")
    _need_room(f"{n_keys} keys with {n_values} values each", needed, values, lexicon)
    records = [
        (key, keys[key], values[key * n_values + number])
        for key in range(n_keys)
        for number in range(n_values)
    ]
    order = chance.child("order").shuffled(records)
    asked = chance.child("asked").sample(range(n_keys), options["queries"])
    expected = [value for wanted in asked for key, _, value in order if key == wanted]
    names = [keys[key] for key in asked]
    ask = lexicon.ask_enumeration if options["enumerate"] else lexicon.ask
    depths = _depths(options["depth"], n_records, chance.child("depths"))
    more = (lexicon.record(keys[n_keys + n], values[n_records + n]) for n in count())
    layout = Layout(
        task,
        lexicon.head,
        [
            (lexicon.record(name, value), depth)
            for (_, name, value), depth in zip(order, depths, strict=True)
        ],
        _filler(lexicon, options, chance, more),
        ask(names, n_values > 1),
        lexicon.words,
    )
    return Draft(layout, lambda _: tuple(expected))


def _need_room(what: str, n_items: int, supply: Supply, lexicon: Lexicon) -> None:
    if n_items > supply.size:
        raise ConfigError(
            what,
            f"{n_items} different ones are needed, and the {lexicon.name} lexicon has "
            f"{supply.size}",
            "lower it",
        )


def _depths(depth: str | float, n_records: int, chance: Chance) -> list[float]:
    if depth == UNIFORM:
        return sorted(chance.random() for _ in range(n_records))
    return [float(depth)] * n_records


def _filler(
    lexicon: Lexicon, options: Mapping[str, Any], chance: Chance, distractors: Iterator[str]
) -> Iterator[str]:
    kind = options["filler"]
    return distractors if kind == "needles" else lexicon.filler(kind, chance.child("filler"))


def tracking(
    task: str, lexicon: Lexicon, options: Mapping[str, Any], tokens: int, chance: Chance
) -> Draft:
    """Chains of assignments: a value to a variable, that to the next, ``hops`` times.

    The chains are mingled; each keeps its order. The question names the first chain's value, and
    its ``hops + 1`` variables are the answers.
    """
    chains, length = options["chains"], options["hops"] + 1
    n_variables = chains * length
    distractors = tokens // LEAST_RECORD_TOKENS if options["filler"] == "needles" else 0
    variables = lexicon.variables(chance.child("variables"), n_variables + distractors, n_variables)
    value_type = "numbers" if "numbers" in lexicon.value_types else lexicon.value_types[0]
    values = lexicon.values(chance.child("values"), value_type, chains)
    _need_room(f"{chains} chains of {length} variables", n_variables, variables, lexicon)
    draw = chance.child("depths")
    placed: list[tuple[float, str]] = []
    for chain in range(chains):
        names = [variables[chain * length + hop] for hop in range(length)]
        sources = [values[chain], *names[:-1]]
        depths = sorted(draw.random() for _ in range(length))
        for hop in range(length):
            placed.append((depths[hop], lexicon.assign(names[hop], sources[hop], hop > 0)))
    placed.sort(key=lambda entry: entry[0])
    more = (lexicon.assign(variables[n_variables + n], values[chains + n], False) for n in count())
    layout = Layout(
        task,
        lexicon.vt_head,
        [(line, depth) for depth, line in placed],
        _filler(lexicon, options, chance, more),
        lexicon.ask_variables(values[0]),
        lexicon.words,
    )
    answers = tuple(variables[hop] for hop in range(length))
    return Draft(layout, lambda _: answers)


def common_words(
    task: str, lexicon: Lexicon, options: Mapping[str, Any], tokens: int, chance: Chance
) -> Draft:
    """A list of words: some ``common_frequency`` times each, all others ``rare_frequency`` times,
    or more often where the lexicon has too few.
    """
    n_common, rare_frequency = options["common"], options["rare_frequency"]
    frequency = options["common_frequency"]
    words = lexicon.rare_words(chance.child("words"), n_common)
    common = [words[index] for index in range(n_common)]
    entries = chance.child("order").shuffled(
        [lexicon.entry(word) for word in common for _ in range(frequency)]
    )
    depths = sorted(chance.child("depths").random() for _ in entries)

    def filler(draw: Chance) -> Iterator[str]:
        for first in count(n_common, RARE_GROUP):
            group = [words[index] for index in range(first, first + RARE_GROUP)]
            for word in draw.shuffled(group * rare_frequency):
                yield lexicon.entry(word)

    layout = Layout(
        task,
        lexicon.count_head,
        list(zip(entries, depths, strict=True)),
        filler(chance.child("filler")),
        lexicon.ask_words(n_common),
        lexicon.words,
    )

    def answers_in(text: str) -> tuple[str, ...]:
        counted = _counted(layout, text)
        least = min(counted[word] for word in common)
        most = max((n for word, n in counted.items() if word not in common), default=0)
        if least <= most:
            raise UndeterminedError(
                f"common_frequency {frequency}",
                f"the common words must be more common than the others, one of which comes {most}"
                " times",
                "raise common_frequency or lower rare_frequency",
            )
        return tuple(common)

    return Draft(layout, answers_in)


def frequent_words(
    task: str, lexicon: Lexicon, options: Mapping[str, Any], tokens: int, chance: Chance
) -> Draft:
    """Coded words, the one of rank k drawn in proportion to ``k ** -alpha``.

    The answers are those that were drawn most often in the text that was made.
    """
    n_words = options["coded_words"]
    words = lexicon.coded_words(chance.child("words"), n_words)
    _need_room(f"coded_words {n_words}", n_words, words, lexicon)
    coded = [words[rank] for rank in range(n_words)]
    sums = list(accumulate(_zipf_weight(rank, options["alpha"]) for rank in range(1, n_words + 1)))

    def filler(draw: Chance) -> Iterator[str]:
        while True:
            yield lexicon.entry(coded[bisect_right(sums, draw.below(sums[-1]))])

    layout = Layout(
        task,
        lexicon.count_head,
        [],
        filler(chance.child("filler")),
        lexicon.ask_words(FREQUENT_ANSWERS),
        lexicon.words,
    )

    def answers_in(text: str) -> tuple[str, ...]:
        counted = _counted(layout, text)
        ranked = sorted(counted, key=lambda word: (-counted[word], word))
        best = ranked[:FREQUENT_ANSWERS]
        if len(ranked) <= FREQUENT_ANSWERS or counted[best[-1]] == counted[ranked[len(best)]]:
            raise UndeterminedError(
                f"{tokens} tokens of task {task}",
                f"{FREQUENT_ANSWERS} words must be more frequent than all others",
                "raise the tokens or alpha, or use another seed",
            )
        return tuple(best)

    return Draft(layout, answers_in)


def _zipf_weight(rank: int, alpha: float) -> int:
    """``rank ** -alpha`` in whole numbers, so that it is the same everywhere; alpha is n / 2."""
    return ZIPF_SCALE**2 // math.isqrt(rank ** round(2 * alpha) * ZIPF_SCALE**2)


def _counted(layout: Layout, text: str) -> Counter[str]:
    """How often each word is on the list, which stands between head and question."""
    return Counter(text[len(layout.head) : len(text) - len(layout.tail)].split())


MAKERS: dict[str, Maker] = {
    "vt": tracking,
    "cwe": common_words,
    "fwe": frequent_words,
}


def draft(
    task: str, lexicon: Lexicon, options: Mapping[str, Any], tokens: int, chance: Chance
) -> Draft:
    """The task's records, filler and question; ``options`` with the task's fixed settings."""
    return MAKERS.get(task, needles)(task, lexicon, options, tokens, chance)
