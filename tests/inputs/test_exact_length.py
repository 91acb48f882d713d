"""A prompt has exactly the tokens asked for, and they are those of its text."""

from __future__ import annotations

import random
from itertools import cycle

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from tokenizers_at_hand import NAMES, tokenizer_called

from tllm_wmtp.bench.inputs import LEXICONS, make_prompt
from tllm_wmtp.bench.inputs.fit import Layout, fit
from tllm_wmtp.errors import ConfigError

TASKS = ("niah_single", "niah_multiquery_enum", "vt", "cwe", "fwe")


@pytest.mark.parametrize("lexicon", LEXICONS)
@pytest.mark.parametrize("name", NAMES)
def test_every_task_has_the_length_asked_for_with_every_tokenizer(name: str, lexicon: str) -> None:
    tokenizer = tokenizer_called(name)
    for task, tokens in zip(TASKS, (701, 1602, 903, 1804, 1205), strict=True):
        prompt = make_prompt(task, tokenizer, tokens, 3, lexicon=lexicon)
        assert prompt.ids == tokenizer.encode(prompt.text).ids
        assert len(prompt.ids) == tokens


@pytest.mark.parametrize("name", NAMES)
def test_successive_lengths_all_come_out(name: str) -> None:
    tokenizer = tokenizer_called(name)
    for tokens in range(400, 408):
        prompt = make_prompt("niah_single", tokenizer, tokens, tokens)
        assert len(tokenizer.encode(prompt.text).ids) == tokens


@pytest.mark.slow
@pytest.mark.parametrize("lexicon", LEXICONS)
@pytest.mark.parametrize("name", NAMES)
def test_hundreds_of_lengths_come_out(name: str, lexicon: str) -> None:
    tokenizer = tokenizer_called(name)
    for tokens, task in zip(range(2000, 2200), cycle(TASKS)):
        prompt = make_prompt(task, tokenizer, tokens, tokens % 11, lexicon=lexicon)
        assert len(tokenizer.encode(prompt.text).ids) == tokens


@pytest.mark.parametrize("name", NAMES)
def test_too_few_tokens_are_refused_with_a_number_that_is_enough(name: str) -> None:
    tokenizer = tokenizer_called(name)
    with pytest.raises(ConfigError, match=r"20 tokens: task vt .* needs \d+ or more") as refusal:
        make_prompt("vt", tokenizer, 20, 0)
    words = refusal.value.rule.split()
    needed = int(words[words.index("needs") + 1])
    assert len(make_prompt("vt", tokenizer, needed, 0).ids) == needed


def test_the_number_in_the_refusal_is_enough_for_the_same_records() -> None:
    tokenizer = tokenizer_called("bytes")

    def layout() -> Layout:
        records = [("key oak = crab fig .\n", 0.5)]
        return Layout("task", "head\n", records, cycle(["the old fox .\n"]), "? oak", ("fox",))

    with pytest.raises(ConfigError, match="needs") as refusal:
        fit(layout(), tokenizer, 5)
    words = refusal.value.rule.split()
    needed = int(words[words.index("needs") + 1])
    assert len(fit(layout(), tokenizer, needed).ids) == needed
    with pytest.raises(ConfigError, match=f"needs {needed}"):
        fit(layout(), tokenizer, needed - 1)


def test_a_length_that_no_text_has_is_refused_and_named() -> None:
    """A tokenizer of pairs: every word is two tokens, every line break too."""
    letters = "abcdefghijklmnopqrstuvwxyz"
    tokenizer = Tokenizer(models.WordLevel({"<unk>": 0, "x": 1}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split("\n", "isolated"),
            pre_tokenizers.WhitespaceSplit(),
        ]
    )
    even = cycle(["the old\n", "red fox\n"])
    layout = Layout("task", "", [], even, "end", (f"{letters} {letters}",))
    with pytest.raises(ConfigError, match="no text of exactly that length"):
        fit(layout, _Doubled(tokenizer), 40)  # type: ignore[arg-type]


class _Doubled:
    """Counts every token of another tokenizer twice, and one more for the text."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def encode_batch_fast(self, texts: list[str], add_special_tokens: bool = True) -> list[object]:
        class Encoding:
            def __init__(self, ids: list[int]) -> None:
                self.ids = ids

            def __len__(self) -> int:
                return len(self.ids)

        found = self._tokenizer.encode_batch_fast(texts, add_special_tokens=add_special_tokens)
        extra = [0] if add_special_tokens else []
        return [Encoding([i for i in one.ids for _ in range(2)] + extra) for one in found]


def test_records_are_where_the_prompt_says() -> None:
    tokenizer = tokenizer_called("demo")
    prompt = make_prompt("niah_multiquery", tokenizer, 3000, 5, lexicon="demo")
    assert len(prompt.needles) == prompt.options["keys"]
    for position, depth in zip(prompt.needles, prompt.depths, strict=True):
        assert tokenizer.decode(prompt.ids[position : position + 1]) == "key"
        assert depth == position / 3000


@pytest.mark.parametrize("name", ["bytes", "wordpiece"])
def test_positions_hold_for_tokenizers_that_split_words(name: str) -> None:
    tokenizer = tokenizer_called(name)
    prompt = make_prompt("niah_multivalue", tokenizer, 2000, 1)
    for position in prompt.needles:
        start = tokenizer.decode(prompt.ids[position : position + 8]).lower().replace(" ", "")
        assert start.startswith("thecodeof")


@pytest.mark.parametrize("name", ["metaspace", "unsplit"])
def test_positions_hold_for_tokenizers_that_join_across_lines(name: str) -> None:
    tokenizer = tokenizer_called(name)
    prompt = make_prompt("niah_multikey", tokenizer, 20_000, 0, keys=6)
    records = [line for line in prompt.text.split("\n") if line.startswith("The code of")]
    for position, record in zip(prompt.needles, records, strict=True):
        around = tokenizer.decode(prompt.ids[position : position + 60])
        read = around.replace(" ", "").replace("\u2581", "").lstrip(".\n")
        assert read.startswith(record.replace(" ", ""))


@pytest.mark.parametrize("share", [0.0, 0.25, 1.0])
def test_a_fixed_depth_puts_the_record_there(share: float) -> None:
    tokenizer = tokenizer_called("demo")
    prompt = make_prompt("niah_single", tokenizer, 4000, 2, lexicon="demo", depth=share)
    assert prompt.depths[0] == pytest.approx(share, abs=0.012)


def test_records_spread_over_the_whole_prompt() -> None:
    tokenizer = tokenizer_called("demo")
    depths = [
        depth
        for seed in range(6)
        for depth in make_prompt(
            "niah_multiquery_enum", tokenizer, 1500, seed, lexicon="demo"
        ).depths
    ]
    quarters = [sum(low <= depth < low + 0.25 for depth in depths) for low in (0, 0.25, 0.5, 0.75)]
    # 144 draws: 36 expected in each quarter, standard deviation 5.2.
    assert all(16 <= quarter <= 56 for quarter in quarters), quarters


def test_a_tokenizer_that_cuts_or_pads_is_refused() -> None:
    tokenizer = Tokenizer.from_str(tokenizer_called("demo").to_str())
    tokenizer.enable_truncation(512)
    with pytest.raises(ConfigError, match=r"truncation.*no_truncation"):
        make_prompt("niah_single", tokenizer, 600, 0)
    tokenizer.no_truncation()
    tokenizer.enable_padding(length=4096)
    with pytest.raises(ConfigError, match=r"padding.*no_padding"):
        make_prompt("niah_single", tokenizer, 600, 0)


def test_something_else_than_a_tokenizer_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"a NoneType as tokenizer: it must be a tokenizers"):
        make_prompt("niah_single", None, 600, 0)  # type: ignore[arg-type]


def test_what_is_made_depends_on_nothing_else() -> None:
    """Neither on the state of the global random numbers nor on what was made before."""
    tokenizer = tokenizer_called("demo")
    first = make_prompt("niah_multiquery", tokenizer, 800, 4, lexicon="demo")
    random.seed(1)
    make_prompt("fwe", tokenizer, 800, 9, lexicon="demo")
    again = make_prompt("niah_multiquery", tokenizer, 800, 4, lexicon="demo")
    assert (again.text, again.ids, again.answers) == (first.text, first.ids, first.answers)
