"""Logits of NaN choose nothing: the request says so, and its neighbours go on."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from engines import engine, outputs, run
from tiny_model import random_prompts, tiny_checkpoint

from tllm_wmtp.config import MtpConfig
from tllm_wmtp.executor.request import Phase
from tllm_wmtp.sampling import SamplingParams

PROMPTS = random_prompts([12, 30, 5], 97, seed=3)
PARAMS = SamplingParams(max_tokens=20)
ARMS = pytest.mark.parametrize("speculation", [None, MtpConfig(depth=4, window=8, n_sink=2)])


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("tiny"), seed=4)


@ARMS
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_state_that_overflows_ends_its_own_request(
    checkpoint: Path, speculation: MtpConfig | None, value: float
) -> None:
    alone = outputs(run(engine(checkpoint), PROMPTS, PARAMS))
    machine = engine(checkpoint, speculation)
    requests = [machine.submit(prompt, PARAMS) for prompt in PROMPTS]
    while not all(request.phase is Phase.DECODE for request in requests):
        machine.step()
    with torch.inference_mode():
        machine.recurrent.state[:, requests[1].slot] = value
    while machine.step():
        pass
    assert [request.finish_reason for request in requests] == ["length", "error", "length"]
    assert "NaN or infinity" in str(requests[1].error)
    assert [requests[0].output_ids, requests[2].output_ids] == [alone[0], alone[2]]
    assert requests[1].output_ids == alone[1][: len(requests[1].output_ids)]
    # The slot, pages and lane that it leaves are clean for the next one.
    assert outputs(run(machine, PROMPTS, PARAMS)) == alone


@ARMS
def test_a_prompt_that_overflows_is_refused(
    checkpoint: Path, speculation: MtpConfig | None
) -> None:
    machine = engine(checkpoint, speculation)
    with torch.inference_mode():
        machine.model.target.embed_tokens.weight[96] = float("nan")
    good = machine.submit([p % 96 for p in PROMPTS[0]], PARAMS)
    bad = machine.submit([1, 2, 96, 3], PARAMS)
    while machine.step():
        pass
    assert bad.finish_reason == "error"
    assert "NaN or infinity" in str(bad.error)
    assert bad.output_ids == []
    assert machine.kv.free_pages == machine.kv.pages
    assert good.finished
