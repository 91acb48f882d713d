"""Consumers that leave, processes that end, LLMs that nobody closes: nothing hangs or leaks."""

from __future__ import annotations

import asyncio
import gc
import os
import subprocess
import sys
import textwrap
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from engines import engine, run
from tiny_model import add_byte_tokenizer, random_prompts, tiny_checkpoint

from tllm_wmtp import LLM, KvCacheConfig, MtpConfig, RequestError, SamplingParams
from tllm_wmtp.errors import ConfigError
from tllm_wmtp.executor.request import Update

PROMPTS = random_prompts([20, 3, 60, 1, 33, 9], 257, seed=8)
PARAMS = SamplingParams(max_tokens=12)
WINDOWED = MtpConfig(depth=4, window=8, n_sink=2)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("lifetime")
    return add_byte_tokenizer(tiny_checkpoint(folder, seed=51, vocab_size=257))


@pytest.fixture(scope="module")
def expected(checkpoint: Path) -> list[list[int]]:
    return [request.output_ids for request in run(engine(checkpoint), PROMPTS, PARAMS)]


@pytest.fixture(scope="module")
def llm(checkpoint: Path) -> Iterator[LLM]:
    with LLM(checkpoint, WINDOWED, max_seq_len=512, max_batch_size=3) as llm:
        yield llm


def test_a_consumer_whose_event_loop_is_gone_takes_nobody_down(
    llm: LLM, expected: list[list[int]]
) -> None:
    loop = asyncio.new_event_loop()
    handle = llm.generate_async(PROMPTS[0], SamplingParams(max_tokens=200))
    stream = handle.__aiter__()
    loop.run_until_complete(anext(stream))
    loop.close()
    answers = llm.generate(PROMPTS, PARAMS)
    assert [answer.outputs[0].token_ids for answer in answers] == expected
    assert all(answer.error is None for answer in answers)
    assert handle.result(timeout=60).outputs[0].token_ids[:12] == expected[0]


def test_a_consumer_that_raises_ends_its_own_request_only(
    checkpoint: Path, expected: list[list[int]]
) -> None:
    machine = engine(checkpoint, WINDOWED)

    def broken(update: Update) -> None:
        raise RuntimeError("consumer is gone")

    bad = machine.submit(PROMPTS[0], PARAMS, broken)
    good = [machine.submit(prompt, PARAMS) for prompt in PROMPTS]
    while machine.step():
        pass
    assert [request.output_ids for request in good] == expected
    assert bad.finished
    assert machine.kv.free_pages == machine.kv.pages


def test_a_consumer_may_abort_others_from_its_callback(
    checkpoint: Path, expected: list[list[int]]
) -> None:
    machine = engine(checkpoint, WINDOWED)

    def abort_the_last(update: Update) -> None:
        machine.abort(requests[-1])

    requests = [machine.submit(PROMPTS[0], PARAMS)]
    requests[0].on_update = abort_the_last
    requests += [machine.submit(prompt, PARAMS) for prompt in PROMPTS[1:3]]
    while machine.step():
        pass
    assert [r.finish_reason for r in requests] == ["length", "length", "abort"]
    assert [r.output_ids for r in requests[:2]] == expected[:2]
    assert machine.kv.free_pages == machine.kv.pages


def test_streams_left_early_do_not_stop_others(llm: LLM, expected: list[list[int]]) -> None:
    async def leave(prompt: list[int]) -> None:
        async for _ in llm.generate_async(prompt, SamplingParams(max_tokens=60)):
            break

    async def cancelled(prompt: list[int]) -> None:
        handle = llm.generate_async(prompt, SamplingParams(max_tokens=400))
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(handle, timeout=0.01)

    async def everyone() -> list[int]:
        await asyncio.gather(leave(PROMPTS[0]), cancelled(PROMPTS[1]))
        return (await llm.generate_async(PROMPTS[2], PARAMS)).outputs[0].token_ids

    assert asyncio.run(everyone()) == expected[2]
    next(iter(llm.generate_async(PROMPTS[0], SamplingParams(max_tokens=60))))
    assert llm.generate(PROMPTS[1], PARAMS).outputs[0].token_ids == expected[1]


def test_many_threads_submit_at_once(llm: LLM, expected: list[list[int]]) -> None:
    answers: dict[int, list[list[int]]] = {}

    def client(name: int) -> None:
        answers[name] = [llm.generate(p, PARAMS).outputs[0].token_ids for p in PROMPTS]

    threads = [threading.Thread(target=client, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert [answers[i] for i in range(8)] == [expected] * 8


@pytest.mark.parametrize("after_updates", [0, 1, 3])
def test_abort_in_every_phase(llm: LLM, after_updates: int) -> None:
    handles = [llm.generate_async(PROMPTS[2], SamplingParams(max_tokens=400)) for _ in range(5)]
    for handle in handles[:2]:
        for _, _ in zip(range(after_updates), handle, strict=False):
            pass
    for handle in handles:  # two may run by now, the last ones wait for a slot
        handle.abort()
    reasons = {handle.result(timeout=60).outputs[0].finish_reason for handle in handles}
    assert reasons == {"abort"}


def test_a_dropped_llm_is_collected_with_its_thread(checkpoint: Path) -> None:
    llm = LLM(checkpoint, WINDOWED, max_seq_len=64)
    assert llm.generate(PROMPTS[0], PARAMS).outputs[0].finish_reason == "length"
    thread, engine_alive = llm._worker._thread, weakref.ref(llm._engine)
    assert thread.is_alive()
    del llm
    gc.collect()
    thread.join(20)
    assert not thread.is_alive()
    gc.collect()
    assert engine_alive() is None, "weights and pools outlive their LLM"


def test_a_handle_keeps_its_llm_until_the_answer(
    checkpoint: Path, expected: list[list[int]]
) -> None:
    handle = LLM(checkpoint, WINDOWED, max_seq_len=64).generate_async(PROMPTS[0], PARAMS)
    gc.collect()
    assert handle.result(timeout=60).outputs[0].token_ids == expected[0]


def test_two_llms_in_one_process(checkpoint: Path, llm: LLM, expected: list[list[int]]) -> None:
    with LLM(checkpoint, None, max_seq_len=128) as other:
        handles = [m.generate_async(p, PARAMS) for p in PROMPTS for m in (llm, other)]
        ids = [handle.result(timeout=60).outputs[0].token_ids for handle in handles]
    assert ids[0::2] == ids[1::2] == expected


def in_a_process(checkpoint: Path, body: str) -> subprocess.CompletedProcess[str]:
    script = f"""
        import os, sys
        from tllm_wmtp import LLM, MtpConfig, SamplingParams
        checkpoint = {str(checkpoint)!r}
        """
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script) + textwrap.dedent(body)],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


@pytest.mark.parametrize("busy", [False, True])
def test_a_process_ends_cleanly_without_shutdown(checkpoint: Path, busy: bool) -> None:
    done = in_a_process(
        checkpoint,
        f"""
        llm = LLM(checkpoint, MtpConfig(depth=3, window=8, n_sink=1), max_seq_len=4000)
        handles = [llm.generate_async([1, 2, 3], SamplingParams(max_tokens=3500))] * {int(busy)}
        print("end of the script")
        """,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "end of the script\n", "")


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_child_is_told_instead_of_waiting_for_ever(checkpoint: Path) -> None:
    done = in_a_process(
        checkpoint,
        """
        llm = LLM(checkpoint, max_seq_len=64)
        llm.generate([1, 2, 3], SamplingParams(max_tokens=2))
        child = os.fork()
        if child == 0:
            try:
                llm.generate([1, 2, 3], SamplingParams(max_tokens=2))
            except ValueError as error:
                print(error, flush=True)
            llm.shutdown()
            os._exit(0)
        os.waitpid(child, 0)
        print(len(llm.generate([1, 2, 3], SamplingParams(max_tokens=2)).outputs[0].token_ids))
        """,
    )
    assert done.returncode == 0, done.stderr
    assert "forked process" in done.stdout
    assert done.stdout.endswith("\n2\n")


def test_a_pool_for_one_at_a_time_serves_everyone_in_order(
    checkpoint: Path, expected: list[list[int]]
) -> None:
    kv = KvCacheConfig(max_tokens=80, tokens_per_page=16)
    machine = engine(checkpoint, WINDOWED, kv_cache=kv, max_seq_len=128)
    finished: list[int] = []
    requests = []
    for index, prompt in enumerate(PROMPTS):

        def note(update: Update, index: int = index) -> None:
            if update.finish_reason is not None:
                finished.append(index)

        requests.append(machine.submit(prompt, PARAMS, note))
    steps = 0
    while machine.step():
        steps += 1
        assert steps < 1000
    assert [r.output_ids for r in requests] == expected
    assert finished.index(2) < finished.index(4)  # the big one is not overtaken for ever


# prompts of every kind


def test_arrays_and_tensors_of_ids(llm: LLM, expected: list[list[int]]) -> None:
    numpy = pytest.importorskip("numpy")
    for prompt in (
        torch.tensor(PROMPTS[0]),
        numpy.array(PROMPTS[0]),
        tuple(PROMPTS[0]),
        list(numpy.array(PROMPTS[0])),
    ):
        assert llm.generate(prompt, PARAMS).outputs[0].token_ids == expected[0]
    pair = llm.generate(torch.tensor([PROMPTS[0], PROMPTS[0]]), PARAMS)
    assert [answer.outputs[0].token_ids for answer in pair] == [expected[0]] * 2


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ([1.5, 2], "type float"),
        ([None], "type NoneType"),
        ([[1, 2], ["a"]], "type list"),
        ("\ud800", "valid Unicode"),
        ([-1], "token id -1"),
        ([[]], "empty prompt"),
    ],
)
def test_what_is_no_prompt_is_refused_by_name(
    llm: LLM, prompt: object, message: str | None
) -> None:
    # The good neighbour makes it a list, so the refusal comes back instead of being raised.
    batch = prompt if isinstance(prompt, list) and not isinstance(prompt[0], int) else [prompt]
    *refused, good = llm.generate([*batch, PROMPTS[0]], PARAMS)
    assert any(message in str(answer.error) for answer in refused)
    assert good.error is None


def test_a_single_bad_prompt_raises(llm: LLM) -> None:
    with pytest.raises(RequestError, match="valid Unicode"):
        llm.generate("\ud800", PARAMS)


@pytest.mark.parametrize("params", [5, {"max_tokens": 3}, ["x"]])
def test_what_is_no_sampling_params_is_refused(llm: LLM, params: object) -> None:
    with pytest.raises(RequestError, match="SamplingParams"):
        llm.generate([PROMPTS[0]], params)  # type: ignore[arg-type]
    with pytest.raises(RequestError, match="SamplingParams"):
        llm.generate_async(PROMPTS[0], params)  # type: ignore[arg-type]


def test_limits_are_checked_before_the_weights_are_read(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tllm_wmtp.llm.load_model", lambda *a: pytest.fail("weights were read"))
    with pytest.raises(ConfigError, match="max_seq_len 5000"):
        LLM(checkpoint, max_seq_len=5000)
    with pytest.raises(ConfigError, match="window 9999"):
        LLM(checkpoint, MtpConfig(window=9999))
