"""Seeded generators of the demonstration language's documents.

Every generator takes a source of randomness and a length in tokens and returns a
:class:`Document` of exactly that many ids. Only ``rng.random()`` is ever called, so a
``random.Random`` with the same seed gives the same document on any platform; a
``numpy.random.Generator`` serves as well. ``end=True`` makes the last of the ids
``<|endoftext|>``.

Kinds: ``logs``, ``sentences``, ``passages``, ``records``, ``lists`` and ``recall``.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

from tllm_wmtp.demo import tokenizer as tk

T = TypeVar("T")


class Rng(Protocol):
    """A source of randomness: ``random.Random`` or ``numpy.random.Generator``."""

    def random(self) -> float:
        """Return a float in [0, 1)."""
        ...


_VOCABULARY = tk.vocabulary()
_SURFACES: dict[int, str] = {}


def _spaced(word: str) -> int:
    """The id of a word, digit or punctuation mark that follows a space."""
    return _VOCABULARY["\u0120" + word]


def _all(words: Sequence[str]) -> tuple[int, ...]:
    return tuple(_spaced(word) for word in words)


_NEWLINE = _VOCABULARY["\u010a"]
_DOT, _EQUALS, _SEMICOLON, _DASH = (_spaced(mark) for mark in ".=;-")
_ARROW_HEAD = _VOCABULARY[">"]
_QUERY = _VOCABULARY["?"]
_KEY = _VOCABULARY["key"]
_ALERT = _VOCABULARY["alert"]
_CODE, _T = _spaced("code"), _spaced("t")
_THE, _A, _NEAR, _IN, _AND, _GOES, _TO = _all(tk.FUNCTION_WORDS)
_BARE = {_spaced(word): _VOCABULARY[word] for word in tk.LINE_WORDS}
_KEYS, _VALUES = _all(tk.KEYS), _all(tk.VALUES)
_NOUNS, _ADJECTIVES, _VERBS, _PLACES = (
    _all(words) for words in (tk.NOUNS, tk.ADJECTIVES, tk.VERBS, tk.PLACES)
)
_HOSTS = tuple(_VOCABULARY[word] for word in tk.HOSTS)
_SPACED_HOSTS = _all(tk.HOSTS)
_SERVICES, _EVENTS, _LEVELS = _all(tk.SERVICES), _all(tk.EVENTS), _all(tk.LEVELS)
_METRICS, _STATUSES = _all(tk.METRICS), _all(tk.STATUSES)
_DIGITS = _all("0123456789")
_TAIL_DIGITS = tuple(_VOCABULARY[digit] for digit in "0123456789")
#: The ids of every word of the language, with its leading space.
SYMBOLS = _all(tk.WORDS)
_CLASS_OF = {word: words for words in (_NOUNS, _ADJECTIVES, _VERBS, _PLACES) for word in words}

#: How often a slot of a sentence takes its favourite, and a subject its successor.
FAVOURITE = 0.85
#: The share of log lines that are replaced by an alert.
ALERT_SHARE = 0.04
#: The share of a passage's content words that change in each repetition.
MUTATION = 0.03
#: The most records one document can hold: with more than 64, every key has two words.
MAX_RECORDS = (len(_KEYS) // 2) ** 2
#: The most different symbols that ``recall`` can draw from.
MAX_SYMBOLS = len(SYMBOLS)


@dataclass(frozen=True)
class Document:
    """One generated document.

    Attributes:
        kind: the generator's name.
        ids: the token ids.
        answer_spans: half-open ranges of ``ids`` that what precedes them determines.
    """

    kind: str
    ids: list[int]
    answer_spans: list[tuple[int, int]] = field(default_factory=list)

    @property
    def text(self) -> str:
        """The document as text; the tokenizer encodes it to ``ids`` exactly."""
        return text_of(self.ids)


@dataclass(frozen=True)
class Prompt:
    """A prompt for evaluation: ids, the same as text, and the continuation where it is known."""

    ids: list[int]
    text: str
    expected_ids: list[int] | None


def text_of(ids: Sequence[int]) -> str:
    """Return the text of ids that this module generated."""
    for token in set(ids):
        if token not in _SURFACES:
            _SURFACES[token] = tk.surface(token)
    return "".join([_SURFACES[token] for token in ids])


def _below(rng: Rng, bound: int) -> int:
    return int(rng.random() * bound)


def _between(rng: Rng, low: int, high: int) -> int:
    """A uniform integer in low..high, both included."""
    return low + int(rng.random() * (high - low + 1))


def _choice(rng: Rng, items: Sequence[T]) -> T:
    return items[int(rng.random() * len(items))]


def _sample(rng: Rng, items: Sequence[T], count: int) -> list[T]:
    """``count`` different items in random order (a partial Fisher-Yates shuffle)."""
    pool = list(items)
    for index in range(count):
        other = index + int(rng.random() * (len(pool) - index))
        pool[index], pool[other] = pool[other], pool[index]
    return pool[:count]


def _body_length(n_tokens: int, end: bool) -> int:
    length = n_tokens - int(end)
    if length < 1:
        raise ValueError(f"n_tokens is too small: {n_tokens}")
    return length


def _finish(kind: str, ids: list[int], spans: list[tuple[int, int]], end: bool) -> Document:
    if end:
        ids.append(tk.END_OF_TEXT_ID)
    return Document(kind, ids, spans)


@dataclass
class _Template:
    head: list[int]
    tail: list[int]
    statuses: list[int]
    visits: int = 0


def _template(rng: Rng, host: int) -> _Template:
    head = [host, _choice(rng, _SERVICES)]
    head += _sample(rng, _EVENTS, _between(rng, 2, 3))
    head += [_choice(rng, _LEVELS), _T, _EQUALS]
    tail = [_choice(rng, _METRICS), _choice(rng, _DIGITS), _choice(rng, _TAIL_DIGITS)]
    statuses = _sample(rng, _STATUSES, _between(rng, 2, 3)) if rng.random() < 0.6 else []
    return _Template(head, tail, statuses, _below(rng, 3))


def logs(rng: Rng, n_tokens: int, *, end: bool = False) -> Document:
    """Structured logs: 3 to 8 line templates that cycle, with a tick and a few random alerts.

    A line is ``host service event event [event] level t = TICK metric NN [status]``. The tick
    advances by one, modulo ten, on every line, alerts included; the status cycles on each visit
    of its template. An alert takes the place of a line, and the next template follows it.
    """
    length = _body_length(n_tokens, end)
    hosts = _sample(rng, _HOSTS, _between(rng, 3, 8))
    templates = [_template(rng, host) for host in hosts]
    tick = _below(rng, 10)
    position = 0
    ids: list[int] = []
    while len(ids) < length:
        template = templates[position]
        if rng.random() < ALERT_SHARE:
            ids += (_ALERT, _choice(rng, _SPACED_HOSTS), _choice(rng, _SERVICES))
            ids += (_choice(rng, _EVENTS), _T, _EQUALS, _DIGITS[tick], _CODE)
            ids += (_choice(rng, _DIGITS), _choice(rng, _TAIL_DIGITS))
        else:
            ids += template.head
            ids.append(_DIGITS[tick])
            ids += template.tail
            if template.statuses:
                ids.append(template.statuses[template.visits % len(template.statuses)])
                template.visits += 1
        ids.append(_NEWLINE)
        tick = (tick + 1) % 10
        position = (position + 1) % len(templates)
    del ids[length:]
    return _finish("logs", ids, [], end)


@dataclass(frozen=True)
class _Subject:
    noun: int
    adjective: int
    verb: int
    object_adjective: int
    object: int
    place: int
    pattern: int


def _random_subject(rng: Rng, noun: int) -> _Subject:
    return _Subject(
        noun=noun,
        adjective=_choice(rng, _ADJECTIVES),
        verb=_choice(rng, _VERBS),
        object_adjective=_choice(rng, _ADJECTIVES),
        object=_choice(rng, _NOUNS),
        place=_choice(rng, _PLACES),
        pattern=_below(rng, 4),
    )


def _phrase(
    pattern: int, adjective: int, noun: int, verb: int, adjective2: int, thing: int, place: int
) -> list[int]:
    if pattern == 0:
        return [_THE, adjective, noun, verb, _THE, adjective2, thing, _NEAR, _THE, place, _DOT]
    if pattern == 1:
        return [_THE, adjective, noun, verb, _THE, adjective2, thing, _DOT]
    if pattern == 2:
        return [_IN, _THE, place, _THE, adjective, noun, verb, _A, thing, _DOT]
    return [_THE, noun, verb, _THE, thing, _AND, _GOES, _TO, _THE, place, _DOT]


def _random_sentence(rng: Rng) -> list[int]:
    subject = _random_subject(rng, _choice(rng, _NOUNS))
    return _phrase(
        subject.pattern,
        subject.adjective,
        subject.noun,
        subject.verb,
        subject.object_adjective,
        subject.object,
        subject.place,
    )


class _Prose:
    """An endless run of sentences about one cast of subjects."""

    def __init__(self, rng: Rng) -> None:
        self._rng = rng
        nouns = _sample(rng, _NOUNS, _between(rng, 4, 6))
        self._cast = [_random_subject(rng, noun) for noun in nouns]
        self._current = _below(rng, len(self._cast))

    def sentence(self) -> list[int]:
        draw = self._rng.random
        subject = self._cast[self._current]

        def slot(favourite: int, words: tuple[int, ...]) -> int:
            if draw() < FAVOURITE:
                return favourite
            return words[int(draw() * len(words))]

        pattern = subject.pattern if draw() < FAVOURITE else int(draw() * 4)
        ids = _phrase(
            pattern,
            subject.adjective,
            subject.noun,
            slot(subject.verb, _VERBS),
            slot(subject.object_adjective, _ADJECTIVES),
            slot(subject.object, _NOUNS),
            slot(subject.place, _PLACES),
        )
        if draw() < FAVOURITE:
            self._current = (self._current + 1) % len(self._cast)
        else:
            self._current = int(draw() * len(self._cast))
        return ids

    def line(self) -> list[int]:
        """One sentence as a line of its own."""
        ids = self.sentence()
        ids[0] = _BARE[ids[0]]
        ids.append(_NEWLINE)
        return ids


def sentences(rng: Rng, n_tokens: int, *, end: bool = False) -> Document:
    """Prose with little entropy, four sentences a line.

    The document has a cast of 4 to 6 subjects, each with one adjective and with a favourite
    verb, object, place and sentence pattern; they follow one another in a fixed cycle. Each of
    these choices is the expected one with probability 0.85 and random otherwise.
    """
    length = _body_length(n_tokens, end)
    prose = _Prose(rng)
    ids: list[int] = []
    while len(ids) < length:
        start = len(ids)
        for _ in range(4):
            ids += prose.sentence()
        ids[start] = _BARE[ids[start]]
        ids.append(_NEWLINE)
    del ids[length:]
    return _finish("sentences", ids, [], end)


def passages(rng: Rng, n_tokens: int, *, end: bool = False) -> Document:
    """One random paragraph of 30 to 120 tokens (a line), repeated with 3 % of words changed.

    Each repetition changes the first paragraph's words independently of the other repetitions.
    """
    length = _body_length(n_tokens, end)
    wanted = _between(rng, 30, 108)
    paragraph: list[int] = []
    while len(paragraph) + 1 < wanted:
        paragraph += _random_sentence(rng)
    paragraph[0] = _BARE[paragraph[0]]
    paragraph.append(_NEWLINE)
    content = [index for index, token in enumerate(paragraph) if token in _CLASS_OF]
    ids = list(paragraph)
    while len(ids) < length:
        copy = list(paragraph)
        for index in content:
            if rng.random() < MUTATION:
                copy[index] = _choice(rng, _CLASS_OF[paragraph[index]])
        ids += copy
    del ids[length:]
    return _finish("passages", ids, [], end)


@dataclass(frozen=True)
class _Record:
    key: tuple[int, ...]
    value: tuple[int, int]

    def line(self) -> list[int]:
        return [_KEY, *self.key, _EQUALS, *self.value, _DOT, _NEWLINE]

    def query(self) -> list[int]:
        return [_QUERY, *self.key, _DASH, _ARROW_HEAD, *self.value, _DOT, _NEWLINE]

    def item(self) -> list[int]:
        return [*self.key, _EQUALS, *self.value, _SEMICOLON]


def _key_length(n_records: int) -> int:
    return 1 if n_records <= len(_KEYS) else 2


def _draw_records(rng: Rng, n_records: int) -> list[_Record]:
    if not 1 <= n_records <= MAX_RECORDS:
        raise ValueError(f"n_records must be in 1..{MAX_RECORDS}, not {n_records}")
    keys: list[tuple[int, ...]]
    if _key_length(n_records) == 1:
        keys = [(key,) for key in _sample(rng, _KEYS, n_records)]
    else:
        half = len(_KEYS) // 2
        codes = _sample(rng, range(half * half), n_records)
        keys = [(_KEYS[code // half], _KEYS[half + code % half]) for code in codes]
    return [_Record(key, (_choice(rng, _VALUES), _choice(rng, _VALUES))) for key in keys]


def _filler(rng: Rng, budget: int, what: str) -> list[list[int]]:
    """Prose lines of exactly ``budget`` tokens in all; the last is cut short."""
    if budget < 0:
        raise ValueError(f"n_tokens is too small for the {what} asked: {-budget} more needed")
    lines: list[list[int]] = []
    prose = _Prose(rng)
    while budget > 0:
        line = prose.line()
        if len(line) > budget:
            line = [*line[: budget - 1], _NEWLINE]
        lines.append(line)
        budget -= len(line)
    return lines


def _slots(rng: Rng, n_lines: int, n_records: int) -> dict[int, int]:
    """Which of the ``n_lines + n_records`` places hold which record, uniformly at random."""
    places = _sample(rng, range(n_lines + n_records), n_records)
    return {place: index for index, place in enumerate(places)}


def _pick(rng: Rng, n_records: int, count: int) -> list[int]:
    """``count`` record indices, in rounds without repetition."""
    picked: list[int] = []
    while len(picked) < count:
        picked += _sample(rng, range(n_records), min(n_records, count - len(picked)))
    return picked


def records(
    rng: Rng, n_tokens: int, n_records: int, n_queries: int, *, end: bool = False
) -> Document:
    """``key amber = lion pear .`` lines among prose, asked for as ``? amber -> lion pear .``.

    Half of the queries (rounded down) are sprinkled after their records, the rest close the
    document. The answer spans are the value's two tokens of each query. With more than 64
    records every key has two words.
    """
    length = _body_length(n_tokens, end)
    drawn = _draw_records(rng, n_records)
    key_length = _key_length(n_records)
    budget = length - n_records * (6 + key_length) - n_queries * (7 + key_length)
    lines = _filler(rng, budget, "records and queries")
    slots = _slots(rng, len(lines), n_records)
    place_of = {index: place for place, index in slots.items()}
    total = len(lines) + n_records
    asked = _pick(rng, n_records, n_queries)
    after: dict[int, list[int]] = {}
    for index in asked[: n_queries // 2]:
        after.setdefault(_between(rng, place_of[index], total - 1), []).append(index)
    if n_queries:
        after.setdefault(total - 1, []).extend(asked[n_queries // 2 :])
    ids: list[int] = []
    spans: list[tuple[int, int]] = []
    fillers = iter(lines)
    for place in range(total):
        ids += drawn[slots[place]].line() if place in slots else next(fillers)
        for index in after.get(place, ()):
            ids += drawn[index].query()
            spans.append((len(ids) - 4, len(ids) - 2))
    return _finish("records", ids, spans, end)


def lists(rng: Rng, n_tokens: int, n_records: int, n_asked: int, *, end: bool = False) -> Document:
    """Records among prose, then a question for several keys and the enumeration that answers it.

    The question is ``? amber jade`` and a line break; the answer, which is the one answer span,
    is `` amber = lion pear ; jade = crab fig ; .`` and a line break. The answer line begins with
    a space so that its first key is the same token as in the record and in the question.
    """
    length = _body_length(n_tokens, end)
    if not 1 <= n_asked <= n_records:
        raise ValueError(f"n_asked must be in 1..n_records, not {n_asked}")
    drawn = _draw_records(rng, n_records)
    key_length = _key_length(n_records)
    question = [_QUERY]
    answer: list[int] = []
    for index in _pick(rng, n_records, n_asked):
        question += drawn[index].key
        answer += drawn[index].item()
    question.append(_NEWLINE)
    answer += (_DOT, _NEWLINE)
    budget = length - n_records * (6 + key_length) - len(question) - len(answer)
    lines = _filler(rng, budget, "records and answer")
    slots = _slots(rng, len(lines), n_records)
    ids: list[int] = []
    fillers = iter(lines)
    for place in range(len(lines) + n_records):
        ids += drawn[slots[place]].line() if place in slots else next(fillers)
    ids += question
    ids += answer
    return _finish("lists", ids, [(length - len(answer), length)], end)


def recall(rng: Rng, n_tokens: int, n_symbols: int, *, end: bool = False) -> Document:
    """A random segment of 8 to n_tokens / 2 symbols, repeated; the repetitions are the answer.

    The document's symbols are ``n_symbols`` words drawn from the whole language.
    """
    length = _body_length(n_tokens, end)
    if length < 16:
        raise ValueError(f"n_tokens is too small for a repetition: {n_tokens}")
    if not 1 <= n_symbols <= MAX_SYMBOLS:
        raise ValueError(f"n_symbols must be in 1..{MAX_SYMBOLS}, not {n_symbols}")
    symbols = _sample(rng, SYMBOLS, n_symbols)
    size = _between(rng, 8, length // 2)
    segment = [_choice(rng, symbols) for _ in range(size)]
    ids = segment * (length // size + 1)
    del ids[length:]
    return _finish("recall", ids, [(size, length)], end)


def _any_records(rng: Rng, n_tokens: int, end: bool) -> Document:
    most = max(1, min(48, n_tokens // 24))
    n_records = _between(rng, 1, most)
    return records(rng, n_tokens, n_records, _between(rng, 1, most), end=end)


def _any_lists(rng: Rng, n_tokens: int, end: bool) -> Document:
    n_records = _between(rng, 1, max(1, min(48, n_tokens // 24)))
    return lists(rng, n_tokens, n_records, _between(rng, 1, min(8, n_records)), end=end)


def _any_recall(rng: Rng, n_tokens: int, end: bool) -> Document:
    return recall(rng, n_tokens, _between(rng, 16, MAX_SYMBOLS), end=end)


_MIXED: dict[str, Callable[[Rng, int, bool], Document]] = {
    "logs": lambda rng, n_tokens, end: logs(rng, n_tokens, end=end),
    "sentences": lambda rng, n_tokens, end: sentences(rng, n_tokens, end=end),
    "passages": lambda rng, n_tokens, end: passages(rng, n_tokens, end=end),
    "records": _any_records,
    "lists": _any_lists,
    "recall": _any_recall,
}
#: The kinds of documents.
KINDS: tuple[str, ...] = tuple(_MIXED)


def mixture(
    rng: Rng, n_tokens: int, weights: Mapping[str, float] | None = None, *, end: bool = False
) -> Document:
    """One document of a kind drawn by weight (all kinds alike by default).

    The number of records, of queries and of symbols is drawn as well; ``n_tokens`` must be at
    least 32.
    """
    chosen = dict.fromkeys(KINDS, 1.0) if weights is None else dict(weights)
    unknown = set(chosen) - set(KINDS)
    if unknown:
        raise ValueError(f"unknown kinds: {sorted(unknown)}")
    if n_tokens < 32:
        raise ValueError(f"n_tokens is too small for a mixture: {n_tokens}")
    # In a fixed order, so that the order of the mapping does not matter.
    kinds = [kind for kind in KINDS if chosen.get(kind, 0.0) > 0.0]
    if not kinds:
        raise ValueError("no kind has a positive weight")
    point = rng.random() * sum(chosen[kind] for kind in kinds)
    for kind in kinds:
        point -= chosen[kind]
        if point < 0.0:
            break
    return _MIXED[kind](rng, n_tokens, end)


def prompt(
    kind: str,
    n_tokens: int,
    seed: int,
    *,
    n_records: int | None = None,
    n_asked: int | None = None,
    n_symbols: int = 64,
) -> Prompt:
    """A prompt for evaluation, the same for the same arguments.

    ``logs``, ``sentences`` and ``passages`` end at the last line break within ``n_tokens`` and
    expect nothing in particular. The others have exactly ``n_tokens`` ids: ``lists`` ends after
    the question's line break and expects the enumeration, ``records`` after the arrow of its
    last query and expects the value, ``recall`` within a repetition and expects the next 64 ids.
    By default ``lists`` and ``records`` have as many records as fit, at most 24, and ``lists``
    asks for at most 8 of them.
    """
    if kind not in KINDS:
        raise ValueError(f"unknown kind: {kind}")
    rng = random.Random(f"{kind}/{n_tokens}/{seed}")
    if n_records is None:
        n_records = max(1, min(24, n_tokens // 24))
    if n_asked is None:
        n_asked = min(8, n_records)
    if kind == "lists":
        answer_length = n_asked * (4 + _key_length(n_records)) + 2
        document = lists(rng, n_tokens + answer_length, n_records, n_asked)
    elif kind == "records":
        # The value, the full stop and the line break of the last query come after the prompt.
        document = records(rng, n_tokens + 4, n_records, 1)
    elif kind == "recall":
        document = recall(rng, n_tokens + 64, n_symbols)
        if document.answer_spans[0][0] > n_tokens // 2:
            # Cut the segment, so that the prompt itself shows the repetition.
            size = max(8, n_tokens // 2)
            ids = document.ids[:size] * ((n_tokens + 64) // size + 1)
            document = Document(kind, ids[: n_tokens + 64], [(size, n_tokens + 64)])
    else:
        ids = _MIXED[kind](rng, n_tokens, False).ids
        while ids and ids[-1] != _NEWLINE:
            ids.pop()
        if not ids:
            raise ValueError(f"n_tokens is too small for one line: {n_tokens}")
        return Prompt(ids, text_of(ids), None)
    ids = document.ids[:n_tokens]
    expected = document.ids[n_tokens : document.answer_spans[-1][1]]
    return Prompt(ids, text_of(ids), expected)
