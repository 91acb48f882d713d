"""Incremental text against decoding everything at once."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from tiny_model import add_byte_tokenizer
from tokenizers import Tokenizer

from tllm_wmtp.executor.text import OutputText


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder: Path = add_byte_tokenizer(tmp_path_factory.mktemp("bytes"))
    return Tokenizer.from_file(str(folder / "tokenizer.json"))


def test_no_half_character_is_ever_shown(tokenizer: Tokenizer) -> None:
    whole = "naïve 日本語 🙂 end"
    text, shown = OutputText(tokenizer.decode), []
    for token in whole.encode():
        text.push(token)
        shown.append(text.text)
    assert text.text == whole
    for earlier in shown:
        assert whole.startswith(earlier)
        assert "\ufffd" not in earlier


def test_an_incomplete_tail_is_shown_at_the_end(tokenizer: Tokenizer) -> None:
    text = OutputText(tokenizer.decode)
    for token in "ab語".encode()[:-1]:
        text.push(token)
    assert text.text == "ab"
    text.finish()
    text.finish()
    assert text.text == "ab\ufffd"


def test_random_bytes_decode_as_they_do_at_once(tokenizer: Tokenizer) -> None:
    chance = random.Random(3)
    for _ in range(200):
        ids = [chance.randrange(257) for _ in range(chance.randrange(1, 40))]
        text = OutputText(tokenizer.decode)
        for token in ids:
            text.push(token)
        text.finish()
        assert text.text == tokenizer.decode(ids)


def test_a_stop_string_over_several_tokens_cuts_the_text(tokenizer: Tokenizer) -> None:
    for stops in (("END",), ("D", "END"), ("xx", "END", "ND")):
        text = OutputText(tokenizer.decode, stops)
        fed = 0
        for token in b"some END here":
            fed += 1
            if text.push(token):
                break
        stop_at = min("some END".find(stop) for stop in stops if stop in "some END")
        assert text.text == "some END"[:stop_at]
        assert fed == len("some END")
        assert text.settled() == text.text


def test_several_stops_in_one_token_end_at_the_first() -> None:
    text = OutputText(lambda ids: "".join("abcXdefY" for _ in ids), ("Y", "X"))
    assert text.push(0)
    assert text.text == "abc"


def test_what_may_become_a_stop_string_is_held_back(tokenizer: Tokenizer) -> None:
    text, settled = OutputText(tokenizer.decode, ("<end>",)), []
    for token in b"a<en<ex":
        text.push(token)
        settled.append(text.settled())
    assert settled == ["a", "a", "a", "a", "a<en", "a<en", "a<en<ex"]
    text.push(ord("<"))
    assert text.settled() == "a<en<ex"
    text.finish()
    assert text.text == "a<en<ex<"


def test_a_stop_before_half_a_character_is_found_at_the_end(tokenizer: Tokenizer) -> None:
    """A token that holds a stop string and the first byte of a character waits for the rest."""
    whole = "one STOP"
    merged = {0: whole, 1: whole + "\ufffd"}
    text = OutputText(lambda ids: merged[ids[-1]] if ids else "", ("STOP",))
    assert not text.push(1)
    assert text.finish()
    assert text.text == "one "
    plain = OutputText(tokenizer.decode, ("STOP",))
    plain.push(ord("a"))
    assert not plain.finish()
