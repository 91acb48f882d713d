"""``wmtp probe``: one JSON object, a table, a file, and one line about bad input."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_model import add_byte_tokenizer, tiny_checkpoint

import tllm_wmtp.bench.probe.run as probe_run
from tllm_wmtp.bench.probe.prompts import ProbeInputs, make_prompts
from tllm_wmtp.bench.probe.reads import TAIL, WINDOW
from tllm_wmtp.cli import main
from tllm_wmtp.demo.tokenizer import build_tokenizer

Run = Callable[..., tuple[int, str, str]]
SMALL = ("--context", 300, "--windows", "40,80", "--sink", 8, "--prompts", 1, "--positions", 6,
         "--depth", 4)  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Any:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Random weights that speak the demonstration language's vocabulary."""
    path = tiny_checkpoint(tmp_path_factory.mktemp("demo"), vocab_size=640)
    build_tokenizer().save(str(path / "tokenizer.json"))
    return path


@pytest.fixture
def wmtp(capsys: pytest.CaptureFixture[str]) -> Run:
    def run(*argv: object) -> tuple[int, str, str]:
        try:
            code = main([str(argument) for argument in argv])
        except SystemExit as exit:
            code = int(exit.code or 0)
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


def no_nan(constant: str) -> None:
    raise AssertionError(f"{constant} in JSON")


FIELDS = {
    "agreement", "flips", "drafts", "margin", "margin_at_flips", "margin_elsewhere", "kl",
    "read_change", "mass", "tail_entropy", "tail_entropy_share", "tail_participation",
    "value_norm", "router_jaccard", "right_native", "right_windowed", "tail_keys",
}  # fmt: skip


def test_json_is_one_object_and_so_is_the_file(wmtp: Run, checkpoint: Path, tmp_path: Path) -> None:
    code, out, _ = wmtp("probe", "--model", checkpoint, *SMALL, "--json", "--out", tmp_path)
    assert code == 0
    result = json.loads(out, parse_constant=no_nan)
    assert (result["benchmark"], result["context"], result["window"]) == ("probe", 300, 80)
    assert [(row["input"], row["prompt"]) for row in result["rows"]] == [
        ("logs", 0),
        ("sentences", 0),
    ]
    for content in (*result["rows"], result["summary"]):
        assert content.keys() >= FIELDS | {f"{name}_interval" for name in FIELDS - {
            "flips", "drafts"}}  # fmt: skip
        nulls = {name for name in FIELDS if content[name] is None}
        assert nulls <= content["missing"].keys()
        assert sum(content["mass"].values()) == pytest.approx(1.0, abs=1e-5)
    assert [point["window"] for point in result["curve"]] == [40, 80]
    assert result["curve"][1]["agreement"] == result["summary"]["agreement"]
    assert result["summary"]["drafts"] == 2 * 6 * 3
    assert set(result["summary"]["perturbations"]) == {
        "tail_values_shuffled", "tail_values_mean", "window_values_shuffled", "window_values_mean",
    }  # fmt: skip
    (file,) = tmp_path.iterdir()
    assert file.name == f"probe-{result['config_hash']}.json"
    assert json.loads(file.read_text()) == result


def test_the_same_command_gives_the_same_numbers_and_another_seed_others(
    wmtp: Run, checkpoint: Path
) -> None:
    def numbers(*more: object) -> dict[str, Any]:
        command = ("probe", "--model", checkpoint, *SMALL, "--inputs", "recall", "--json")
        code, out, _ = wmtp(*command, *more)
        assert code == 0
        return json.loads(out)

    one, again, other = numbers(), numbers(), numbers("--seed", 1)
    assert one["rows"] == again["rows"]
    assert one["config_hash"] == again["config_hash"] != other["config_hash"]
    assert one["rows"] != other["rows"]


def test_a_window_over_the_whole_context_changes_nothing(wmtp: Run, checkpoint: Path) -> None:
    code, out, _ = wmtp(
        "probe", "--model", checkpoint, *SMALL, "--window", 1000, "--inputs", "logs", "--json"
    )
    assert code == 0
    summary = json.loads(out, parse_constant=no_nan)["summary"]
    assert (summary["agreement"], summary["flips"]) == (1.0, 0)
    assert summary["kl"] == summary["read_change"] == 0.0
    assert summary["router_jaccard"] == 1.0
    assert summary["tail_entropy"] is None
    assert "no key" in summary["missing"]["tail_entropy"]


def test_the_table_names_inputs_windows_and_changes(wmtp: Run, checkpoint: Path) -> None:
    code, out, _ = wmtp("probe", "--model", checkpoint, *SMALL)
    assert code == 0
    for word in ("logs 0", "sentences 0", "tail values shuffled", "by window", "equal keys"):
        assert word in out


def test_a_users_text_is_probed_by_any_models_tokenizer(wmtp: Run, tmp_path: Path) -> None:
    path = add_byte_tokenizer(tiny_checkpoint(tmp_path / "model", vocab_size=257))
    text = tmp_path / "text.txt"
    text.write_text("a line of plain words, and another one\n" * 20)
    code, out, _ = wmtp("probe", "--model", path, *SMALL, "--file", text, "--json")
    assert code == 0
    (row,) = json.loads(out, parse_constant=no_nan)["rows"]
    assert (row["input"], row["prompt_tokens"]) == ("file", 300)


def test_a_published_input_is_read_from_its_file(wmtp: Run, tmp_path: Path) -> None:
    path = add_byte_tokenizer(tiny_checkpoint(tmp_path / "model", vocab_size=257))
    item = {"input": "Mary went home. " * 4, "question": "Where is Mary?", "target": "home"}
    (tmp_path / "qa1.jsonl").write_text(json.dumps(item) + "\n")
    source = ("--inputs", "babilong", "--path", tmp_path / "qa1.jsonl")
    code, out, err = wmtp("probe", "--model", path, *SMALL, *source, "--json")
    assert code == 0, err
    (row,) = json.loads(out, parse_constant=no_nan)["rows"]
    assert row["input"] == "babilong"
    assert 64 < row["prompt_tokens"] <= 300


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (("--inputs", "poems"), ("poems", "logs")),
        (("--inputs", ","), ("no input", "--inputs")),
        (("--positions", 1), ("positions 1", "two positions")),
        (("--depth", 1), ("depth 1",)),
        (("--sink", -1), ("n_sink -1",)),
        (("--window", 0), ("window 0",)),
        (("--windows", "0,8"), ("must be 1 or more",)),
        (("--windows", "5000"), ("window 5000", "positions")),
        (("--context", "1m"), ("max_seq_len", "positions")),
        (("--file", "/nowhere/text"), ("/nowhere/text",)),
        (("--lexicon", "latin"), ("latin", "english")),
        (("--difficulty", "mild"), ("mild", "medium")),
        (("--path", "somewhere"), ("somewhere", "--inputs")),
        (("--seed", -1), ("seed", "-1")),
        (("--seed", 2**63), ("seed", str(2**63), "lower it")),
        (("--inputs", "", "--file", __file__, "--seed", -1), ("seed", "-1")),
    ],
)
def test_bad_input_is_one_line_before_a_weight_is_read(
    wmtp: Run,
    checkpoint: Path,
    argv: tuple[object, ...],
    words: tuple[str, ...],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def load(*_: object, **__: object) -> None:
        raise AssertionError("weights were read")

    monkeypatch.setattr(probe_run, "load_model", load)
    code, out, err = wmtp("probe", "--model", checkpoint, *SMALL, *argv)
    assert (code, out) == (2, "")
    assert len(err.splitlines()) == 1
    assert all(word in err for word in words), err


def test_a_text_shorter_than_the_context_is_refused(
    wmtp: Run, checkpoint: Path, tmp_path: Path
) -> None:
    text = tmp_path / "text.txt"
    text.write_text("the old fox")
    code, _, err = wmtp("probe", "--model", checkpoint, *SMALL, "--file", text)
    assert code == 2
    assert "3 tokens" in err
    assert "--context" in err


def test_a_checkpoint_without_a_tokenizer_is_refused(wmtp: Run, tmp_path: Path) -> None:
    code, _, err = wmtp("probe", "--model", tiny_checkpoint(tmp_path), *SMALL)
    assert code == 2
    assert "tokenizer.json" in err


def test_changed_reads_are_those_of_the_band_that_they_are_named_after(checkpoint: Path) -> None:
    bench = probe_run.ProbeBench(checkpoint, ProbeInputs((), 8, text="a"), (8, 16), 16, 4, 3, 2)
    reads = probe_run.reads_of(bench, 0)
    for how in ("shuffled", "mean"):
        for name, band in (("tail", TAIL), ("window", WINDOW)):
            read = reads[f"{name}_values_{how}"]
            assert (read.band, read.window, read.n_sink) == (band, 16, 4)  # type: ignore[attr-defined]


def test_a_text_is_probed_from_its_beginning() -> None:
    tokenizer = build_tokenizer()
    text = "key amber = lion pear .\nkey jade = wolf plum .\n"
    (prompt,) = make_prompts(tokenizer, ProbeInputs((), 5, text=text))
    assert prompt.ids == tokenizer.encode(text).ids[:5]
