"""Prompts of an exact number of tokens, for any tokenizer of the ``tokenizers`` library.

A prompt is a head, filler lines with records between them, and a question. Filler lines are counted
one by one; the last few tokens are a cut line of filler, before the first whole one, whose words
are chosen so that the count comes out. The text is then encoded as a whole. Where that differs from
the sum of the lines (tokenizers that look across line breaks), the cut line is made anew, and
after a large difference the number of lines is chosen anew as well.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any

from tllm_wmtp.errors import ConfigError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

#: Room for the cut line; a shorter one might not exist in some vocabulary.
CUT_LINE_TOKENS = 12
#: A cut line of other lengths serves as well, if only it has to change to correct the count.
LEAST_CUT_TOKENS, MOST_CUT_TOKENS = 2, 64
#: Lines that are made and counted together; as many as there are already, within these bounds.
LEAST_AT_ONCE, MOST_AT_ONCE = 16, 2000
MOST_TRIES = 12
#: Characters around the cut line that can change how it is encoded.
CONTEXT_CHARACTERS = 64
#: Ends of the cut line's source that are tried, from the longest that fits.
MOST_ENDS = 8
WORD_STARTS = re.compile(r"(?<=\n)(?=.)|(?<=[^ \n])(?= )|^")
GLUE = tuple("abcdefghijklmnopqrstuvwxyz")


@dataclass(frozen=True)
class Layout:
    """What a prompt is made of; every line ends with a line break.

    Attributes:
        task: named in errors.
        head: text before the first filler line.
        records: lines to place between filler lines, with the share of the filler before each
            (0 to 1), ascending.
        filler: lines without end.
        tail: the question.
        words: for the cut line.
    """

    task: str
    head: str
    records: Sequence[tuple[str, float]]
    filler: Iterator[str]
    tail: str
    words: Sequence[str]


@dataclass(frozen=True)
class Fitted:
    """A text and what the tokenizer makes of it; ``positions`` are those of the records."""

    text: str
    ids: list[int]
    positions: tuple[int, ...]


def check_tokenizer(tokenizer: Any) -> None:
    """Refuses a tokenizer that would cut or lengthen a prompt.

    Raises:
        ConfigError: not a ``tokenizers.Tokenizer``, or it truncates or pads.
    """
    if not hasattr(tokenizer, "encode_batch_fast"):
        raise ConfigError(
            f"a {type(tokenizer).__name__} as tokenizer",
            "it must be a tokenizers.Tokenizer (of version 0.20 or later)",
            "load tokenizer.json with tokenizers.Tokenizer.from_file",
        )
    for what, setting in (("truncation", tokenizer.truncation), ("padding", tokenizer.padding)):
        if setting is not None:
            raise ConfigError(
                f"a tokenizer with {what}",
                "the ids must be those of the whole text and no others",
                f"call tokenizer.no_{what}()",
            )


def encode(tokenizer: Tokenizer, text: str) -> list[int]:
    """The ids that ``tokenizer.encode(text).ids`` gives, without computing their offsets."""
    return list(tokenizer.encode_batch_fast([text])[0].ids)


def fit(layout: Layout, tokenizer: Tokenizer, tokens: int) -> Fitted:
    """The layout with as much filler as makes exactly ``tokens`` ids.

    Raises:
        ConfigError: too few tokens for what the layout must hold, or no text was found that this
            tokenizer encodes to that number.
    """
    return _Fit(layout, tokenizer, tokens).run()


class _Fit:
    def __init__(self, layout: Layout, tokenizer: Tokenizer, tokens: int) -> None:
        self.layout, self.tokenizer, self.tokens = layout, tokenizer, tokens
        records = "".join(line for line, _ in layout.records)
        self.fixed = len(encode(tokenizer, layout.head + records + layout.tail))
        needed = self.fixed + CUT_LINE_TOKENS
        if tokens < needed:
            raise ConfigError(
                f"{tokens} tokens",
                f"task {layout.task} with its {len(layout.records)} records and its question "
                f"needs {needed} or more with this tokenizer",
                "raise the tokens, or ask for fewer records",
            )
        self.lines: list[str] = []
        #: ``ends[n]``: tokens of the first n filler lines.
        self.ends = [0]
        self._count_of: dict[str, int] = {}
        self._across: int | None = None

    def run(self) -> Fitted:
        goal, wanted, n_lines = self.tokens, 0, 0
        body: list[str] = []
        places: list[int] = []
        for attempt in range(MOST_TRIES):
            if not LEAST_CUT_TOKENS <= wanted <= MOST_CUT_TOKENS:
                # A goal below the least that fits is met by the least; the next is corrected.
                room = max(goal - self.fixed, CUT_LINE_TOKENS)
                self._extend(room)
                n_lines = bisect_left(self.ends, room - CUT_LINE_TOKENS + 1) - 1
                wanted = room - self.ends[n_lines]
                body, places = self._body(n_lines)
            # Other lines at each attempt, so that it is not a repetition of an earlier one.
            cut = self._cut_line(wanted, self._lines_of(wanted, n_lines + attempt), body[0])
            if cut is None:
                continue
            text = "".join((self.layout.head, cut, *body))
            ids = encode(self.tokenizer, text)
            if len(ids) == self.tokens:
                return Fitted(text, ids, self._positions(text, places, cut))
            goal += self.tokens - len(ids)
            wanted += self.tokens - len(ids)
        raise ConfigError(
            f"{self.tokens} tokens of task {self.layout.task}",
            f"no text of exactly that length was found in {MOST_TRIES} tries with this tokenizer",
            "use another number of tokens or another seed",
        )

    def _extend(self, room: int) -> None:
        """Filler lines until they exceed ``room`` tokens."""
        while self.ends[-1] <= room:
            at_once = min(LEAST_AT_ONCE + len(self.lines), MOST_AT_ONCE)
            batch = list(islice(self.layout.filler, at_once))
            for line, count in zip(batch, self._counts(batch), strict=True):
                self.lines.append(line)
                self.ends.append(self.ends[-1] + count)

    def _counts(self, lines: Sequence[str]) -> list[int]:
        """Tokens that each line adds to a text that goes on around it."""
        if self._across is None:
            pair = self._bare([lines[0] + lines[1], lines[0], lines[1]])
            self._across = pair[0] - pair[1] - pair[2]
        new = [line for line in dict.fromkeys(lines) if line not in self._count_of]
        for line, count in zip(new, self._bare(new), strict=True):
            self._count_of[line] = max(1, count + self._across)
        return [self._count_of[line] for line in lines]

    def _bare(self, texts: Sequence[str]) -> list[int]:
        encoded = self.tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        return [len(one) for one in encoded]

    def _lines_of(self, tokens: int, start: int) -> str:
        """Successive filler lines of ``tokens`` or a few more."""
        taken, index = "", start
        while tokens > 0:
            line = self.lines[index % len(self.lines)]
            taken += line
            tokens -= self._count_of[line]
            index += 1
        return taken

    def _cut_line(self, wanted: int, source: str, following: str) -> str | None:
        """A text that adds exactly ``wanted`` tokens between the head and the following line.

        It is the end of ``source``, with words put before it where that end has too few tokens
        and the next longer one too many, and letters where every word has. None where nothing fits.
        """
        before = self.layout.head[-CONTEXT_CHARACTERS:]
        after = following[:CONTEXT_CHARACTERS]
        base = self._bare([before + after])[0]

        def costs(texts: Sequence[str]) -> list[int]:
            return [count - base for count in self._bare([before + t + after for t in texts])]

        starts = [match.start() for match in WORD_STARTS.finditer(source)]
        ends = [source[start:] for start in starts] + ["\n"]
        fitting = sorted(
            ((cost, -rank) for rank, cost in enumerate(costs(ends)) if cost <= wanted),
            reverse=True,
        )
        for spent, rank in fitting[:MOST_ENDS]:
            made = self._lengthen(ends[-rank], spent, wanted, costs)
            if made is not None:
                return made
        return None

    def _lengthen(
        self, end: str, spent: int, wanted: int, costs: Callable[[Sequence[str]], list[int]]
    ) -> str | None:
        """``end`` with words, or else letters, before it until it costs ``wanted``."""
        while spent < wanted:
            between = "" if end[0] in " \n" else "\n"
            words = [f" {word}{between}" for word in self.layout.words]
            longer = [piece + end for piece in (*words, *GLUE)]
            now = costs(longer)
            best = max((cost for cost in now if cost <= wanted), default=spent)
            if best <= spent:
                return None
            end, spent = longer[now.index(best)], best
        return end

    def _body(self, n_lines: int) -> tuple[list[str], list[int]]:
        """What follows the cut line, and the number of filler lines before each record."""
        filler = self.ends[n_lines]
        places = [
            bisect_left(self.ends, round(share * filler), 0, n_lines)
            for _, share in self.layout.records
        ]
        parts: list[str] = []
        done = 0
        for (line, _), place in zip(self.layout.records, places, strict=True):
            parts += self.lines[done:place]
            parts.append(line)
            done = place
        parts += self.lines[done:n_lines]
        parts.append(self.layout.tail)
        return parts, places

    def _positions(self, text: str, places: Sequence[int], cut: str) -> tuple[int, ...]:
        """Index of the token that each record's first character is in."""
        if not places:
            return ()
        encoding = self.tokenizer.encode(text)
        start, done = len(self.layout.head) + len(cut), 0
        positions = []
        for (line, _), place in zip(self.layout.records, places, strict=True):
            start += sum(map(len, self.lines[done:place]))
            done = place
            # A tokenizer may drop characters, such as a first space.
            tokens = map(encoding.char_to_token, range(start, start + len(line)))
            positions.append(next(token for token in tokens if token is not None))
            start += len(line)
        return tuple(positions)
