"""The demonstration language: exact lengths, exact encodings, truthful answers."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest

from tllm_wmtp.demo import language
from tllm_wmtp.demo import tokenizer as tk

if TYPE_CHECKING:
    from tokenizers import Tokenizer

tokenizers = pytest.importorskip("tokenizers")

GENERATORS: dict[str, Callable[[random.Random, int, bool], language.Document]] = {
    "logs": lambda rng, n, end: language.logs(rng, n, end=end),
    "sentences": lambda rng, n, end: language.sentences(rng, n, end=end),
    "passages": lambda rng, n, end: language.passages(rng, n, end=end),
    "records": lambda rng, n, end: language.records(rng, n, 6, 5, end=end),
    "lists": lambda rng, n, end: language.lists(rng, n, 6, 3, end=end),
    "recall": lambda rng, n, end: language.recall(rng, n, 40, end=end),
}
GOLDEN = {
    "logs": "effcd70cdea37e5064e702e667f09047fa0aa732d995fb55c3c0659d4bddc632",
    "sentences": "61e6488aff78660d9d3b1e04d34531fe74bd2df98005bdf63c4ced1ec04c4540",
    "passages": "e88d29f2905e1f7fae1e575322c2c7c9dd8f1dbdbd9bbe535f987186bece3cef",
    "records": "5bbf74104792934beba94a752305c0542362b8867308613681d34a6513f90a4c",
    "lists": "564d01f14258df2d19b4034205967d1f7695a194f214661839e7f1fab9fcb3de",
    "recall": "9f6d5b57347106b23ed55127d86859ed2ba88f097287ae41850ed3fcf28bfee0",
}


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return tk.build_tokenizer()


def encode(tokenizer: Tokenizer, text: str) -> list[int]:
    return list(tokenizer.encode(text, add_special_tokens=False).ids)


def answers(document: language.Document) -> list[str]:
    return [language.text_of(document.ids[start:stop]) for start, stop in document.answer_spans]


def record_values(text: str) -> dict[str, str]:
    values: dict[str, str] = {}
    for line in text.split("\n"):
        if line.startswith("key "):
            key, value = line[len("key ") : -len(" .")].split(" = ")
            assert key not in values
            values[key] = value
    return values


def test_vocabulary_size_and_special_tokens(tokenizer: Tokenizer) -> None:
    assert tokenizer.get_vocab_size() == tk.VOCAB_SIZE == 640
    assert tokenizer.get_vocab() == tk.vocabulary()
    assert tokenizer.token_to_id("<|endoftext|>") == tk.END_OF_TEXT_ID == 0
    assert tokenizer.token_to_id("<|pad|>") == tk.PAD_ID == 1
    assert encode(tokenizer, "the<|endoftext|>\n")[1] == 0
    assert 250 <= len(tk.WORDS) <= 300


def test_words_digits_and_punctuation_are_single_tokens(
    tokenizer: Tokenizer,
) -> None:
    spaced = [*tk.WORDS, *"0123456789", *tk.PUNCTUATION]
    bare = [*tk.LINE_WORDS, *"0123456789", *tk.PUNCTUATION, "\n"]
    for text in [*(" " + word for word in spaced), *bare]:
        assert len(encode(tokenizer, text)) == 1, text


@pytest.mark.parametrize(
    "text",
    [
        "",
        "The old fox,\tcafé — naïve  ３²  \r\n\n  x",
        "日本語 русский עברית 👩‍👩‍👧 e\u0301 \u00a0\u2003\x00\x7f",
        "key amber=lion pear.42 -> 7",
    ],
)
def test_any_text_round_trips(tokenizer: Tokenizer, text: str) -> None:
    assert tokenizer.decode(encode(tokenizer, text), skip_special_tokens=False) == text


def test_random_unicode_round_trips(tokenizer: Tokenizer) -> None:
    rng = random.Random(5)
    for _ in range(200):
        codes = [rng.randrange(rng.choice((0x80, 0x3000, 0x110000))) for _ in range(40)]
        text = "".join(chr(code) for code in codes if not 0xD800 <= code < 0xE000)
        assert tokenizer.decode(encode(tokenizer, text), skip_special_tokens=False) == text


def test_tokenizer_file_loads_everywhere(tokenizer: Tokenizer, tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    tokenizer.save(str(path))
    document = language.lists(random.Random(3), 300, 6, 3, end=True)
    loaded = tokenizers.Tokenizer.from_file(str(path))
    assert loaded.to_str() == tk.build_tokenizer().to_str()
    assert encode(loaded, document.text) == document.ids
    transformers = pytest.importorskip("transformers")
    fast = transformers.PreTrainedTokenizerFast(tokenizer_file=str(path))
    assert len(fast) == 640
    assert fast(document.text, add_special_tokens=False)["input_ids"] == document.ids
    assert fast.decode(document.ids, clean_up_tokenization_spaces=False) == document.text


@pytest.mark.parametrize("kind", language.KINDS)
@pytest.mark.parametrize("seed", range(6))
def test_length_encoding_and_determinism(tokenizer: Tokenizer, kind: str, seed: int) -> None:
    for n_tokens in (128, 129, 601, 2048):
        for end in (False, True):
            document = GENERATORS[kind](random.Random(seed), n_tokens, end)
            assert document.kind == kind
            assert len(document.ids) == n_tokens
            assert (document.ids[-1] == tk.END_OF_TEXT_ID) == end
            assert document.ids.count(tk.END_OF_TEXT_ID) == int(end)
            assert encode(tokenizer, document.text) == document.ids
            assert all(0 <= a < b <= n_tokens for a, b in document.answer_spans)
            assert document == GENERATORS[kind](random.Random(seed), n_tokens, end)


@pytest.mark.parametrize("kind", language.KINDS)
def test_golden_digest(kind: str) -> None:
    ids = GENERATORS[kind](random.Random(1234), 1000, True).ids
    assert hashlib.sha256(" ".join(map(str, ids)).encode()).hexdigest() == GOLDEN[kind]


def test_a_numpy_generator_serves() -> None:
    first = language.mixture(np.random.default_rng(7), 512)
    assert first == language.mixture(np.random.default_rng(7), 512)
    assert len(first.ids) == 512


@pytest.mark.parametrize("seed", range(10))
def test_logs_are_predictable_but_for_alerts(seed: int) -> None:
    lines = language.logs(random.Random(seed), 3000).text.split("\n")[:-1]
    ticks = [int(line.split(" t = ")[1].split()[0]) for line in lines]
    assert all((a + 1) % 10 == b for a, b in pairwise(ticks))
    alerts = [line.startswith("alert ") for line in lines]
    assert 0 < sum(alerts) < 0.12 * len(lines)
    hosts = [line.split()[0] for line in lines]
    period = len(set(hosts) - {"alert"})
    assert 3 <= period <= 8
    for index in range(period, len(lines)):
        if not alerts[index] and not alerts[index - period]:
            old, new = lines[index - period].split(), lines[index].split()
            statuses = set(tk.STATUSES)
            differing = [(a, b) for a, b in zip(old, new, strict=True) if a != b]
            for a, b in differing:
                assert {a, b} <= statuses or {a, b} <= set("0123456789")
            assert len(differing) <= 2


def test_log_lines_have_ten_to_sixteen_tokens(tokenizer: Tokenizer) -> None:
    for line in language.logs(random.Random(0), 4000).text.split("\n")[:-1]:
        assert 10 <= len(encode(tokenizer, line + "\n")) <= 16


def test_sentences_break_after_four_and_favour_a_cast() -> None:
    text = language.sentences(random.Random(2), 4000).text
    lines = text.split("\n")[:-1]
    assert all(line.count(" .") == 4 for line in lines)
    found = [sentence for line in lines for sentence in line.split(" .")]
    assert len(set(found)) < 0.7 * len(found)


def test_passages_repeat_with_few_changes() -> None:
    for seed in range(8):
        document = language.passages(random.Random(seed), 4000)
        size = document.text.split("\n", 1)[0].count(" ") + 2
        assert 30 <= size <= 120
        same = [a == b for a, b in zip(document.ids, document.ids[size:], strict=False)]
        assert 0.92 < sum(same) / len(same) < 1.0


@pytest.mark.parametrize(("n_records", "n_queries"), [(1, 1), (12, 9), (60, 80), (120, 50)])
def test_record_answers_are_truthful(n_records: int, n_queries: int) -> None:
    for seed in range(5):
        document = language.records(random.Random(seed), 4096, n_records, n_queries)
        values = record_values(document.text)
        assert len(values) == n_records
        queries = [line[2:-2] for line in document.text.split("\n") if line.startswith("? ")]
        assert len(queries) == len(document.answer_spans) == n_queries
        for query, answer in zip(queries, answers(document), strict=True):
            key, value = query.split(" -> ")
            assert answer == " " + value == " " + values[key]
        for start, _ in document.answer_spans:
            # A query never comes before its record.
            before = language.text_of(document.ids[:start])
            key = before.rsplit("? ", 1)[1][: -len(" ->")]
            assert f"key {key} = " in before


@pytest.mark.parametrize(
    ("n_tokens", "n_records", "n_asked"),
    [(96, 4, 3), (4096, 60, 8), (4096, 200, 10), (16384, 64, 12), (70000, 1000, 20)],
)
def test_list_answers_are_truthful(
    tokenizer: Tokenizer, n_tokens: int, n_records: int, n_asked: int
) -> None:
    document = language.lists(random.Random(n_records), n_tokens, n_records, n_asked)
    assert len(document.ids) == n_tokens
    assert encode(tokenizer, document.text) == document.ids
    values = record_values(document.text)
    assert len(values) == n_records
    (answer,) = answers(document)
    assert answer.endswith(" ; .\n")
    items = answer[1 : -len(" ; .\n")].split(" ; ")
    assert len(items) == n_asked
    assert all(values[item.split(" = ")[0]] == item.split(" = ")[1] for item in items)
    question = document.text[: -len(answer)].rsplit("? ", 1)[1]
    assert question == " ".join(item.split(" = ")[0] for item in items) + "\n"


def test_list_records_lie_all_over_the_haystack() -> None:
    key = tk.vocabulary()["key"]
    places: list[float] = []
    for seed in range(40):
        ids = language.lists(random.Random(seed), 8192, 30, 4).ids
        places += [index / len(ids) for index, token in enumerate(ids) if token == key]
    assert np.histogram(places, bins=4, range=(0, 1))[0].min() > 0.2 * len(places)


@pytest.mark.parametrize("seed", range(5))
def test_recall_repeats_its_segment(seed: int) -> None:
    document = language.recall(random.Random(seed), 500, 20)
    ((start, stop),) = document.answer_spans
    assert 8 <= start <= 250
    assert stop == 500
    assert all(document.ids[i] == document.ids[i - start] for i in range(start, stop))
    assert len(set(document.ids)) <= 20


def test_mixture_follows_the_weights() -> None:
    rng = random.Random(0)
    weights = {"logs": 3.0, "lists": 1.0, "recall": 0.0}
    kinds = [language.mixture(rng, 64, weights).kind for _ in range(400)]
    assert set(kinds) == {"logs", "lists"}
    assert 250 < kinds.count("logs") < 350
    for n_tokens in (32, 33, 100, 1024):
        for _ in range(100):
            document = language.mixture(rng, n_tokens, end=True)
            assert len(document.ids) == n_tokens


@pytest.mark.parametrize("kind", language.KINDS)
@pytest.mark.parametrize("n_tokens", [150, 1000, 4096])
def test_prompts(tokenizer: Tokenizer, kind: str, n_tokens: int) -> None:
    for seed in range(5):
        prompt = language.prompt(kind, n_tokens, seed)
        assert prompt == language.prompt(kind, n_tokens, seed)
        assert encode(tokenizer, prompt.text) == prompt.ids
        if prompt.expected_ids is None:
            assert kind in ("logs", "sentences", "passages")
            assert prompt.text.endswith("\n")
            assert len(prompt.ids) <= n_tokens
            continue
        assert len(prompt.ids) == n_tokens
        expected = language.text_of(prompt.expected_ids)
        assert encode(tokenizer, prompt.text + expected) == prompt.ids + prompt.expected_ids
        if kind == "lists":
            assert prompt.text.endswith("\n")
            values = record_values(prompt.text)
            keys = prompt.text.rsplit("? ", 1)[1].split()
            assert expected == "".join(f" {k} = {values[k]} ;" for k in keys) + " .\n"
        elif kind == "records":
            key = prompt.text.rsplit("? ", 1)[1][: -len(" ->")]
            assert expected == " " + record_values(prompt.text)[key]
        else:
            assert len(prompt.expected_ids) == 64


def test_the_shortest_recall_prompt_shows_a_repetition() -> None:
    for seed in range(20):
        prompt = language.prompt("recall", 16, seed)
        assert prompt.expected_ids is not None
        assert prompt.ids[:8] == prompt.ids[8:] == prompt.expected_ids[:8]


def test_unfit_arguments_are_refused() -> None:
    rng = random.Random(0)
    with pytest.raises(ValueError, match="too small"):
        language.lists(rng, 60, 8, 4)
    with pytest.raises(ValueError, match="n_asked"):
        language.lists(rng, 600, 3, 4)
    with pytest.raises(ValueError, match="n_records"):
        language.records(rng, 70000, language.MAX_RECORDS + 1, 1)
    with pytest.raises(ValueError, match="n_symbols"):
        language.recall(rng, 100, language.MAX_SYMBOLS + 1)
    with pytest.raises(ValueError, match="unknown"):
        language.mixture(rng, 100, {"poems": 1.0})
    with pytest.raises(ValueError, match="unknown"):
        language.prompt("poems", 100, 0)
