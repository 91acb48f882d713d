"""The probe's own reads are the executor's drafts, in every family."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import tiny_families
import tiny_nemotron
import torch
from tiny_model import random_prompts, tiny_checkpoint

import tllm_wmtp.demo
from tllm_wmtp.bench.probe.measures import AttentionRecord
from tllm_wmtp.bench.probe.reader import HeadReader, compare
from tllm_wmtp.bench.probe.reads import NativeRead, Read, WindowedRead
from tllm_wmtp.bench.probe.trajectory import Trajectory, record
from tllm_wmtp.checkpoint.loader import LoadedModel, load_model
from tllm_wmtp.config import EngineConfig, KvCacheConfig, MtpConfig
from tllm_wmtp.demo import language
from tllm_wmtp.executor.draft import Drafts
from tllm_wmtp.executor.engine import Engine
from tllm_wmtp.executor.request import Request
from tllm_wmtp.executor.sampler import StepSampler
from tllm_wmtp.sampling import SamplingParams

POSITIONS, DEPTH = 14, 5
FAMILIES = ("qwen3_5", "nemotron_h", "mimo", "glm4_moe", "deepseek_v3", "demo", "demo-mamba2")


def checkpoint_of(family: str, folder: Path) -> Path:
    shipped = {"demo": tllm_wmtp.demo.CHECKPOINT, "demo-mamba2": tllm_wmtp.demo.CHECKPOINT_MAMBA2}
    if family in shipped:
        return shipped[family]
    if family == "qwen3_5":
        return tiny_checkpoint(folder)
    if family == "nemotron_h":
        return tiny_nemotron.tiny_checkpoint(folder)
    return tiny_families.tiny_checkpoint(folder, family)


@pytest.fixture(scope="module", params=FAMILIES)
def case(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[LoadedModel, list[int], Trajectory]:
    family = str(request.param)
    path = checkpoint_of(family, tmp_path_factory.mktemp("model"))
    loaded = load_model(path, with_head=True)
    if family.startswith("demo"):
        prompt = language.prompt("recall", 150, 1).ids
    else:
        prompt = random_prompts([77], loaded.config.vocab_size)[0]
    return loaded, prompt, record(loaded, prompt, POSITIONS)


def executor_logits(
    loaded: LoadedModel, prompt: list[int], speculation: MtpConfig
) -> dict[int, list[torch.Tensor]]:
    """Rows committed before each step, and the logits of the drafts that the engine made there."""
    config = EngineConfig(
        speculation=speculation,
        kv_cache=KvCacheConfig(enable_block_reuse=False),
        max_batch_size=1,
        max_seq_len=512,
        prefill_chunk=64,
    )
    engine = Engine(loaded, config)
    seen: dict[int, list[torch.Tensor]] = {}
    propose, draft = engine.proposer.propose, StepSampler.draft
    now: list[torch.Tensor] = []

    def recording_draft(self: StepSampler, logits: torch.Tensor) -> torch.Tensor:
        now.append(logits.clone())
        return draft(self, logits)

    def recording(requests: Sequence[Request], draft_len: int, sampler: StepSampler) -> Drafts:
        now.clear()
        drafts = propose(requests, draft_len, sampler)
        seen[requests[0].kv_length] = list(now)
        return drafts

    engine.proposer.propose = recording  # type: ignore[method-assign]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(StepSampler, "draft", recording_draft)
        request = engine.submit(prompt, SamplingParams(max_tokens=POSITIONS, ignore_eos=True))
        while engine.step():
            pass
    assert request.error is None
    return seen


@torch.inference_mode()
def probe_logits(loaded: LoadedModel, trajectory: Trajectory, read: Read) -> list[torch.Tensor]:
    """``[N, V]`` of every draft of the chains that ``read`` makes."""
    reader, levels = HeadReader(loaded, trajectory), []
    for _ in range(DEPTH - 1):
        made = reader(read)
        levels.append(made.logits)
        reader.advance(made)
    return levels


@pytest.mark.parametrize(
    ("speculation", "read"),
    [
        (MtpConfig.native(DEPTH), NativeRead()),
        (MtpConfig(DEPTH, 33, 7), WindowedRead(33, 7)),
        (MtpConfig(DEPTH, 2, 0), WindowedRead(2, 0)),
    ],
    ids=["native", "windowed", "narrow"],
)
def test_every_draft_is_the_one_that_the_executor_makes(
    case: tuple[LoadedModel, list[int], Trajectory], speculation: MtpConfig, read: Read
) -> None:
    loaded, prompt, trajectory = case
    levels = probe_logits(loaded, trajectory, read)
    seen = executor_logits(loaded, prompt, speculation)
    assert seen
    for committed, logits in seen.items():
        position = committed - len(prompt)
        for level, of_executor in zip(levels, logits, strict=True):
            torch.testing.assert_close(level[position], of_executor[0], atol=1e-4, rtol=1e-4)


@torch.inference_mode()
def test_a_window_of_everything_is_the_native_read_exactly(
    case: tuple[LoadedModel, list[int], Trajectory],
) -> None:
    loaded, _, trajectory = case
    for whole in (WindowedRead(1000, 0), WindowedRead(1000, 30), WindowedRead(1, 1000)):
        levels = zip(
            probe_logits(loaded, trajectory, NativeRead()),
            probe_logits(loaded, trajectory, whole),
            strict=True,
        )
        assert all(torch.equal(native, windowed) for native, windowed in levels)


def test_the_trajectory_is_what_the_target_writes_without_a_draft(
    case: tuple[LoadedModel, list[int], Trajectory],
) -> None:
    loaded, prompt, trajectory = case
    engine = Engine(loaded, EngineConfig(max_seq_len=512, max_batch_size=1))
    request = engine.submit(prompt, SamplingParams(max_tokens=POSITIONS, ignore_eos=True))
    while engine.step():
        pass
    assert trajectory.tokens.tolist() == request.output_ids
    with torch.inference_mode():
        chosen = loaded.target.logits(trajectory.hidden).argmax(-1)
    assert chosen.tolist() == request.output_ids
    assert trajectory.starts.tolist() == list(range(len(prompt) - 1, len(prompt) - 1 + POSITIONS))
    assert len(trajectory.keys) == len(trajectory.values) == len(prompt) - 1 + POSITIONS


def test_drafts_are_counted_as_a_reader_of_their_logits_would(
    case: tuple[LoadedModel, list[int], Trajectory],
) -> None:
    loaded, _, trajectory = case
    window, n_sink = 9, 2
    reads: dict[str, Read] = {"windowed": WindowedRead(window, n_sink)}
    seen = compare(loaded, trajectory, reads, AttentionRecord(window, n_sink), DEPTH - 1)
    native = [level.argmax(-1).tolist() for level in probe_logits(loaded, trajectory, NativeRead())]
    tokens, row = trajectory.tokens.tolist(), 0
    for level, drafts in enumerate(native):
        for position, draft in enumerate(drafts):
            before = [native[earlier][position] for earlier in range(level)]
            target = tokens[position + 1 :]
            assert seen.draft[row] == level + 1
            assert seen.position[row] == position
            assert seen.native[row] == draft
            judged = len(target) > level and before == target[:level]
            assert bool(seen.judged[row]) is judged
            if judged:
                assert seen.truth[row] == target[level]
            row += 1
    assert row == len(seen.draft) == len(seen.margin)
    windowed = seen.outcomes["windowed"]
    assert windowed.same.tolist() == (windowed.token == seen.native).tolist()
    first = probe_logits(loaded, trajectory, reads["windowed"])[0].argmax(-1)
    assert windowed.token[:POSITIONS].tolist() == first.tolist()
    torch.testing.assert_close(seen.mass.sum(-1), torch.ones_like(seen.mass[..., 0]))
    assert (windowed.jaccard is None) == (loaded.config.num_experts == 0)
