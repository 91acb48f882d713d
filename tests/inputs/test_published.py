"""Published items from small files in their formats."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tokenizers_at_hand import NAMES, tokenizer_called

from tllm_wmtp.bench.inputs import Prompt, prompts, score
from tllm_wmtp.errors import ConfigError

ARTICLE = " ".join(f"In year {year} the mill was painted by the baker." for year in range(300))


def longbench_item(number: int, **changes: object) -> dict[str, object]:
    return {
        "_id": f"id{number}",
        "domain": "Code Repository Understanding",
        "sub_domain": "Code repo QA",
        "difficulty": "easy",
        "length": "short",
        "question": f"Which one is number {number}?",
        "choice_A": "the mill",
        "choice_B": "the baker",
        "choice_C": "the year",
        "choice_D": "none",
        "answer": "B",
        "context": f"{number}. {ARTICLE}",
        **changes,
    }


ITEMS = [
    longbench_item(0),
    longbench_item(1, difficulty="hard", length="long", answer="D"),
    longbench_item(2, domain="Long-dialogue History Understanding", sub_domain="Agent history QA"),
]


@pytest.fixture
def array(tmp_path: Path) -> Path:
    file = tmp_path / "data.json"
    file.write_text(json.dumps(ITEMS, indent=2), encoding="utf-8")
    return file


def read(
    task: str, path: Path, tokens: int = 100_000, count: int = 1, **options: str
) -> list[Prompt]:
    return prompts(task, tokenizer_called("demo"), tokens, count, 0, path=path, **options)


def test_an_item_becomes_context_question_and_choices(array: Path) -> None:
    (prompt,) = read("longbench_v2", array, length="long")
    assert prompt.source == "id1"
    assert prompt.answers == ("D",)
    assert ITEMS[1]["context"] in prompt.text  # type: ignore[operator]
    ending = prompt.text[prompt.text.index("</text>") :]
    assert ending.index("Which one is number 1?") < ending.index("(A) the mill\n(B) the baker\n")
    assert prompt.cut_tokens == 0
    assert prompt.ids == tokenizer_called("demo").encode(prompt.text).ids
    assert score(prompt, "The correct answer is (D)") == 1.0


def test_json_lines_read_like_an_array(array: Path, tmp_path: Path) -> None:
    lines = tmp_path / "data.jsonl"
    lines.write_text("".join(json.dumps(item) + "\n\n" for item in ITEMS), encoding="utf-8-sig")
    a = read("longbench_v2", array, count=3)
    b = read("longbench_v2", lines, count=3)
    assert [p.text for p in a] == [p.text for p in b]
    assert {p.source for p in a} == {"id0", "id1", "id2"}


@pytest.mark.parametrize(
    ("options", "sources"),
    [
        ({"domain": "code repository understanding"}, {"id0", "id1"}),
        ({"question_difficulty": "hard"}, {"id1"}),
        ({"length": "short", "sub_domain": "Agent history QA"}, {"id2"}),
    ],
)
def test_filters_choose_items(array: Path, options: dict[str, str], sources: set[str]) -> None:
    chosen = read("longbench_v2", array, count=len(sources), **options)
    assert {prompt.source for prompt in chosen} == sources
    with pytest.raises(ConfigError, match=f"{len(sources)} match .*lower the count"):
        read("longbench_v2", array, count=len(sources) + 1, **options)


@pytest.mark.parametrize("name", NAMES)
def test_a_long_context_loses_its_middle(array: Path, name: str) -> None:
    tokenizer = tokenizer_called(name)
    (prompt,) = prompts("longbench_v2", tokenizer, 700, 1, 0, path=array, length="long")
    assert prompt.ids == tokenizer.encode(prompt.text).ids
    assert 690 <= len(prompt.ids) <= 700
    if name == "demo":
        assert len(prompt.ids) == 700
        (whole_prompt,) = read("longbench_v2", array, length="long")
        assert prompt.cut_tokens == len(whole_prompt.ids) - 700
    context = str(ITEMS[1]["context"])
    kept = prompt.text.split("<text>\n")[1].split("\n</text>")[0]
    head = len(kept) // 3
    assert context.startswith(kept[:head])
    assert context.endswith(kept[-head:])
    whole = len(tokenizer.encode(context, add_special_tokens=False).ids)
    left = len(tokenizer.encode(kept, add_special_tokens=False).ids)
    assert prompt.cut_tokens == pytest.approx(whole - left, abs=4)


def test_characters_of_several_tokens_are_cut_whole(tmp_path: Path) -> None:
    file = tmp_path / "data.json"
    file.write_text(json.dumps([longbench_item(0, context="\u6c34\u8eca\U0001f600" * 200)]))
    for tokens in range(600, 606):
        (prompt,) = read("longbench_v2", file, tokens)
        kept = prompt.text.split("<text>\n")[1].split("\n</text>")[0]
        assert set(kept) == set("\u6c34\u8eca\U0001f600")
        assert tokens - 8 <= len(prompt.ids) <= tokens


def test_a_budget_below_the_question_is_refused(array: Path) -> None:
    with pytest.raises(ConfigError, match=r"50 tokens: item id\d of longbench_v2 needs \d+ for"):
        read("longbench_v2", array, 50)


@pytest.fixture
def babilong(tmp_path: Path) -> Path:
    for subset, length, target in (
        ("qa1", "0k", "hall"),
        ("qa2", "0k", "kitchen"),
        ("qa2", "1k", "park"),
    ):
        file = tmp_path / "data" / subset / f"{length}.json"
        file.parent.mkdir(parents=True, exist_ok=True)
        item = {"target": target, "input": f"Mary went to the {target}. ", "question": "Where? "}
        file.write_text(json.dumps([item, item]))
    (tmp_path / "data" / "README.md").write_text("not an item")
    return tmp_path / "data"


def test_babilong_items_of_a_folder(babilong: Path) -> None:
    chosen = read("babilong", babilong, count=6)
    assert sorted({str(prompt.source) for prompt in chosen}) == [
        "qa1/0k/0", "qa1/0k/1", "qa2/0k/0", "qa2/0k/1", "qa2/1k/0", "qa2/1k/1",
    ]  # fmt: skip
    assert score(chosen[0], f"It is in the {chosen[0].answers[0]}.") == 1.0


def test_a_subset_is_a_folder_a_file_or_both(babilong: Path) -> None:
    assert {p.answers for p in read("babilong", babilong, count=4, subset="qa2")} == {
        ("kitchen",), ("park",),
    }  # fmt: skip
    assert {p.answers for p in read("babilong", babilong, count=2, subset="qa2/1k")} == {("park",)}
    assert len(read("babilong", babilong / "qa1" / "0k.json", count=2)) == 2
    with pytest.raises(ConfigError, match="0 match subset 'qa9'"):
        read("babilong", babilong, subset="qa9")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"_id": "a"}\n{"_id": \n', r"data.json line 2: .*one JSON object per line; download"),
        ('{"_id": 1}\n', r"data.json line 1: _id is not a string: an item has the strings _id,"),
        ('\n\n["a"]', r"data.json line 3: a str: the file must be a JSON array of objects"),
        ('[\n{"_id": "a"\n"domain": 1}]', r"data.json line 3: "),
        ("[\n\n3]", r"data.json line 3: a int"),
        ("[1, 2", r"data.json line 1: a int"),
        ("", r"1 items of .*data.json: 0 are there"),
        ('{"_id": "\\ud800"}', r"data.json line 1: _id has half of a character, at 0"),
    ],
)
def test_a_broken_file_is_named_with_its_line(tmp_path: Path, content: str, message: str) -> None:
    file = tmp_path / "data.json"
    # A first item that is whole but lacks fields is found before a later broken line.
    file.write_text(content.replace('{"_id": "a"}\n', json.dumps(ITEMS[0]) + "\n"))
    with pytest.raises(ConfigError, match=message):
        read("longbench_v2", file)


def test_an_array_without_comma_or_end_is_broken(tmp_path: Path) -> None:
    file = tmp_path / "data.json"
    item = json.dumps(ITEMS[0])
    file.write_text(f"[\n{item}\n\n{item}]")
    with pytest.raises(ConfigError, match="data.json line 4: no comma and no end of the array"):
        read("longbench_v2", file)
    file.write_text(f"[\n{item}\n")
    with pytest.raises(ConfigError, match="data.json line 3: no comma and no end of the array"):
        read("longbench_v2", file)


def test_a_missing_field_and_a_wrong_letter_are_named(tmp_path: Path) -> None:
    file = tmp_path / "data.jsonl"
    without = {k: v for k, v in ITEMS[0].items() if k != "choice_C"}
    file.write_text(json.dumps(ITEMS[0]) + "\n" + json.dumps(without) + "\n")
    with pytest.raises(ConfigError, match=r"data.jsonl line 2: choice_C is missing"):
        read("longbench_v2", file)
    file.write_text(json.dumps(longbench_item(0, answer="E")))
    with pytest.raises(ConfigError, match=r"line 1: answer 'E': it must be one letter of ABCD"):
        read("longbench_v2", file)


@pytest.mark.parametrize("target", ["", "  ", " , ,"])
def test_a_target_without_words_is_refused(tmp_path: Path, target: str) -> None:
    file = tmp_path / "data.json"
    file.write_text(json.dumps([{"input": "a", "question": "b", "target": target}]))
    with pytest.raises(ConfigError, match="line 1: target .*: it must have a word"):
        read("babilong", file)


def test_a_path_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="nothing': it must be a file or a folder that is there"):
        read("babilong", tmp_path / "nothing")
    with pytest.raises(ConfigError, match="must be a file, or a folder with .json or .jsonl files"):
        read("babilong", tmp_path)
    with pytest.raises(ConfigError, match="task babilong without a path"):
        prompts("babilong", tokenizer_called("demo"), 100, 1, 0)
    file = tmp_path / "data.json"
    file.write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="must be a readable UTF-8 file"):
        read("babilong", file)
    with pytest.raises(ConfigError, match="option hops of task babilong"):
        read("babilong", file, hops="2")
