"""What a request measures, against numbers worked out by hand."""

from __future__ import annotations

from pathlib import Path

import pytest
from engines import ScriptedProposer, engine, run
from tiny_model import random_prompts, tiny_checkpoint

from tllm_wmtp import LLM
from tllm_wmtp.config import KvCacheConfig, MtpConfig
from tllm_wmtp.executor.request import Request
from tllm_wmtp.sampling import SamplingParams

PROMPT = random_prompts([5], 97, seed=6)[0]
ROW = 2 * 2 * 32 * 4  # K and V, 2 heads, 32 wide, float32


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("tiny"), seed=9)


def test_the_histogram_counts_every_step_by_its_accepted_drafts(checkpoint: Path) -> None:
    truth = run(engine(checkpoint), [PROMPT], SamplingParams(max_tokens=40))[0].output_ids
    accept = [0, 2, 3, 3, 1, 0, 3]  # of 3 drafts each: 1 + 3 + 4 + 4 + 2 + 1 + 4 tokens
    steps = iter(accept)

    def script(request: Request, draft_len: int) -> list[int]:
        done, right = len(request.output_ids), next(steps)
        wrong = [(token + 1) % 97 for token in truth[done + right : done + draft_len]]
        return [*truth[done : done + right], *wrong]

    machine = engine(checkpoint, proposer=ScriptedProposer(4, script))
    request = run(machine, [PROMPT], SamplingParams(max_tokens=1 + 19))[0]
    metrics = request.metrics
    assert request.output_ids == truth[:20]
    assert metrics.accepted_histogram == [2, 1, 1, 3]
    assert metrics.acceptance_length == pytest.approx(19 / 7)
    assert metrics.steps == 7
    assert metrics.output_tokens == 20
    metrics.step_s = [0.019, 0.019, 0.019, 0.019, 0.5, 0.001, 0.019]
    assert metrics.tpot_s == pytest.approx(0.007)


def test_times_add_up(checkpoint: Path) -> None:
    machine = engine(checkpoint, MtpConfig(depth=3, window=8, n_sink=1), max_batch_size=1)
    first, second = run(machine, [PROMPT, PROMPT], SamplingParams(max_tokens=12))
    for metrics in (first.metrics, second.metrics):
        for draft, verify, step in zip(
            metrics.draft_s, metrics.verify_s, metrics.step_s, strict=True
        ):
            assert draft > 0
            assert step == pytest.approx(draft + verify)
    assert first.metrics.ttft_s is not None
    assert second.metrics.ttft_s is not None
    assert first.metrics.ttft_s >= first.metrics.prefill_s > 0
    # The second one waited for the only slot, and its time to the first token says so.
    waited = first.metrics.prefill_s + sum(first.metrics.step_s)
    assert second.metrics.ttft_s >= waited + second.metrics.prefill_s


@pytest.mark.parametrize(
    ("window", "depth", "rows"),
    [
        (None, 4, 5 + 2),  # the prompt's rows and the first two of three drafts
        (100, 2, 5),  # the only draft of a step is never fed
        (3, 4, 1 + 3 + 4),  # a full ring
    ],
)
def test_bytes_of_the_draft_after_one_step(
    checkpoint: Path, window: int | None, depth: int, rows: int
) -> None:
    speculation = MtpConfig(depth=depth, window=window, n_sink=1)
    prompt = PROMPT if window != 3 else PROMPT * 4
    request = run(engine(checkpoint, speculation), [prompt], SamplingParams(max_tokens=2))[0]
    assert request.metrics.steps == 1
    assert request.metrics.draft_kv_bytes == rows * ROW


def test_a_dense_request_fills_no_draft_bytes(checkpoint: Path) -> None:
    request = run(engine(checkpoint), [PROMPT], SamplingParams(max_tokens=3))[0]
    assert request.metrics.draft_kv_bytes == 0
    assert request.metrics.accepted_histogram == [2]
    assert request.metrics.acceptance_length == 1.0


def test_engine_metrics_pool_their_requests_and_usage_counts_what_is_held(
    checkpoint: Path,
) -> None:
    prompts = random_prompts([5, 40], 97, seed=9)
    params = SamplingParams(max_tokens=12, ignore_eos=True)
    speculation = MtpConfig(depth=4, window=16, n_sink=2)
    with LLM(
        checkpoint,
        speculation,
        KvCacheConfig(tokens_per_page=16),
        max_batch_size=3,
        max_seq_len=128,
    ) as llm:
        outputs = llm.generate(prompts, params)
        pooled, idle = llm.metrics(), llm.usage()
        seen = []
        handle = llm.generate_async(prompts[0], params)
        handle._llm._worker.call(lambda: seen.append(llm.usage()))  # from the engine's own thread
        handle.result()
    alone = [output.metrics for output in outputs]
    assert pooled.requests == 2
    assert pooled.output_tokens == 24
    assert pooled.steps == sum(m.steps for m in alone)
    assert pooled.accepted_histogram == [
        sum(counts) for counts in zip(*(m.accepted_histogram for m in alone), strict=True)
    ]
    assert (idle.running, idle.waiting, idle.lanes_used, idle.kv_pages_used) == (0, 0, 0, 0)
    assert (idle.max_batch_size, idle.tokens_per_page) == (3, 16)
    assert seen[0].running + seen[0].waiting <= 1
    assert llm.usage().running == 0  # after shutdown too
