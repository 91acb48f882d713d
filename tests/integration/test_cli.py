"""The ``wmtp`` command: what it prints, its exit codes, and what it says about bad input."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tiny_model import add_byte_tokenizer, random_weights, tiny_checkpoint, write_checkpoint
from tiny_model import hf_config as tiny_config

import tllm_wmtp.demo
import tllm_wmtp.demo.run as demo_run
from tllm_wmtp.cli import main
from tllm_wmtp.demo.tokenizer import build_tokenizer

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Random weights that speak the demonstration language's vocabulary."""
    path = tiny_checkpoint(tmp_path_factory.mktemp("demo"), vocab_size=640)
    build_tokenizer().save(str(path / "tokenizer.json"))
    return path


@pytest.fixture
def wmtp(capsys: pytest.CaptureFixture[str]) -> Run:
    def run(*argv: object, defect: bool = False) -> tuple[int, str, str]:
        try:
            code = main([str(argument) for argument in argv])
        except SystemExit as exit:
            code = int(exit.code or 0)
        captured = capsys.readouterr()
        assert "Traceback" not in captured.out + captured.err
        assert (code == 70) is defect, captured.err
        return code, captured.out, captured.err

    return run


def one_object(out: str) -> dict[str, Any]:
    """The only thing on stdout is one JSON object without NaN."""

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} in JSON")

    content = json.loads(out, parse_constant=refuse)
    assert isinstance(content, dict)
    return content


SMALL_DEMO = ("--context", "600", "--max-tokens", "12", "--window", "100", "--sink", "8")
ARM_FIELDS = {
    "tokens", "al", "tpot_ms", "step_ms", "draft_ms", "verify_ms", "ttft_ms", "draft_kv_bytes",
}  # fmt: skip


# generate


def test_generate_streams_the_text_and_sums_up_on_stderr(wmtp: Run, checkpoint: Path) -> None:
    code, out, err = wmtp("generate", checkpoint, "--prompt", "the old fox", "--max-tokens", 6)
    assert code == 0
    assert out.strip()
    assert "[windowed] 3 tokens in, 6 out" in err
    assert "AL" in err
    assert "draft" in err
    assert "verify" in err


def test_generate_gives_the_same_text_in_every_arm(wmtp: Run, checkpoint: Path) -> None:
    texts = {}
    for arm in ("dense", "native", "windowed"):
        code, out, _ = wmtp(
            "generate", checkpoint, "--prompt", "key amber = lion", "--max-tokens", 20,
            "--arm", arm, "--window", 5, "--sink", 1, "--depth", 3, "--json",
        )  # fmt: skip
        assert code == 0
        answer = one_object(out)
        assert answer["arm"] == arm
        assert answer["tokens"] == len(answer["token_ids"]) <= 20
        assert answer["finish_reason"] in ("length", "stop")
        assert sum(answer["accepted_histogram"]) == answer["steps"]
        texts[arm] = answer["text"]
    assert len(set(texts.values())) == 1


def test_generate_of_one_token_has_no_step_to_measure(wmtp: Run, checkpoint: Path) -> None:
    code, out, _ = wmtp("generate", checkpoint, "--prompt", "the", "--max-tokens", 1, "--json")
    assert code == 0
    answer = one_object(out)
    assert answer["steps"] == 0
    assert answer["al"] is None
    code, _, err = wmtp("generate", checkpoint, "--prompt", "the", "--max-tokens", 1)
    assert code == 0
    assert "TTFT" in err


def test_generate_samples_by_seed_and_reports_log_probabilities(
    wmtp: Run, checkpoint: Path
) -> None:
    def answer(*options: str | int) -> dict[str, Any]:
        code, out, _ = wmtp(
            "generate", checkpoint, "--prompt", "the old fox", "--max-tokens", 12, "--json",
            "--temperature", "1.5", "--top-k", "200", "--top-p", "0.99", "--min-p", "0.001",
            "--repetition-penalty", "1.1", "--presence-penalty", "0.1",
            "--frequency-penalty", "-0.1", *options,
        )  # fmt: skip
        assert code == 0
        return one_object(out)

    first, again, other = answer("--seed", 7), answer("--seed", 7), answer("--seed", 8)
    assert first["token_ids"] == again["token_ids"] != other["token_ids"]
    assert first["logprobs"] is None
    told = answer("--seed", 7, "--logprobs", 2)
    assert told["token_ids"] == first["token_ids"]
    assert len(told["logprobs"]) == 12
    for token, entries in zip(told["token_ids"], told["logprobs"], strict=True):
        assert [entry["rank"] for entry in entries[:2]] == [1, 2]
        assert token in [entry["token_id"] for entry in entries]
        assert all(entry["logprob"] < 0 for entry in entries)


def test_generate_reads_a_file_and_stops_at_a_string(
    wmtp: Run, checkpoint: Path, tmp_path: Path
) -> None:
    file = tmp_path / "prompt.txt"
    file.write_text("the old fox sees the dog .\n", encoding="utf-8")
    code, out, _ = wmtp("generate", checkpoint, "--file", file, "--max-tokens", 30, "--json")
    assert code == 0
    whole = one_object(out)["text"]
    stop = whole[3:6]
    code, out, _ = wmtp(
        "generate", checkpoint, "--file", file, "--max-tokens", 30, "--stop", stop, "--json"
    )
    assert code == 0
    answer = one_object(out)
    assert answer["finish_reason"] == "stop"
    assert answer["text"] == whole[: whole.index(stop)]


def test_generate_reads_standard_input_in_a_process_of_its_own(checkpoint: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tllm_wmtp.cli", "generate", checkpoint, "-", "--max-tokens", "4"],
        input=b"the old fox",
        capture_output=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr.decode()
    assert done.stdout.strip()
    assert b"4 out" in done.stderr


# demo


def test_demo_prints_one_object_and_the_arms_agree(wmtp: Run, checkpoint: Path) -> None:
    code, out, err = wmtp("demo", "--model", checkpoint, *SMALL_DEMO, "--json")
    assert code == 0
    report = one_object(out)
    assert report["lossless"] is True
    assert (report["context"], report["depth"]) == (600, 7)
    assert (report["window"], report["n_sink"]) == (100, 8)
    assert list(report["arms"]) == ["dense", "native", "windowed"]
    for arm, numbers in report["arms"].items():
        assert set(numbers) >= ARM_FIELDS
        assert numbers["tokens"] == 12 * len(report["prompts"])
        assert 1 <= numbers["al"] <= 7
        assert (numbers["draft_kv_bytes"] > 0) is (arm != "dense")
        assert all(math.isfinite(value) for value in numbers.values())
    ring = report["arms"]["windowed"]["draft_kv_bytes"]
    assert ring < report["arms"]["native"]["draft_kv_bytes"] / 4
    assert {prompt["kind"] for prompt in report["prompts"]} == {"logs", "sentences"}
    assert all(prompt["identical"] and prompt["text"] for prompt in report["prompts"])
    assert "windowed" in err  # progress goes to stderr


def test_demo_shows_a_table_and_the_verdict(wmtp: Run, checkpoint: Path) -> None:
    code, out, _ = wmtp("demo", "--model", checkpoint, *SMALL_DEMO)
    assert code == 0
    for word in ("dense", "native", "windowed", "AL", "TPOT", "draft KV"):
        assert word in out
    assert "identical, token for token" in out


def test_demo_says_so_when_windowed_is_not_the_fastest(
    wmtp: Run, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    honest = demo_run.summarise

    def slow(*arguments: Any) -> dict[str, Any]:
        return {**honest(*arguments), "windowed_is_fastest": False}

    monkeypatch.setattr(demo_run, "summarise", slow)
    code, out, _ = wmtp("demo", "--model", checkpoint, *SMALL_DEMO)
    assert code == 0
    assert "not the fastest" in out


def test_demo_fails_when_an_arm_differs(
    wmtp: Run, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    honest = demo_run.answer

    def tampered(*arguments: Any) -> Any:
        requests = honest(*arguments)
        requests["windowed"].output_ids[-1] ^= 1
        return requests

    monkeypatch.setattr(demo_run, "answer", tampered)
    code, out, _ = wmtp("demo", "--model", checkpoint, *SMALL_DEMO, "--json")
    assert code == 1
    assert one_object(out)["lossless"] is False
    code, out, _ = wmtp("demo", "--model", checkpoint, *SMALL_DEMO)
    assert code == 1
    assert "DIFFER" in out


def test_demo_estimates_the_native_arm_where_it_cannot_be_waited_for(
    wmtp: Run, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demo_run, "NATIVE_LIMIT", 500)
    code, out, _ = wmtp("demo", "--model", checkpoint, *SMALL_DEMO, "--json")
    assert code == 0
    report = one_object(out)
    assert list(report["arms"]) == ["dense", "windowed"]
    estimate = report["native_estimate"]
    assert estimate["estimate"] is True
    assert estimate["prefill_s"] > 0
    bytes_per_token = 2 * 2 * 32 * 4  # K and V, 2 heads, 32 wide, float32
    assert 600 <= estimate["draft_kv_bytes"] / bytes_per_token < 600 + 7 * 12
    code, out, _ = wmtp("demo", "--model", checkpoint, *SMALL_DEMO)
    assert code == 0
    assert "Estimate" in out


# bench and info


STEP_FIELDS = {
    "arm", "model", "context", "depth", "window", "n_sink", "kv_dtype", "batch", "device",
    "bytes_moved", "draft_bytes", "verify_bytes", "step_ms", "draft_ms", "verify_ms", "floor_ms",
    "fraction_of_floor", "n_runs", "step_ms_interquartile", "draft_ms_interquartile",
    "verify_ms_interquartile", "read_bandwidth_gb_per_s",
}  # fmt: skip
SMALL_BENCH = ("--contexts", "300,1k", "--window", 64, "--sink", 4, "--repeats", 3)


def test_bench_step_has_every_field_for_every_arm_and_context(
    wmtp: Run, checkpoint: Path, tmp_path: Path
) -> None:
    code, out, _ = wmtp(
        "bench", "step", "--model", checkpoint, *SMALL_BENCH, "--json", "--out", tmp_path
    )
    assert code == 0
    result = one_object(out)
    combinations = [(row["context"], row["arm"]) for row in result["rows"]]
    arms = ("dense", "native", "windowed")
    assert combinations == [(context, arm) for context in (300, 1024) for arm in arms]
    for row in result["rows"]:
        assert set(row) >= STEP_FIELDS
        assert row["n_runs"] == 3
        low, high = row["step_ms_interquartile"]
        assert 0 < low <= row["step_ms"] <= high
    assert [ratio["context"] for ratio in result["ratios"]] == [300, 1024]
    (file,) = tmp_path.iterdir()
    assert result["config_hash"] in file.name
    assert json.loads(file.read_text()) == result


def test_bench_step_prints_a_table(wmtp: Run, checkpoint: Path) -> None:
    code, out, _ = wmtp("bench", "step", "--model", checkpoint, *SMALL_BENCH)
    assert code == 0
    assert "a native step costs" in out


def test_bench_attention_prints_rows_with_floor_and_interval(
    wmtp: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tllm_wmtp.bench import attention
    from tllm_wmtp.machine import StreamingRead

    monkeypatch.setattr(attention, "StreamingRead", lambda: StreamingRead(megabytes=1))
    honest = attention.run_attention_bench

    def small(**options: Any) -> list[dict[str, Any]]:
        monkeypatch.setattr(attention._Case, "bytes_moved", property(lambda case: 128 << 20))
        return honest(head_dims=(64,), rows=(1,), **options)

    monkeypatch.setattr(attention, "run_attention_bench", small)
    code, out, _ = wmtp("bench", "attention", "--contexts", "1k", "--repeats", 2, "--json")
    assert code == 0
    rows = one_object(out)["rows"]
    assert {row["kv_dtype"] for row in rows} == {"float32", "bfloat16"}
    assert all({"seconds", "floor_seconds", "seconds_interquartile"} <= set(row) for row in rows)


def test_info_needs_no_weights(wmtp: Run, checkpoint: Path) -> None:
    code, out, _ = wmtp("info", checkpoint, "--kv-dtype", "float32", "--json")
    assert code == 0
    facts = one_object(out)
    config = tiny_config(vocab_size=640)
    weights = random_weights(config)
    assert facts["family"] == "qwen3_5_moe_text"
    assert facts["parameters"] == sum(weight.numel() for weight in weights.values())
    assert facts["mtp_parameters"] == sum(
        weight.numel() for name, weight in weights.items() if name.startswith("mtp.")
    )
    assert (facts["layers"], facts["full_attention_layers"]) == (4, 1)
    assert facts["kv_bytes_per_token"] == facts["draft_kv_bytes_per_token"] == 2 * 2 * 32 * 4
    assert facts["draft_share_of_kv"] == 0.5
    assert facts["ring"]["slots"] == 64 + 4032 + 7
    assert facts["tokenizer"] is True
    code, out, _ = wmtp("info", checkpoint)
    assert code == 0
    assert "MTP head" in out


def test_info_of_a_checkpoint_without_a_head_offers_no_ring(wmtp: Run, tmp_path: Path) -> None:
    config = tiny_config()
    weights = {n: w for n, w in random_weights(config).items() if not n.startswith("mtp.")}
    path = write_checkpoint(tmp_path / "headless", config, weights)
    code, out, _ = wmtp("info", path, "--json")
    assert code == 0
    facts = one_object(out)
    assert facts["mtp_head"] is False
    assert "ring" not in facts
    code, _, err = wmtp("generate", add_byte_tokenizer(path), "--prompt", "a")
    assert code == 2
    assert "mtp.*" in err


# bad input: exit code 2, one line with value, rule and remedy


def test_the_shipped_checkpoint_is_asked_for_by_name(
    wmtp: Run, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tllm_wmtp.demo, "CHECKPOINT", checkpoint)
    code, out, _ = wmtp("info", "demo")
    assert code == 0
    monkeypatch.setattr(tllm_wmtp.demo, "CHECKPOINT", tmp_path / "nothing")
    code, out, err = wmtp("info", "demo")
    assert code == 2
    assert out == ""
    assert "demonstration checkpoint" in err


@pytest.mark.parametrize(
    ("options", "value"),
    [
        (["--window", "-1"], "window -1"),
        (["--window", "0"], "window 0"),
        (["--sink", "-3"], "n_sink -3"),
        (["--depth", "1"], "depth 1"),
        (["--window", "4096", "--sink", "64"], "n_sink 64 + window 4096 = 4160"),
        (["--max-tokens", "0"], "max_tokens 0"),
        (["--max-tokens", "many"], "'many'"),
        (["--window", "1.5k"], "'1.5k'"),
        (["--arm", "eager"], "'eager'"),
        (["--stop", ""], "stop ('',)"),
        (["--temperature", "-1"], "temperature -1.0"),
        (["--temperature", "nan"], "temperature nan"),
        (["--top-k", "few"], "'few'"),
        (["--top-p", "1.5"], "top_p 1.5"),
        (["--repetition-penalty", "0"], "repetition_penalty 0.0"),
        (["--seed", "-1"], "seed -1"),
        (["--logprobs", "3"], "logprobs 3"),
        (["--logprobs", "9999", "--json"], "logprobs 9999"),
    ],
)
def test_generate_refuses(wmtp: Run, checkpoint: Path, options: list[str], value: str) -> None:
    code, out, err = wmtp("generate", checkpoint, "--prompt", "the fox", *options)
    assert code == 2
    assert out == ""
    assert value in err
    assert len(err.strip().splitlines()) == 1


@pytest.mark.parametrize("context", ["nonsense", "0", "-4k", "10", "1m", "64k"])
def test_demo_refuses_a_context(wmtp: Run, checkpoint: Path, context: str) -> None:
    code, out, err = wmtp("demo", "--model", checkpoint, "--context", context)
    assert code == 2
    assert out == ""
    assert len([line for line in err.splitlines() if "wmtp" in line]) == 1


def test_demo_refuses_an_output_without_a_step(wmtp: Run, checkpoint: Path) -> None:
    code, _, err = wmtp("demo", "--model", checkpoint, "--max-tokens", 1)
    assert code == 2
    assert "max_tokens 1" in err


@pytest.mark.parametrize(
    ("options", "value"),
    [
        (["--contexts", "16k,lots"], "'lots'"),
        (["--contexts", ""], "''"),
        (["--contexts", "1m"], "max_seq_len"),
        (["--repeats", "1"], "repeats 1"),
        (["--depth", "1"], "depth 1"),
        (["--window", "-1"], "window -1"),
    ],
)
def test_bench_refuses(wmtp: Run, checkpoint: Path, options: list[str], value: str) -> None:
    code, out, err = wmtp("bench", "step", "--model", checkpoint, *options)
    assert code == 2
    assert out == ""
    assert value in err


def test_a_prompt_must_come_from_one_place(wmtp: Run, checkpoint: Path) -> None:
    assert wmtp("generate", checkpoint)[0] == 2
    code, _, err = wmtp("generate", checkpoint, "--prompt", "a", "--file", "b")
    assert code == 2
    assert "--prompt and --file" in err
    code, _, err = wmtp("generate", checkpoint, "--prompt", "")
    assert code == 2
    assert "empty prompt" in err


def test_a_prompt_file_must_be_readable_text(wmtp: Run, checkpoint: Path, tmp_path: Path) -> None:
    code, _, err = wmtp("generate", checkpoint, "--file", tmp_path / "missing.txt")
    assert code == 2
    assert "missing.txt" in err
    code, _, err = wmtp("generate", checkpoint, "--file", tmp_path)
    assert code == 2
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    code, _, err = wmtp("generate", checkpoint, "--file", tmp_path / "binary")
    assert code == 2
    assert "UTF-8" in err
    (tmp_path / "empty").write_text("")
    code, _, err = wmtp("generate", checkpoint, "--file", tmp_path / "empty")
    assert code == 2
    assert "empty prompt" in err


def test_a_prompt_longer_than_the_model_is_refused(wmtp: Run, checkpoint: Path) -> None:
    code, _, err = wmtp("generate", checkpoint, "--prompt", "the fox " * 2100)
    assert code == 2
    assert "4201 tokens" in err


@pytest.mark.parametrize("command", [["info"], ["generate", "--prompt", "a"]])
def test_a_model_must_be_a_complete_directory(
    wmtp: Run, tmp_path: Path, checkpoint: Path, command: list[str]
) -> None:
    code, _, err = wmtp(command[0], tmp_path / "nowhere", *command[1:])
    assert code == 2
    assert "nowhere" in err
    assert wmtp(command[0], tmp_path, *command[1:])[0] == 2
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    code, _, err = wmtp(command[0], tmp_path, *command[1:])
    assert code == 2
    (tmp_path / "config.json").write_bytes((checkpoint / "config.json").read_bytes())
    whole = (checkpoint / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(whole[: len(whole) // 2])
    code, _, err = wmtp(command[0], tmp_path, *command[1:])
    assert code == 2
    assert "truncated" in err


def test_an_unknown_command_or_none_is_refused(wmtp: Run) -> None:
    assert wmtp()[0] == 2
    assert wmtp("fly")[0] == 2
    assert wmtp("bench")[0] == 2
    assert wmtp("--version")[0] == 0


def test_a_defect_is_told_from_bad_input(
    wmtp: Run, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object, **__: object) -> None:
        raise KeyError("lost")

    monkeypatch.setattr(demo_run, "load_model", broken)
    _, out, err = wmtp("demo", "--model", checkpoint, defect=True)
    assert out == ""
    assert "KeyError" in err


# standard output, and what becomes of the process


def in_a_shell(command: str) -> subprocess.CompletedProcess[bytes]:
    wmtp = f"{sys.executable} -m tllm_wmtp.cli"
    return subprocess.run(
        ["bash", "-c", command.replace("WMTP", wmtp)],
        capture_output=True,
        timeout=600,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


@pytest.mark.parametrize(
    ("command", "code", "message"),
    [
        ("WMTP info {} >&-", 2, b"standard output is closed"),
        ("WMTP info {} >/dev/full", 2, b"standard output: it must be usable (No space"),
        ("WMTP generate {} --prompt the --max-tokens 2 --json >/dev/full", 2, b"No space"),
        ("WMTP generate {} --prompt $'\\xff' --max-tokens 2", 2, b"must be Unicode text"),
        ("WMTP info {} --json | true; exit ${{PIPESTATUS[0]}}", 0, b""),
        (
            "WMTP generate {} --prompt the --max-tokens 900 | head -c 1; exit ${{PIPESTATUS[0]}}",
            0,
            b"",
        ),
    ],
)
def test_standard_output_that_cannot_be_written(
    checkpoint: Path, command: str, code: int, message: bytes
) -> None:
    done = in_a_shell(command.format(checkpoint))
    assert done.returncode == code, done.stderr
    assert message in done.stderr
    assert b"Traceback" not in done.stderr
    assert b"Exception ignored" not in done.stderr
    assert len(done.stderr.splitlines()) <= 1


def test_an_interrupt_ends_a_command_with_130(checkpoint: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "tllm_wmtp.cli", "generate", checkpoint, "--prompt", "the",
         "--max-tokens", "4000", "--window", "500"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        # A shell starts what runs in its background deaf to interrupts, and that is inherited.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )  # fmt: skip
    assert process.stdout is not None
    process.stdout.read(1)  # it streams by now
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert err == b"wmtp: interrupted\n"
