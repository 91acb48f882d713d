"""The share of expected answers that an output holds.

Texts are compared without regard to case and to the number of spaces. An answer must stand by
itself: unlike RULER's match of substrings, ``123`` is not found in ``91234``.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from tllm_wmtp.bench.inputs.prompt import Prompt

_STATED_LETTER = re.compile(r"(?i:correct answer is):?\s*\W{0,3}([A-D])\b")
_LONE_LETTER = re.compile(r"\W*([A-D])(?:[).:,*\n]|\s*$)")


def score(prompt: Prompt, output_text: str) -> float | None:
    """A number from 0 to 1, or None where the prompt has no answer.

    By ``prompt.scoring``:

    - ``all``: the share of the answers that are found anywhere (retrieval, tracing, counting).
    - ``letter``: 1 if the letter after "correct answer is", or else the one that the output
      begins with, is right (LongBench-v2).
    - ``target``: 1 if every part of the target is found before the first full stop or line break
      (BABILong, whose targets have parts separated by commas).
    - ``continuation``: the share of the expected words that the output begins with, in order.
    - ``none``: None.
    """
    if prompt.scoring == "none":
        return None
    if prompt.scoring == "letter":
        return float(_letter(output_text) == prompt.answers[0])
    if prompt.scoring == "continuation":
        return _in_order(prompt.answers[0].split(), output_text.split())
    if prompt.scoring == "target":
        sentence = re.split(r"[.\n]", output_text.strip().lstrip("."), maxsplit=1)[0]
        parts = [part for part in prompt.answers[0].split(",") if part.strip()]
        return float(_found(parts, sentence) == len(parts))
    return _found(prompt.answers, output_text) / len(prompt.answers)


def _plain(text: str) -> str:
    return " ".join(text.casefold().split())


def _found(answers: Sequence[str], text: str) -> int:
    """How many of the answers stand in the text, each by itself."""
    plain = _plain(text)
    return sum(
        re.search(rf"(?<!\w){re.escape(_plain(answer))}(?!\w)", plain) is not None
        for answer in answers
    )


def _letter(text: str) -> str | None:
    match = _STATED_LETTER.search(text) or _LONE_LETTER.match(text)
    return match[1] if match else None


def _in_order(expected: Sequence[str], given: Sequence[str]) -> float:
    same = 0
    for ours, theirs in zip(expected, given, strict=False):
        if ours != theirs:
            break
        same += 1
    return same / len(expected)
