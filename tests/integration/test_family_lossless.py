"""MiMo, GLM-4.5 and DeepSeek-V3 from checkpoint to tokens: no draft changes the output, and every
draft is the one that the published head would make."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from engines import engine, outputs, run
from head_reference import HeadReference, proposals
from tiny_families import family_config, load_reference, random_weights
from tiny_model import random_prompts, write_checkpoint

from tllm_wmtp.config import MtpConfig
from tllm_wmtp.executor.draft import Drafts
from tllm_wmtp.executor.request import Request
from tllm_wmtp.executor.sampler import StepSampler
from tllm_wmtp.sampling import SamplingParams

VOCAB = 5  # so few that random drafts are often right
PROMPTS = random_prompts([1, 2, 5, 17, 33, 50, 64, 99], VOCAB)
PARAMS = SamplingParams(max_tokens=24)
SEEDS = {"mimo": 22, "glm4_moe": 14, "deepseek_v3": 14}  # weights whose drafts are often right


class Checkpoint:
    def __init__(self, path: Path, family: str):
        self.config = family_config(family, vocab_size=VOCAB)
        weights = random_weights(self.config, SEEDS[family])
        self.path = write_checkpoint(path, self.config, weights)
        self.oracle = load_reference(self.config, weights).double()
        self.head = HeadReference(self.config, weights, self.oracle.model.rotary_emb)
        self.dense = outputs(run(engine(self.path), PROMPTS, PARAMS))


@pytest.fixture(scope="module", params=SEEDS)
def checkpoint(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Checkpoint:
    return Checkpoint(tmp_path_factory.mktemp(request.param), request.param)


@torch.inference_mode()
def test_dense_equals_transformers(checkpoint: Checkpoint) -> None:
    for index in (0, 3, 7):
        tokens = list(PROMPTS[index])
        for _ in range(PARAMS.max_tokens):
            logits = checkpoint.oracle(torch.tensor([tokens]), use_cache=False).logits
            tokens.append(int(logits[0, -1].argmax()))
        assert checkpoint.dense[index] == tokens[len(PROMPTS[index]) :]


@pytest.mark.parametrize(
    "speculation",
    [
        MtpConfig(depth=7, window=16, n_sink=4),
        MtpConfig(depth=3, window=1, n_sink=0),
        MtpConfig.native(depth=5),
    ],
    ids=lambda s: f"{s.arm}-d{s.depth}-w{s.window}-s{s.n_sink}",
)
def test_speculation_equals_dense(checkpoint: Checkpoint, speculation: MtpConfig) -> None:
    requests = run(engine(checkpoint.path, speculation), PROMPTS, PARAMS)
    assert outputs(requests) == checkpoint.dense
    accepted = sum(n * h for r in requests for n, h in enumerate(r.metrics.accepted_histogram))
    assert accepted > 25  # or this test would say nothing about acceptance


@pytest.mark.parametrize(("window", "n_sink"), [(None, 0), (5, 2)])
def test_proposals_are_those_of_the_described_head(
    checkpoint: Checkpoint, window: int | None, n_sink: int
) -> None:
    speculation = MtpConfig(depth=5, window=window, n_sink=n_sink)
    machine = engine(checkpoint.path, speculation, max_batch_size=1)
    propose, made = machine.proposer.propose, []

    def checking(requests: Sequence[Request], draft_len: int, sampler: StepSampler) -> Drafts:
        drafts = propose(requests, draft_len, sampler)
        tokens = requests[0].prompt_ids + requests[0].output_ids
        expected = proposals(checkpoint.head, checkpoint.oracle, tokens, draft_len, window, n_sink)
        made.append((drafts.tokens[0].tolist(), expected))
        return drafts

    machine.proposer.propose = checking  # type: ignore[method-assign]
    run(machine, [PROMPTS[2]], PARAMS)
    run(machine, [PROMPTS[5]], PARAMS)
    assert len(made) > 10
    assert all(drafts == expected for drafts, expected in made)
