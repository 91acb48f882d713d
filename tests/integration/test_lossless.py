"""Speculation never changes the output, whatever the draft sees or proposes."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from engines import (
    ScriptedProposer,
    engine,
    oracle_proposals,
    outputs,
    record_proposals,
    run,
    whole_sequence_greedy,
)
from tiny_model import random_prompts, tiny_checkpoint

from tllm_wmtp.config import MtpConfig
from tllm_wmtp.executor.draft import Drafts, MtpProposer
from tllm_wmtp.executor.request import Request
from tllm_wmtp.executor.sampler import StepSampler
from tllm_wmtp.sampling import SamplingParams

VOCAB = 5  # so few that random drafts are often right
LENGTHS = [1, 2, 3, 5, 8, 13, 17, 21, 30, 33, 40, 47, 50, 64, 65, 77, 80, 90, 99, 120]
PROMPTS = random_prompts(LENGTHS, VOCAB)
PARAMS = SamplingParams(max_tokens=32)


@pytest.fixture(scope="module", params=["moe", "dense"])
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp(request.param)
    return tiny_checkpoint(folder, seed=11, moe=request.param == "moe", vocab_size=VOCAB)


@pytest.fixture(scope="module")
def dense_outputs(checkpoint: Path) -> list[list[int]]:
    return outputs(run(engine(checkpoint), PROMPTS, PARAMS))


def test_dense_equals_whole_sequence_forwards(
    checkpoint: Path, dense_outputs: list[list[int]]
) -> None:
    for index in (0, 7, 19):
        expected = whole_sequence_greedy(checkpoint, PROMPTS[index], 32)
        assert dense_outputs[index] == expected


@pytest.mark.parametrize(
    "speculation",
    [
        MtpConfig(depth=7, window=1, n_sink=0),
        MtpConfig(depth=7, window=16, n_sink=4),
        MtpConfig(depth=2, window=3, n_sink=1),
        MtpConfig(depth=4, window=600, n_sink=64),
        MtpConfig.native(depth=7),
        MtpConfig.native(depth=3),
    ],
    ids=lambda s: f"{s.arm}-d{s.depth}-w{s.window}-s{s.n_sink}",
)
def test_speculation_equals_dense(
    checkpoint: Path, dense_outputs: list[list[int]], speculation: MtpConfig
) -> None:
    requests = run(engine(checkpoint, speculation), PROMPTS, PARAMS)
    assert outputs(requests) == dense_outputs
    accepted = sum(n * h for r in requests for n, h in enumerate(r.metrics.accepted_histogram))
    assert accepted > 40  # or this test would say nothing about acceptance


def recorded_proposals(checkpoint: Path, speculation: MtpConfig) -> dict[int, list[list[int]]]:
    machine = engine(checkpoint, speculation)
    made = record_proposals(machine)
    run(machine, PROMPTS[::4], PARAMS)
    assert all(len(steps) > 3 for steps in made.values())
    return made


def test_a_window_larger_than_the_context_proposes_what_native_does(checkpoint: Path) -> None:
    native = recorded_proposals(checkpoint, MtpConfig.native(depth=7))
    assert recorded_proposals(checkpoint, MtpConfig(depth=7, window=400, n_sink=0)) == native
    assert recorded_proposals(checkpoint, MtpConfig(depth=7, window=300, n_sink=64)) == native
    assert recorded_proposals(checkpoint, MtpConfig(depth=7, window=4, n_sink=0)) != native


def test_a_window_larger_than_the_context_is_native_bit_for_bit(checkpoint: Path) -> None:
    """Not only the drafts: every hidden state of the head, though the rings differ in size."""

    def head_outputs(speculation: MtpConfig) -> list[torch.Tensor]:
        machine = engine(checkpoint, speculation)
        assert isinstance(machine.proposer, MtpProposer)
        seen: list[torch.Tensor] = []
        machine.proposer.head.register_forward_hook(lambda _m, _i, out: seen.append(out.clone()))
        run(machine, PROMPTS[::3], PARAMS)
        return seen

    native = head_outputs(MtpConfig.native(depth=7))
    longest = max(len(prompt) for prompt in PROMPTS[::3]) + PARAMS.max_tokens + 7
    for speculation in (
        MtpConfig(depth=7, window=longest - 3, n_sink=3),
        MtpConfig(depth=7, window=longest, n_sink=0),
        MtpConfig(depth=7, window=1000, n_sink=64),
    ):
        windowed = head_outputs(speculation)
        assert len(windowed) == len(native) > 20
        assert all(torch.equal(w, n) for w, n in zip(windowed, native, strict=True))
    narrower = head_outputs(MtpConfig(depth=7, window=50, n_sink=3))
    assert not all(torch.equal(w, n) for w, n in zip(narrower, native, strict=False))


@pytest.mark.parametrize(("window", "n_sink"), [(1, 0), (5, 0), (9, 3), (None, 0)])
def test_proposals_equal_those_of_a_head_without_a_ring(
    checkpoint: Path, window: int | None, n_sink: int
) -> None:
    speculation = MtpConfig(depth=5, window=window, n_sink=n_sink)
    machine = engine(checkpoint, speculation, max_batch_size=1)
    assert isinstance(machine.proposer, MtpProposer)
    propose, proposer, checked = machine.proposer.propose, machine.proposer, []

    def checking(requests: list[Request], draft_len: int, sampler: StepSampler) -> Drafts:
        drafts = propose(requests, draft_len, sampler)
        expected = oracle_proposals(proposer, requests[0], window or 10**6, n_sink)
        checked.append(drafts.tokens[0].tolist() == expected)
        return drafts

    machine.proposer.propose = checking  # type: ignore[method-assign]
    for prompt in (PROMPTS[0], PROMPTS[5], PROMPTS[10]):
        run(machine, [prompt], SamplingParams(max_tokens=20))
    assert len(checked) > 15
    assert all(checked)


@pytest.mark.parametrize("depth", [2, 5, 7])
def test_adversarial_drafts_change_nothing(
    checkpoint: Path, dense_outputs: list[list[int]], depth: int
) -> None:
    chance = random.Random(depth)
    truth = {tuple(p): o for p, o in zip(PROMPTS, dense_outputs, strict=True)}

    def script(request: Request, draft_len: int) -> list[int]:
        done = len(request.output_ids)
        coming = truth[tuple(request.prompt_ids)][done : done + draft_len]
        drafts = [*coming, *[0] * draft_len][:draft_len]
        for at in range(chance.randrange(draft_len + 1), draft_len):
            drafts[at] = chance.randrange(VOCAB)
        return drafts

    requests = run(engine(checkpoint, proposer=ScriptedProposer(depth, script)), PROMPTS, PARAMS)
    assert outputs(requests) == dense_outputs
    histograms = [request.metrics.accepted_histogram for request in requests]
    seen = [sum(column) for column in zip(*histograms, strict=True)]
    assert all(seen), f"not every count of accepted drafts occurred: {seen}"
