"""The shipped checkpoints answer the same in all arms, whatever the window."""

from __future__ import annotations

import pytest
from engines import engine, outputs, record_proposals, run

from tllm_wmtp.config import MtpConfig
from tllm_wmtp.demo import CHECKPOINT, CHECKPOINT_MAMBA2
from tllm_wmtp.demo.language import KINDS, prompt
from tllm_wmtp.sampling import SamplingParams

pytestmark = pytest.mark.skipif(
    not (CHECKPOINT / "config.json").exists(), reason="the demonstration checkpoint is not here"
)

LENGTHS = (150, 300, 500, 700)
PARAMS = SamplingParams(max_tokens=48, ignore_eos=True)
LIMITS = {"max_seq_len": 1024, "prefill_chunk": 256, "max_batch_size": 8}


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    made = [
        prompt(kind, length, seed=77_000 + seed).ids
        for kind in KINDS
        for seed, length in enumerate(LENGTHS)
    ]
    assert len(made) >= 20
    return made


@pytest.fixture(scope="module")
def dense(prompts: list[list[int]]) -> list[list[int]]:
    return outputs(run(engine(CHECKPOINT, **LIMITS), prompts, PARAMS))


@pytest.mark.parametrize(
    "speculation",
    [
        MtpConfig(depth=7, window=1, n_sink=0),
        MtpConfig(depth=7, window=64, n_sink=4),
        MtpConfig(depth=3, window=100, n_sink=0),
        MtpConfig(depth=7, window=4032, n_sink=64),
        MtpConfig.native(depth=7),
    ],
    ids=lambda s: f"{s.arm}-d{s.depth}-w{s.window}-s{s.n_sink}",
)
def test_all_arms_answer_alike(
    prompts: list[list[int]], dense: list[list[int]], speculation: MtpConfig
) -> None:
    assert outputs(run(engine(CHECKPOINT, speculation, **LIMITS), prompts, PARAMS)) == dense


def test_all_arms_of_the_mamba2_checkpoint_answer_alike(prompts: list[list[int]]) -> None:
    some = prompts[::3]
    dense = outputs(run(engine(CHECKPOINT_MAMBA2, **LIMITS), some, PARAMS))
    for speculation in (MtpConfig(depth=7, window=64, n_sink=4), MtpConfig.native(depth=7)):
        requests = run(engine(CHECKPOINT_MAMBA2, speculation, **LIMITS), some, PARAMS)
        assert outputs(requests) == dense
        accepted = sum(n * h for r in requests for n, h in enumerate(r.metrics.accepted_histogram))
        assert accepted > len(some) * PARAMS.max_tokens / 2  # of a trained head


def test_a_window_larger_than_the_context_proposes_what_native_does(
    prompts: list[list[int]],
) -> None:
    proposals = []
    for speculation in (MtpConfig(depth=7, window=4032, n_sink=64), MtpConfig.native(depth=7)):
        machine = engine(CHECKPOINT, speculation, **LIMITS)
        proposals.append(record_proposals(machine))
        run(machine, prompts, PARAMS)
    assert proposals[0] == proposals[1]
