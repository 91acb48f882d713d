"""The public interface: lists, streams, awaiting, errors per request."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest
from engines import engine, run
from tiny_model import add_byte_tokenizer, random_prompts, tiny_checkpoint

import tllm_wmtp
from tllm_wmtp import LLM, MtpConfig, RequestError, SamplingParams

PROMPTS = random_prompts([20, 3, 60], 257, seed=8)
PARAMS = SamplingParams(max_tokens=16)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llm")
    return add_byte_tokenizer(tiny_checkpoint(folder, seed=51, vocab_size=257))


@pytest.fixture(scope="module")
def expected(checkpoint: Path) -> list[list[int]]:
    return [request.output_ids for request in run(engine(checkpoint), PROMPTS, PARAMS)]


@pytest.fixture(scope="module")
def llm(checkpoint: Path) -> Iterator[LLM]:
    with LLM(checkpoint, MtpConfig(depth=4, window=8, n_sink=2), max_seq_len=256) as llm:
        yield llm


def test_a_list_is_answered_in_order(llm: LLM, expected: list[list[int]]) -> None:
    answers = llm.generate(PROMPTS, PARAMS)
    assert [answer.outputs[0].token_ids for answer in answers] == expected
    assert [answer.prompt_token_ids for answer in answers] == PROMPTS
    assert all(answer.outputs[0].finish_reason == "length" for answer in answers)


def test_one_prompt_gives_one_output_with_measurements(llm: LLM, expected: list[list[int]]) -> None:
    answer = llm.generate(PROMPTS[0], PARAMS)
    metrics = answer.metrics
    assert answer.outputs[0].token_ids == expected[0]
    assert metrics is not None
    assert metrics.arm == llm.arm == "windowed"
    assert metrics.ttft_s is not None
    assert metrics.ttft_s > 0
    assert metrics.tpot_s is not None
    assert metrics.tpot_s > 0
    assert metrics.output_tokens == 16
    assert sum(metrics.accepted_histogram) == metrics.steps == len(metrics.draft_s)
    assert metrics.draft_kv_bytes == 2 * 2 * 32 * 4 * (2 + 8 + 4)  # a full ring


def test_text_in_text_out(llm: LLM) -> None:
    answer = llm.generate("hello", PARAMS)
    assert answer.prompt == "hello"
    assert answer.prompt_token_ids == list(b"hello")
    assert answer.outputs[0].text == llm.tokenizer.decode(answer.outputs[0].token_ids)


def test_a_stream_adds_up(llm: LLM, expected: list[list[int]]) -> None:
    ids, text, reasons = [], "", []
    for output in llm.generate_async(PROMPTS[1], PARAMS):
        completion = output.outputs[0]
        ids += completion.token_ids_diff
        text += completion.text_diff
        reasons.append(completion.finish_reason)
        assert completion.token_ids == ids
        assert completion.text == text
    assert ids == expected[1]
    assert text == llm.tokenizer.decode(ids)
    assert len(reasons) > 2
    assert reasons[-1] == "length"
    assert set(reasons[:-1]) == {None}


def test_awaiting_and_asynchronous_streams(llm: LLM, expected: list[list[int]]) -> None:
    async def collect(prompt: list[int]) -> list[int]:
        ids: list[int] = []
        async for output in llm.generate_async(prompt, PARAMS):
            ids += output.outputs[0].token_ids_diff
        return ids

    async def everything() -> tuple[list[list[int]], list[int]]:
        streams = await asyncio.gather(*(collect(prompt) for prompt in PROMPTS))
        return streams, (await llm.generate_async(PROMPTS[2], PARAMS)).outputs[0].token_ids

    streams, awaited = asyncio.run(everything())
    assert streams == expected
    assert awaited == expected[2]


def test_a_bad_prompt_in_a_list_comes_back_with_its_error(
    llm: LLM, expected: list[list[int]]
) -> None:
    answers = llm.generate([PROMPTS[0], [5] * 300, [], [999], PROMPTS[1]], PARAMS)
    good, too_long, empty, unknown, last = answers
    assert [good.outputs[0].token_ids, last.outputs[0].token_ids] == expected[:2]
    for bad, message in ((too_long, "300 tokens"), (empty, "empty"), (unknown, "999")):
        assert bad.outputs[0].finish_reason == "error"
        assert bad.outputs[0].token_ids == []
        assert isinstance(bad.error, RequestError)
        assert message in str(bad.error)


def test_a_bad_prompt_alone_raises(llm: LLM) -> None:
    with pytest.raises(RequestError, match="max_seq_len is 256"):
        llm.generate([5] * 256, PARAMS)


def test_abort_ends_a_stream(llm: LLM) -> None:
    handle = llm.generate_async(PROMPTS[0], SamplingParams(max_tokens=200))
    next(iter(handle))
    handle.abort()
    assert handle.result(timeout=60).outputs[0].finish_reason in ("abort", "length")
    assert len(handle.result().outputs[0].token_ids) < 200


def test_parameters_per_prompt(llm: LLM, expected: list[list[int]]) -> None:
    each = [SamplingParams(max_tokens=n) for n in (1, 5, 9)]
    answers = llm.generate(PROMPTS, each)
    assert [a.outputs[0].token_ids for a in answers] == [
        ids[:n] for ids, n in zip(expected, (1, 5, 9), strict=True)
    ]
    with pytest.raises(RequestError, match="2 sampling_params for 3 prompts"):
        llm.generate(PROMPTS, each[:2])


def test_shutdown_ends_what_runs(checkpoint: Path) -> None:
    llm = LLM(checkpoint, max_seq_len=2048)
    handle = llm.generate_async(PROMPTS[0], SamplingParams(max_tokens=1900))
    next(iter(handle))
    llm.shutdown()
    llm.shutdown()
    assert handle.result(timeout=60).outputs[0].finish_reason == "abort"
    with pytest.raises(RequestError, match="shutdown"):
        llm.generate(PROMPTS[0])


def test_without_a_tokenizer_only_ids_are_served(tmp_path: Path) -> None:
    with LLM(tiny_checkpoint(tmp_path), max_seq_len=64) as llm:
        answer = llm.generate([1, 2, 3], SamplingParams(max_tokens=4))
        assert len(answer.outputs[0].token_ids) == 4
        assert answer.outputs[0].text == ""
        with pytest.raises(RequestError, match=r"tokenizer\.json"):
            llm.generate("text")
        with pytest.raises(RequestError, match=r"tokenizer\.json"):
            llm.generate([1, 2], SamplingParams(stop=("x",)))


def test_the_engine_survives_its_own_failure(
    checkpoint: Path, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    with LLM(checkpoint, max_seq_len=256) as llm:
        with monkeypatch.context() as patch:
            patch.setattr(llm._engine.scheduler, "admit", lambda: 1 / 0)
            failed = llm.generate([PROMPTS[0], PROMPTS[1]], PARAMS)
        assert [answer.outputs[0].finish_reason for answer in failed] == ["error", "error"]
        assert "ZeroDivisionError" in str(failed[0].error)
        assert llm.generate(PROMPTS[0], PARAMS).outputs[0].token_ids == expected[0]


def test_public_names_resolve() -> None:
    for name in tllm_wmtp.__all__:
        assert getattr(tllm_wmtp, name) is not None
    with pytest.raises(AttributeError, match="nothing_like_it"):
        _ = tllm_wmtp.nothing_like_it
