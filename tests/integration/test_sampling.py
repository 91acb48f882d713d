"""Sampling through the whole runtime: no arm changes the distribution, seeds, stops, reports."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from chi_square import calibration
from engines import engine, outputs, run
from sampling_reference import distribution
from tiny_model import add_byte_tokenizer, random_prompts, tiny_checkpoint

from tllm_wmtp import LLM
from tllm_wmtp.checkpoint.loader import load_model
from tllm_wmtp.config import KvCacheConfig, MtpConfig
from tllm_wmtp.errors import RequestError
from tllm_wmtp.executor import sampler
from tllm_wmtp.executor.engine import Engine
from tllm_wmtp.executor.request import Request
from tllm_wmtp.models.causal import CausalStates
from tllm_wmtp.sampling import SamplingParams

VOCAB = 12
REQUESTS, LENGTH, SHORT = 48, 40, 16
ARMS = {
    "dense": None,
    "native": MtpConfig.native(depth=4),
    "windowed": MtpConfig(depth=4, window=6, n_sink=2),
    "adaptive": MtpConfig(depth=4, window=6, n_sink=2, adaptive_depth=True),
    "tree": MtpConfig(depth=3, window=6, n_sink=2, tree_width=2),
}
SETTINGS = {
    "plain": SamplingParams(temperature=0.5),
    "everything": SamplingParams(
        temperature=0.6,
        min_p=0.01,
        top_k=9,
        top_p=0.95,
        repetition_penalty=1.1,
        presence_penalty=-0.4,
        frequency_penalty=0.05,
    ),
}
PROMPT = random_prompts([19], VOCAB, seed=5)[0]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("tiny"), seed=3, vocab_size=VOCAB)


def sampled(
    checkpoint: Path, arm: str, params: SamplingParams, seeds: Sequence[int], **limits: object
) -> list[Request]:
    """One request per seed, all in one batch."""
    each = [dataclasses.replace(params, seed=seed) for seed in seeds]
    limits = {"max_batch_size": len(seeds)} | limits
    return run(engine(checkpoint, ARMS[arm], max_seq_len=128, **limits), [PROMPT] * len(each), each)


@torch.inference_mode()
def rows_after(checkpoint: Path, prompt: list[int], output: list[int]) -> torch.Tensor:
    """The target's logits ``[length, V]`` that chose ``output``, from one whole sequence."""
    target = load_model(checkpoint).target
    states = CausalStates(target.config.linear_conv_kernel_dim)
    ids = torch.tensor([prompt + output[:-1]])
    hidden = target(ids, torch.arange(ids.shape[1])[None], states)
    return target.logits(hidden[0, len(prompt) - 1 :])


def rows_of(checkpoint: Path, requests: Sequence[Request]) -> list[torch.Tensor]:
    return [rows_after(checkpoint, request.prompt_ids, request.output_ids) for request in requests]


def accepted(requests: Sequence[Request]) -> int:
    return sum(sum(request.metrics.accepted_histogram[1:]) for request in requests)


def p_values(checkpoint: Path, requests: Sequence[Request]) -> dict[str, float]:
    """Whether the outputs look drawn from the reference, by token and by rank of likelihood."""
    expected, drawn = [], []
    for request, rows in zip(requests, rows_of(checkpoint, requests), strict=True):
        for t, (row, token) in enumerate(zip(rows.tolist(), request.output_ids, strict=True)):
            before = request.output_ids[:t]
            expected.append(distribution(row, request.params, request.prompt_ids, before))
            drawn.append(token)
    by_token = torch.tensor(expected, dtype=torch.float64)
    by_rank, order = by_token.sort(dim=-1, descending=True, stable=True)
    ranks = (order == torch.tensor(drawn)[:, None]).long().argmax(-1)
    return {
        "token": calibration(drawn, by_token),
        "rank": calibration(ranks.tolist(), by_rank),
    }


CASES = [("native", "everything"), ("windowed", "everything")]
OTHERS = [(arm, "plain") for arm in ARMS] + [("dense", "everything"), ("adaptive", "everything")]


@pytest.mark.parametrize(
    ("arm", "name"), CASES + [pytest.param(*case, marks=pytest.mark.slow) for case in OTHERS]
)
def test_every_arm_draws_from_the_targets_distribution(
    checkpoint: Path, arm: str, name: str
) -> None:
    params = dataclasses.replace(SETTINGS[name], max_tokens=LENGTH)
    requests = sampled(checkpoint, arm, params, range(REQUESTS))
    # The depth follows the clock where it adapts, so these are new tokens in every run.
    least = 1e-4 if arm == "adaptive" else 0.01
    for p_value in p_values(checkpoint, requests).values():
        assert p_value > least
    if arm != "dense":
        assert accepted(requests) > REQUESTS  # the drafts had their say


def test_a_defect_of_the_verify_would_show(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sampler, "residual", lambda p, q: p)
    params = dataclasses.replace(SETTINGS["plain"], max_tokens=LENGTH)
    requests = sampled(checkpoint, "windowed", params, range(REQUESTS))
    assert min(p_values(checkpoint, requests).values()) < 1e-4


@pytest.mark.parametrize("name", SETTINGS)
def test_a_tree_draws_the_very_tokens_of_the_dense_arm(checkpoint: Path, name: str) -> None:
    params = dataclasses.replace(SETTINGS[name], max_tokens=SHORT)
    dense = sampled(checkpoint, "dense", params, range(8))
    tree = sampled(checkpoint, "tree", params, range(8))
    assert outputs(tree) == outputs(dense)
    assert accepted(tree) > 8


@pytest.mark.parametrize("arm", ARMS)
def test_penalties_apply_to_greedy_requests_alike(checkpoint: Path, arm: str) -> None:
    params = SamplingParams(
        max_tokens=SHORT, repetition_penalty=1.3, presence_penalty=0.2, frequency_penalty=0.1
    )
    plain, request = run(
        engine(checkpoint, ARMS[arm], max_seq_len=128, max_batch_size=2),
        [PROMPT, PROMPT],
        [SamplingParams(max_tokens=SHORT), params],
    )
    assert request.output_ids != plain.output_ids
    (rows,) = rows_of(checkpoint, [request])
    for t, row in enumerate(rows.tolist()):
        expected = distribution(row, params, PROMPT, request.output_ids[:t])
        assert expected[request.output_ids[t]] == 1.0


# Seeds --------------------------------------------------------------------------------------


@pytest.mark.parametrize("arm", ["dense", "windowed", "tree"])
def test_a_seed_gives_the_same_tokens_again_alone_and_in_a_batch(
    checkpoint: Path, arm: str
) -> None:
    params = dataclasses.replace(SETTINGS["everything"], max_tokens=SHORT)
    together = outputs(sampled(checkpoint, arm, params, range(6)))
    assert len({tuple(tokens) for tokens in together}) == 6
    assert outputs(sampled(checkpoint, arm, params, range(6))) == together
    assert outputs(sampled(checkpoint, arm, params, range(6), max_batch_size=2)) == together
    assert outputs(sampled(checkpoint, arm, params, [4])) == [together[4]]


def test_without_a_seed_every_request_differs(checkpoint: Path) -> None:
    params = SamplingParams(temperature=1.0, max_tokens=SHORT)
    requests = run(engine(checkpoint, ARMS["windowed"], max_batch_size=4), [PROMPT] * 4, params)
    assert len({tuple(tokens) for tokens in outputs(requests)}) == 4


def test_a_request_put_back_goes_on_with_its_own_random_numbers(checkpoint: Path) -> None:
    params = dataclasses.replace(SETTINGS["everything"], max_tokens=SHORT)
    undisturbed = sampled(checkpoint, "windowed", params, range(4))
    tight = KvCacheConfig(max_tokens=128, tokens_per_page=8, enable_block_reuse=False)
    crowded = sampled(checkpoint, "windowed", params, range(4), kv_cache=tight)
    assert sum(request.metrics.preemptions for request in crowded) > 0
    assert outputs(crowded) == outputs(undisturbed)


def test_greedy_and_sampled_requests_share_a_batch(checkpoint: Path) -> None:
    each = [
        SamplingParams(max_tokens=SHORT),
        SamplingParams(max_tokens=SHORT, temperature=2.0, seed=1),
        SamplingParams(max_tokens=SHORT, top_k=3, seed=2, frequency_penalty=1.0),
    ]

    def machine(requests: int) -> Engine:
        return engine(checkpoint, ARMS["windowed"], max_seq_len=128, max_batch_size=requests)

    alone = [run(machine(1), [PROMPT], params)[0].output_ids for params in each]
    assert outputs(run(machine(3), [PROMPT] * 3, each)) == alone


# Stops --------------------------------------------------------------------------------------


@pytest.mark.parametrize("arm", ["dense", "windowed", "tree"])
def test_a_stop_id_cuts_what_the_seed_would_have_drawn(checkpoint: Path, arm: str) -> None:
    params = dataclasses.replace(SETTINGS["plain"], max_tokens=SHORT)
    whole = sampled(checkpoint, arm, params, range(5))
    stop = whole[0].output_ids[SHORT // 2]
    cut = sampled(checkpoint, arm, dataclasses.replace(params, stop_token_ids=(stop,)), range(5))
    for long, short in zip(whole, cut, strict=True):
        end = long.output_ids.index(stop) + 1 if stop in long.output_ids else SHORT
        assert short.output_ids == long.output_ids[:end]
        assert short.finish_reason == ("stop" if stop in long.output_ids else "length")


def test_a_stop_string_cuts_what_the_seed_would_have_drawn(tmp_path: Path) -> None:
    words = add_byte_tokenizer(tiny_checkpoint(tmp_path, seed=41, vocab_size=257), True)
    params = SamplingParams(temperature=1.0, max_tokens=SHORT, ignore_eos=True)
    (whole,) = sampled(words, "windowed", params, [3])
    assert whole.text is not None
    text = whole.text.text
    stop = text[len(text) // 2 :][:3]
    (cut,) = sampled(words, "windowed", dataclasses.replace(params, stop=(stop,)), [3])
    assert cut.text is not None
    assert cut.text.text == text[: text.index(stop)]
    assert cut.finish_reason == "stop"
    assert cut.output_ids == whole.output_ids[: len(cut.output_ids)]


# Log-probabilities and refusals ---------------------------------------------------------------


@pytest.mark.parametrize("arm", ["dense", "windowed", "tree"])
@pytest.mark.parametrize("name", ["greedy", "everything"])
def test_log_probabilities_are_those_of_a_dense_forward(
    checkpoint: Path, arm: str, name: str
) -> None:
    base = SamplingParams() if name == "greedy" else SETTINGS[name]
    params = dataclasses.replace(base, max_tokens=SHORT, logprobs=3, seed=8, ignore_eos=True)
    with LLM(
        checkpoint, speculation=ARMS[arm], max_seq_len=128, prefill_chunk=32, max_batch_size=2
    ) as llm:
        plain = dataclasses.replace(params, logprobs=None)
        output, silent = llm.generate([PROMPT, PROMPT], [params, plain])
    told = output.outputs[0]
    assert silent.outputs[0].logprobs is None
    assert silent.outputs[0].token_ids == told.token_ids
    assert told.logprobs is not None
    rows = rows_after(checkpoint, PROMPT, told.token_ids).double().log_softmax(-1)
    for row, token, report in zip(rows, told.token_ids, told.logprobs, strict=True):
        order = row.argsort(descending=True).tolist()
        assert set(report) == {*order[:3], token}
        for i, entry in report.items():
            assert entry.logprob == pytest.approx(float(row[i]), abs=1e-4)
            assert entry.rank == order.index(i) + 1


def test_log_probabilities_end_where_the_output_does(checkpoint: Path) -> None:
    first = SamplingParams(max_tokens=SHORT, temperature=0.5, seed=1, logprobs=0)
    with LLM(checkpoint, speculation=ARMS["windowed"], max_seq_len=128, prefill_chunk=32) as llm:
        stop = llm.generate(PROMPT, first).outputs[0].token_ids[9]
        told = llm.generate(PROMPT, dataclasses.replace(first, stop_token_ids=(stop,))).outputs[0]
        streamed = llm.generate_async(PROMPT, first)
        parts = [output.outputs[0].logprobs_diff or [] for output in streamed]
    assert told.logprobs is not None
    assert [[*report] for report in told.logprobs] == [[token] for token in told.token_ids]
    assert sum(len(part) for part in parts) == SHORT


def test_a_refused_request_is_refused_by_name(checkpoint: Path) -> None:
    machine = engine(checkpoint, ARMS["windowed"])
    with pytest.raises(RequestError, match=f"token id {VOCAB}"):
        machine.submit([1, VOCAB], SamplingParams(repetition_penalty=1.2))
    with pytest.raises(RequestError, match=f"logprobs {VOCAB + 1}"):
        machine.submit([1], SamplingParams(logprobs=VOCAB + 1))
    assert not machine.has_work
