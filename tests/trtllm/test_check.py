"""``wmtp trtllm check`` on the stand-in."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from tllm_wmtp.cli import main
from tllm_wmtp.errors import ConfigError
from tllm_wmtp.trtllm import compat

HERE = Path(__file__).parent


def verdicts(capsys: pytest.CaptureFixture[str], *options: str) -> tuple[int, dict[str, Any]]:
    code = main(["trtllm", "check", "--json", *options])
    told = json.loads(capsys.readouterr().out)
    assert told["failed"] == sum(one["state"] == "fails" for one in told["verdicts"])
    return code, {one["feature"]: one for one in told["verdicts"]}


def test_names_are_probed_without_a_model(layout: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, found = verdicts(capsys, "--names-only")
    assert code == 0
    assert found["TensorRT-LLM"]["detail"] == f"0.0.0+{layout}"
    assert found["Attention"]["state"] == "holds"
    assert "Qwen3NextForCausalLM" in found["registration"]["detail"]
    assert found["runs"]["state"] == "skipped"


def test_a_missing_name_fails_the_check(
    layout: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    owner = compat.resolve("Attention").__mro__[1]
    monkeypatch.delattr(owner, "convert_qkv")
    code, found = verdicts(capsys, "--names-only")
    assert code == 1
    assert found["Attention"]["detail"] == "it has no Attention.convert_qkv"
    assert found["runs"]["detail"] == "names are missing"


def test_where_there_is_no_tensorrt_llm_it_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    if compat.is_installed():
        pytest.skip("this machine has TensorRT-LLM")
    assert main(["trtllm", "check"]) == 2
    assert "run it in the vendor's container" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("layout", "model"),
    [
        ("late", "tiny"),
        pytest.param("early", "demo", marks=pytest.mark.slow),
        pytest.param("late", "demo", marks=pytest.mark.slow),
    ],
    indirect=["layout"],
)
def test_a_small_model_runs_in_every_mode_with_the_same_output(
    layout: str,
    model: str,
    stub_roots: dict[str, Path],
    checkpoints: dict[str, Path],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The package's own small model, which is the default, and a smaller one."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(stub_roots[layout]), str(HERE)]))
    options = ["--context", "60", "--max-tokens", "12", "--window", "16", "--sink", "4"]
    if model == "tiny":
        options += ["--model", str(checkpoints["Qwen3NextForCausalLM"])]
    code, found = verdicts(capsys, *options)
    assert code == 0, found
    for mode in ("ring", "pages"):
        assert found[f"{mode}: output of stock MTP"]["detail"] == "36 tokens are the same"
    assert "tokens per step" in found["ring"]["detail"]


def test_an_arm_that_differs_or_fails_is_told(
    layout: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from tllm_wmtp.trtllm import check

    def run_arm(workload: check.Workload, mode: str) -> dict[str, Any]:
        if mode == "pages":
            raise ConfigError("mode pages", "it broke", "mend it")
        tokens = [[1, 2, 3], [4, 5 if mode == "off" else 6]]
        return {"tokens": tokens, "tokens_per_step": [None, None], "seconds": 1.0}

    monkeypatch.setattr(check, "run_arm", run_arm)
    code, found = verdicts(capsys)
    assert code == 1
    assert found["ring"]["state"] == "holds"
    assert found["ring: output of stock MTP"]["state"] == "fails"
    assert "prompt 1 differs from token 1 on" in found["ring: output of stock MTP"]["detail"]
    assert found["pages"]["detail"] == "mode pages: it broke; mend it"
    assert "pages: output of stock MTP" not in found


def test_without_stock_mtp_nothing_is_compared(
    layout: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from tllm_wmtp.trtllm import check

    def run_arm(workload: check.Workload, mode: str) -> dict[str, Any]:
        raise ConfigError(f"mode {mode}", "no kernel for this size", "name a larger model")

    monkeypatch.setattr(check, "run_arm", run_arm)
    code, found = verdicts(capsys)
    assert code == 1
    assert "no kernel for this size" in found["stock MTP"]["detail"]
    assert found["windowed runs"]["state"] == "skipped"


def test_an_engine_runs_at_its_own_window_without_graphs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tllm_wmtp.engine import directory
    from tllm_wmtp.trtllm.check import Workload, arm_options

    built = {"options": {"depth": 7, "window": 4032, "n_sink": 64}}
    monkeypatch.setattr(directory, "read_config", lambda folder: built)
    (tmp_path / "config.json").write_text('{"text_config": {"vocab_size": 97}}')
    workload = Workload(tmp_path, engine=tmp_path / "engine")
    options, settings = arm_options(workload, "engine")
    assert settings == {
        "mode": "engine",
        "window": "4032",
        "n_sink": "64",
        "engine": str(tmp_path / "engine"),
    }
    assert "--no-graphs" in options
    assert options[options.index("--draft-len") + 1] == "6"
    assert options[options.index("--vocab-size") + 1] == "97"
    options, settings = arm_options(workload, "ring")
    assert "--no-graphs" not in options
    assert settings == {"mode": "ring", "window": "128", "n_sink": "16"}


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--model", "/nowhere"], "its config.json cannot be used"),
        (["--window", "0"], "window is a number of tokens, at least 1"),
        (["--tp", "0"], "1 or more"),
        (["--engine", "/nowhere"], "/nowhere"),
        (["--engine", "/nowhere", "--tp", "2"], "check it with --tp 1"),
    ],
)
def test_bad_options_are_refused_before_anything_runs(
    layout: str, capsys: pytest.CaptureFixture[str], options: list[str], words: str
) -> None:
    try:
        code = main(["trtllm", "check", *options])
    except SystemExit as end:
        code = end.code  # type: ignore[assignment]
    told = capsys.readouterr()
    assert code == 2
    assert told.out == ""
    assert words in told.err


def test_a_run_that_fails_tells_how_to_repeat_it(
    layout: str,
    stub_roots: dict[str, Path],
    checkpoints: dict[str, Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from tllm_wmtp.trtllm.check import Workload, run_arm

    if layout == "early":
        pytest.skip("once is enough: the process is the same")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(stub_roots[layout]), str(HERE)]))
    workload = Workload(checkpoints["DeepseekV3ForCausalLM"], context=16, max_tokens=2)
    with pytest.raises(ConfigError) as failure:
        run_arm(workload, "ring")
    assert "latent attention (MLA, DSA) is not covered" in str(failure.value)
    assert "TRTLLM_WMTP_MODE=ring" in str(failure.value)
