"""``wmtp data`` writes JSON lines, and refuses in one line."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tokenizers import Tokenizer
from tokenizers_at_hand import tokenizer_called

from tllm_wmtp.bench.inputs import TASKS
from tllm_wmtp.cli import main


def lines_of(text: str) -> list[dict[str, object]]:
    return [json.loads(line) for line in text.splitlines()]


def test_lines_hold_text_answers_and_digest(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = "data niah_multiquery --tokenizer demo --tokens 1k --count 2 --lexicon demo --ids"
    assert main(arguments.split()) == 0
    out = capsys.readouterr().out
    first, second = lines_of(out)
    assert first["text"] != second["text"]
    text = str(first["text"])
    assert first["ids"] == tokenizer_called("demo").encode(text).ids
    assert first["tokens"] == 1024
    assert first["sha256"] == hashlib.sha256(text.encode()).hexdigest()
    assert all(f"= {answer} ." in text for answer in first["answers"])  # type: ignore[attr-defined]
    assert (first["id"], second["id"]) == ("niah_multiquery-1024-0-0", "niah_multiquery-1024-0-1")
    assert main(arguments.split()) == 0
    assert capsys.readouterr().out == out


def test_a_file_and_a_summary(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "made" / "vt.jsonl"
    arguments = f"data vt --tokenizer demo --tokens 900 --hops 2 --seed 7 --out {file} --json"
    assert main(arguments.split()) == 0
    summary = json.loads(capsys.readouterr().out)
    (line,) = lines_of(file.read_text(encoding="utf-8"))
    assert summary["prompts"][0]["sha256"] == line["sha256"]
    assert summary["prompts"][0]["options"]["hops"] == 2
    assert "ids" not in line
    assert line["seed"] == 7


def test_a_model_directory_and_a_file_give_its_tokenizer(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tokenizer = Tokenizer.from_str(tokenizer_called("bytes").to_str())
    tokenizer.enable_truncation(512)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    for name in (tmp_path, tmp_path / "tokenizer.json"):
        assert main(f"data fwe --tokenizer {name} --tokens 800 --ids".split()) == 0
        (line,) = lines_of(capsys.readouterr().out)
        assert line["ids"] == tokenizer_called("bytes").encode(str(line["text"])).ids


def test_the_list_has_every_task(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["data", "--list"]) == 0
    shown = capsys.readouterr().out
    assert all(f"\n{task} " in shown for task in TASKS)
    assert main(["data", "--list", "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)["tasks"]
    assert [entry["task"] for entry in listed] == list(TASKS)
    assert listed[0]["options"]["filler"] == {
        "easy": "repeat", "medium": "prose", "hard": "needles",
    }  # fmt: skip


def test_every_option_of_every_task_is_on_the_command_line(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit):
        main(["data", "--help"])
    shown = capsys.readouterr().out
    for task in TASKS.values():
        for option in task.options:
            assert f"--{option.replace('_', '-')} " in shown


def test_published_items_come_from_a_path(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "1k.json"
    file.write_text(json.dumps([{"input": "a " * 500, "question": "What?", "target": "a"}]))
    assert main(f"data babilong --tokenizer demo --tokens 600 --path {file}".split()) == 0
    (line,) = lines_of(capsys.readouterr().out)
    assert line["cut_tokens"] > 0  # type: ignore[operator]
    assert line["answers"] == ["a"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("vt --tokenizer demo", "no --tokens: it is needed"),
        ("--tokenizer demo --tokens 5", "no TASK: it is needed"),
        ("vt --tokens 500", "no --tokenizer: it is needed"),
        ("vy --tokenizer demo --tokens 500", "task 'vy': it must be one of niah_single"),
        ("vt --tokenizer demo --tokens 30", "30 tokens: task vt with its 10 records"),
        ("vt --tokenizer demo --tokens 500 --keys 3", "option keys of task vt: it must be one of"),
        ("vt --tokenizer nothing --tokens 500 --keys 3", "option keys of task vt: it must be"),
        ("vt --tokenizer nothing --tokens 500", "tokenizer 'nothing': nothing must be the tok"),
        ("vt --tokenizer demo --tokens 500 --seed=-1", "seed -1: it must be 0 or more"),
        ("cwe --tokenizer demo --tokens 500 --path x", "path 'x' of task cwe: only longbench_v2"),
        ("niah_single --tokenizer demo --tokens 500 --depth 2", "depth 2.0: it must be uniform"),
        ("vt --tokenizer nothing --tokens 900 --out .", "--out '.': it must be a file that can be"),
        (
            f"vt --tokenizer nothing --tokens 900 --out {__file__}/x",
            f"--out '{__file__}/x': it must be a file that can be",
        ),
    ],
)
def test_bad_input_is_one_line_and_code_two(
    arguments: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["data", *arguments.split()]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith(f"wmtp: {message}")
    assert captured.err.count("\n") == 1


@pytest.mark.parametrize(
    "arguments",
    [
        "vt --tokenizer demo --tokens 0",
        "vt --tokenizer demo --tokens 500 --seed x",
        "vt --tokenizer demo --tokens 500 --count 0",
        "vt --tokenizer demo --tokens 500 --filler essay",
        "niah_single --tokenizer demo --tokens 500 --depth middle",
    ],
)
def test_a_value_of_the_wrong_form_is_refused_by_the_parser(
    arguments: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["data", *arguments.split()])
    assert stop.value.code == 2
    assert capsys.readouterr().err.startswith("wmtp data: argument --")


def test_a_damaged_tokenizer_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    assert main(f"data vt --tokenizer {tmp_path} --tokens 500".split()) == 2
    assert "it must be a tokenizer of the 'tokenizers' library" in capsys.readouterr().err


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "utf-16"])
def test_the_lines_are_utf8_whatever_the_terminal_takes(tmp_path: Path, encoding: str) -> None:
    file = tmp_path / "1k.json"
    item = {"input": "caf\u00e9 \u6f22\u2028", "question": "What?", "target": "a"}
    file.write_text(json.dumps([item]))
    command = f"data babilong --tokenizer demo --tokens 900 --path {file}"
    result = subprocess.run(
        [sys.executable, "-m", "tllm_wmtp.cli", *command.split()],
        env=os.environ | {"PYTHONIOENCODING": encoding},
        capture_output=True,
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.count(b"\n") == 1
    assert "caf\u00e9 \u6f22" in json.loads(result.stdout.decode("utf-8"))["text"]
