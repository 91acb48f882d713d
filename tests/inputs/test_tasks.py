"""What a prompt says is what its answers hold, read back from the text alone."""

from __future__ import annotations

import re
from collections import Counter

import pytest
from tokenizers_at_hand import tokenizer_called

from tllm_wmtp.bench.inputs import DIFFICULTIES, TASKS, Prompt, check, make_prompt, prompts
from tllm_wmtp.bench.inputs.chance import Permutation
from tllm_wmtp.bench.inputs.lexicon import English, Supply
from tllm_wmtp.bench.inputs.options import GENERATED, resolve
from tllm_wmtp.errors import ConfigError

RECORD = {
    "english": re.compile(r"^The code of (\S+) is (.+)\.$", re.M),
    "demo": re.compile(r"^key ([a-z ]+) = ([a-z]+ [a-z]+) \.$", re.M),
}
ASSIGNMENT = {
    "english": re.compile(r"^Let ([A-Z]+) = (\w+)\.$", re.M),
    "demo": re.compile(r"^key ([a-z]+(?: [a-z]+)?) = ([a-z ]+) \.$", re.M),
}
LEXICONS = ("english", "demo")


def made(task: str, tokens: int = 2500, seed: int = 0, **changes: object) -> Prompt:
    return make_prompt(task, tokenizer_called("demo"), tokens, seed, **changes)  # type: ignore[arg-type]


def records(prompt: Prompt) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for key, value in RECORD[prompt.options["lexicon"]].findall(prompt.text):
        found.setdefault(key, []).append(value)
    return found


def question(prompt: Prompt) -> str:
    """The text from the last question mark of the demo lexicon, or from ``Question:``."""
    mark = "Question:" if prompt.options["lexicon"] == "english" else "\n?"
    return prompt.text[prompt.text.rindex(mark) :]


def asked(prompt: Prompt) -> list[str]:
    """The keys in the question, in its order."""
    keys = [key for key in records(prompt) if re.search(rf"\b{key}\b", question(prompt))]
    return sorted(keys, key=lambda key: question(prompt).index(key))


@pytest.mark.parametrize("lexicon", LEXICONS)
@pytest.mark.parametrize(
    "task", ["niah_single", "niah_multikey", "niah_multiquery", "niah_multiquery_enum"]
)
def test_each_key_that_is_asked_for_has_the_value_that_is_expected(task: str, lexicon: str) -> None:
    prompt = made(task, lexicon=lexicon)
    values = records(prompt)
    assert len(values) == prompt.options.get("keys", 1)
    assert all(len(found) == 1 for found in values.values())
    assert prompt.answers == tuple(values[key][0] for key in asked(prompt))
    assert len(prompt.answers) == prompt.options.get("queries", 1)


@pytest.mark.parametrize("lexicon", LEXICONS)
@pytest.mark.parametrize("task", ["niah_multivalue", "niah_multivalue_enum"])
def test_every_value_of_the_key_is_expected_in_the_order_of_the_text(
    task: str, lexicon: str
) -> None:
    prompt = made(task, lexicon=lexicon)
    values = records(prompt)
    assert list(values) == asked(prompt)
    assert prompt.answers == tuple(values[asked(prompt)[0]])
    assert len(set(prompt.answers)) == prompt.options["values"]


@pytest.mark.parametrize("lexicon", LEXICONS)
def test_distractor_records_share_neither_key_nor_value_with_the_answers(lexicon: str) -> None:
    prompt = made("niah_multiquery", 6000, lexicon=lexicon, filler="needles", keys=5, queries=3)
    values = records(prompt)
    assert len(values) > 40
    assert all(len(found) == 1 for found in values.values())
    everything = [found[0] for found in values.values()]
    assert all(everything.count(answer) == 1 for answer in prompt.answers)
    assert prompt.answers == tuple(values[key][0] for key in asked(prompt))


@pytest.mark.parametrize("lexicon", LEXICONS)
@pytest.mark.parametrize("filler", ["prose", "needles"])
def test_following_the_assignments_gives_the_variables(lexicon: str, filler: str) -> None:
    prompt = made("vt", 4000, 1, lexicon=lexicon, chains=3, hops=5, filler=filler)
    holds: dict[str, str] = {}
    for variable, source in ASSIGNMENT[lexicon].findall(prompt.text):
        source = source.removeprefix("key ")
        assert variable not in holds
        holds[variable] = holds.get(source, source)
    wanted = re.search(r"value (\w+)," if lexicon == "english" else r"= (.+)", question(prompt))
    assert wanted is not None
    expected = [variable for variable, value in holds.items() if value == wanted[1]]
    assert list(prompt.answers) == expected
    assert len(expected) == 6
    sources = dict(ASSIGNMENT[lexicon].findall(prompt.text))
    chain = [sources[variable].removeprefix("key ") for variable in expected]
    assert chain == [wanted[1], *expected[:-1]]


@pytest.mark.parametrize("lexicon", LEXICONS)
@pytest.mark.parametrize("difficulty", DIFFICULTIES)
@pytest.mark.parametrize("task", ["cwe", "fwe"])
def test_counting_the_list_gives_the_answers(task: str, difficulty: str, lexicon: str) -> None:
    prompt = made(task, 5000, lexicon=lexicon, difficulty=difficulty)
    listed = prompt.text[: -len(question(prompt))].split("\n\n")[-2 if lexicon == "english" else 0]
    counts = Counter(listed.split()).most_common()
    n_answers = len(prompt.answers)
    assert {word for word, _ in counts[:n_answers]} == set(prompt.answers)
    assert counts[n_answers - 1][1] > counts[n_answers][1]
    assert n_answers == prompt.options.get("common", 3)


def test_a_supply_that_is_used_up_never_repeats_what_was_kept() -> None:
    supply = Supply(Permutation(10, "key"), str, kept=3)
    items = [supply[index] for index in range(40)]
    assert sorted(items[:10]) == sorted(str(number) for number in range(10))
    assert not set(items[:3]) & set(items[3:])
    assert items[10:17] == items[3:10]


def test_words_of_a_long_demo_list_come_again_but_less_often_than_the_common_ones() -> None:
    prompt = made("cwe", 20_000, lexicon="demo")
    assert prompt.options["common_frequency"] > 30
    counts = Counter(prompt.text.split())
    rare = max(number for word, number in counts.items() if word not in prompt.answers)
    assert min(counts[word] for word in prompt.answers) > 2 * rare


def test_zipf_frequencies_follow_the_exponent() -> None:
    prompt = made("fwe", 12_000, lexicon="demo", alpha=2.0)
    counts = [number for _, number in Counter(prompt.text.split()).most_common(3)]
    assert counts[0] / counts[1] == pytest.approx(4, rel=0.2)
    assert counts[0] / counts[2] == pytest.approx(9, rel=0.3)


@pytest.mark.parametrize("task", GENERATED)
def test_every_difficulty_of_every_task_is_made(task: str) -> None:
    for difficulty in DIFFICULTIES:
        prompt = made(task, 6000, difficulty=difficulty)
        assert prompt.answers
        assert prompt.options["difficulty"] == difficulty
        assert set(TASKS[task].options) <= set(prompt.options)


def test_filler_kinds_differ_in_how_much_they_repeat() -> None:
    distinct = {}
    for filler in ("repeat", "prose", "random", "needles"):
        lines = made("niah_single", 4000, lexicon="demo", filler=filler).text.split("\n")
        distinct[filler] = len(set(lines)) / len(lines)
    assert distinct["repeat"] < 0.05 < distinct["prose"] < distinct["random"]
    assert distinct["needles"] > 0.95


def test_value_types_look_as_they_are_called() -> None:
    patterns = {"numbers": r"\d{7}", "words": r"[a-z]+ [a-z]+ [a-z]+", "uuid": r"[0-9a-f-]{36}"}
    for value_type, pattern in patterns.items():
        (answer,) = made("niah_single", value_type=value_type).answers
        assert re.fullmatch(pattern, answer)


def test_prompts_of_one_call_differ_and_those_of_two_seeds_as_well() -> None:
    tokenizer = tokenizer_called("demo")
    texts = {
        prompt.text
        for seed in (0, 1)
        for prompt in prompts("niah_multiquery", tokenizer, 700, 3, seed, lexicon="demo")
    }
    assert len(texts) == 6


def test_the_same_records_are_asked_for_at_every_length() -> None:
    short, long = (made("niah_multiquery", tokens, 3) for tokens in (1000, 5000))
    assert question(short) == question(long)
    assert records(short) == records(long)


@pytest.mark.parametrize("task", ["logs", "sentences", "lists", "recall"])
@pytest.mark.parametrize("tokens", [200, 1000, 1001])
def test_documents_of_the_demo_language_have_the_exact_length(task: str, tokens: int) -> None:
    tokenizer = tokenizer_called("demo")
    first, second = prompts(task, tokenizer, tokens, 2, 5)
    assert first.text != second.text
    for prompt in (first, second):
        assert prompt.ids == tokenizer.encode(prompt.text).ids
        assert len(prompt.ids) == tokens
    if task in ("logs", "sentences"):
        assert first.text.endswith("\n")
        assert first.answers == ()


def test_lists_expect_the_values_of_the_records_asked_for() -> None:
    prompt = made("lists", 900)
    values = records(prompt)
    assert prompt.answers == tuple(values[key][0] for key in asked(prompt))
    assert prompt.options == {"n_records": 24, "n_asked": 8, "lexicon": "demo"}


def test_recall_expects_what_came_one_period_before() -> None:
    prompt = made("recall", 600, 3, n_symbols=16)
    text = prompt.text + " " + prompt.answers[0]
    words = text.split()
    assert len(words) == 664
    periods = [p for p in range(8, 333) if words[p:] == words[:-p]]
    assert periods, "nothing is repeated"


def test_documents_of_the_demo_language_need_its_tokenizer() -> None:
    with pytest.raises(ConfigError, match=r"task logs with another tokenizer.*use the demo"):
        make_prompt("logs", tokenizer_called("bytes"), 300, 0)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"task": "nih_single"}, r"task 'nih_single': it must be one of niah_single, .*fwe"),
        ({"tokens": 0}, r"tokens 0: it must be 1 or more; raise it"),
        ({"tokens": 2.5}, r"tokens 2.5: it must be an integer"),
        ({"seed": "1"}, r"seed '1': it must be an integer; pass seed as an int"),
        ({"seed": True}, r"seed True: it must be an integer"),
        ({"seed": -1}, r"seed -1: it must be 0 or more"),
        ({"hops": 3}, r"option hops of task niah_multiquery: it must be one of keys, queries,"),
        ({"filler": "essay"}, r"filler 'essay': it must be one of repeat, prose, random, needles"),
        ({"difficulty": "harder"}, r"difficulty 'harder': it must be one of easy, medium, hard"),
        ({"lexicon": "latin"}, r"lexicon 'latin': it must be one of english, demo"),
        ({"keys": "4"}, r"keys '4': it must be an integer"),
        ({"keys": 0}, r"keys 0: it must be 1 or more and at most 4096; raise it"),
        ({"keys": 5000}, r"keys 5000: it must be 1 or more and at most 4096; lower it"),
        ({"tokens": 2**30 + 1}, r"tokens 1073741825: it must be 1 or more and at most 1073741824"),
        ({"keys": 2, "queries": 3}, r"queries 3: no more can be asked than there are keys \(2\)"),
        ({"depth": 1.5}, r"depth 1.5: it must be uniform, or a share of the filler from 0 to 1"),
        ({"depth": float("nan")}, r"depth nan: it must be uniform"),
        ({"value_type": "hex"}, r"value_type 'hex': it must be one of words, numbers, uuid"),
        (
            {"lexicon": "demo", "value_type": "uuid"},
            r"in the demo lexicon, value_type 'uuid': it must be one of words",
        ),
    ],
)
def test_a_wrong_setting_is_named_with_rule_and_remedy(
    changes: dict[str, object], message: str
) -> None:
    settings = {"task": "niah_multiquery", "tokens": 900, "seed": 0, **changes}
    with pytest.raises(ConfigError, match=message):
        make_prompt(tokenizer=tokenizer_called("demo"), **settings)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=message):
        check(**settings)  # type: ignore[arg-type]


def test_right_settings_pass_without_a_tokenizer() -> None:
    for task in (*GENERATED, "logs", "recall"):
        check(task, 4096, 0, lexicon="demo", difficulty="hard")
    with pytest.raises(ConfigError, match="task recall needs 16 or more"):
        check("recall", 15, 0)
    with pytest.raises(ConfigError, match="n_symbols 0: it must be 1 or more"):
        check("recall", 100, 0, n_symbols=0)


@pytest.mark.parametrize("alpha", [0.5, 2.25, float("nan"), float("inf"), "2"])
def test_an_exponent_that_is_no_half_is_refused(alpha: object) -> None:
    with pytest.raises(ConfigError, match=r"alpha .*: it must be a multiple of 0.5"):
        made("fwe", alpha=alpha)


def test_more_queries_bring_their_keys_with_them() -> None:
    assert made("niah_multiquery", 3000, queries=20).options["keys"] == 20
    assert made("niah_multiquery_enum", 3000, keys=3).options["queries"] == 3


def test_records_that_distract_need_values_that_are_left() -> None:
    settings = {"lexicon": "demo", "filler": "needles"}
    with pytest.raises(ConfigError, match="4097 different ones are needed, .* has 4096; lower it"):
        made("niah_multivalue", 60_000, values=4096, **settings)
    assert len(made("niah_multivalue", 60_000, values=4095, **settings).answers) == 4095


@pytest.mark.parametrize(
    ("tokens", "frequency"),
    [(700, 16), (2660, 19), (100_000, 20)],  # twice the rare ones' 8; half the list; the preset
)
def test_common_words_take_half_of_a_short_list(tokens: int, frequency: int) -> None:
    options = resolve("cwe", "hard", English(), tokens, {})
    assert options["common_frequency"] == frequency


def test_both_zeros_are_one_depth() -> None:
    assert made("niah_single", depth=-0.0) == made("niah_single", depth=0)
    assert str(made("niah_single", depth=-0.0).options["depth"]) == "0.0"


def test_common_words_that_are_not_more_common_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"common_frequency 2: the common words must be"):
        made("cwe", 3000, lexicon="demo", common_frequency=2, rare_frequency=8)


def test_common_words_that_are_only_as_common_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"more common than the others, one of which comes 3 t"):
        made("cwe", 3000, common=3, common_frequency=3, rare_frequency=3)


def test_a_list_too_short_for_an_order_of_words_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"20 tokens of task fwe: 3 words must be more frequent"):
        made("fwe", 20, lexicon="demo", alpha=1.0)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        ({"count": 0}, "count 0: it must be 1 or more"),
        ({"count": 2**30}, "1073741824 prompts of 900 tokens: together they may have 1073741824"),
        ({"path": "x.json"}, "only longbench_v2 and babilong are read from a file"),
    ],
)
def test_the_entry_refuses_what_makes_no_prompt(call: dict[str, object], message: str) -> None:
    settings = {"task": "vt", "tokens": 900, "count": 1, "seed": 0, **call}
    with pytest.raises(ConfigError, match=message):
        prompts(tokenizer=tokenizer_called("demo"), **settings)  # type: ignore[arg-type]
