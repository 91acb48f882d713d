"""``wmtp trtllm check`` on the stand-in."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from tllm_wmtp.cli import main
from tllm_wmtp.trtllm import compat

HERE = Path(__file__).parent


def verdicts(capsys: pytest.CaptureFixture[str], *options: str) -> tuple[int, dict[str, Any]]:
    code = main(["trtllm", "check", "--json", *options])
    return code, {one["feature"]: one for one in json.loads(capsys.readouterr().out)}


def test_names_are_probed_without_a_model(layout: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, found = verdicts(capsys)
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
    code, found = verdicts(capsys)
    assert code == 1
    assert found["Attention"]["detail"] == "it has no Attention.convert_qkv"
    assert found["runs"]["detail"] == "names are missing"


def test_where_there_is_no_tensorrt_llm_it_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    if compat.is_installed():
        pytest.skip("this machine has TensorRT-LLM")
    assert main(["trtllm", "check"]) == 2
    assert "run it in the vendor's container" in capsys.readouterr().err


@pytest.mark.parametrize(
    "layout", ["late", pytest.param("early", marks=pytest.mark.slow)], indirect=True
)
def test_a_small_model_runs_in_every_mode_with_the_same_output(
    layout: str,
    stub_roots: dict[str, Path],
    checkpoints: dict[str, Path],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(stub_roots[layout]), str(HERE)]))
    model = checkpoints["Qwen3NextForCausalLM"]
    sizes = ["--context", "60", "--max-tokens", "12", "--window", "16", "--sink", "4"]
    code, found = verdicts(capsys, "--model", str(model), *sizes)
    assert code == 0, found
    for mode in ("ring", "pages"):
        assert found[f"{mode}: output of stock MTP"]["detail"] == "36 tokens are the same"
    assert "tokens per step" in found["ring"]["detail"]


def test_a_run_that_fails_tells_how_to_repeat_it(
    layout: str,
    stub_roots: dict[str, Path],
    checkpoints: dict[str, Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from tllm_wmtp.errors import ConfigError
    from tllm_wmtp.trtllm.check import Workload, run_arm

    if layout == "early":
        pytest.skip("once is enough: the process is the same")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(stub_roots[layout]), str(HERE)]))
    workload = Workload(checkpoints["DeepseekV3ForCausalLM"], context=16, max_tokens=2)
    with pytest.raises(ConfigError) as failure:
        run_arm(workload, "ring")
    assert "latent attention (MLA, DSA) is not covered" in str(failure.value)
    assert "TRTLLM_WMTP_MODE=ring" in str(failure.value)
