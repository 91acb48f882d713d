"""The OpenAI interface, held to the engine itself, through the official client and over HTTP."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import torch
from openai_server import (
    CHAT,
    CHAT_TEXT,
    PATIENCE_S,
    get,
    metric,
    post,
    running,
    served_checkpoint,
    wait_until,
)
from tiny_model import BYTE_END_ID

from tllm_wmtp import LLM, MtpConfig, SamplingParams

TOKENS = 24
#: So many tokens that the request is still running when a test looks.
LONG = 3000


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return served_checkpoint(tmp_path_factory.mktemp("openai"))


@pytest.fixture(scope="module")
def llm(checkpoint: Path) -> Iterator[LLM]:
    speculation = MtpConfig(depth=4, window=8, n_sink=2)
    with LLM(checkpoint, speculation, max_seq_len=4096, max_batch_size=4) as llm:
        yield llm


@pytest.fixture(scope="module")
def dense(checkpoint: Path) -> Iterator[LLM]:
    """The oracle: no speculation, no server."""
    with LLM(checkpoint, max_seq_len=4096, max_batch_size=4) as llm:
        yield llm


@pytest.fixture(scope="module")
def address(llm: LLM, checkpoint: Path) -> Iterator[str]:
    with running(llm, checkpoint) as (address, _):
        yield address


@pytest.fixture(scope="module")
def strict(llm: LLM, checkpoint: Path) -> Iterator[str]:
    """A second server in front of the same engine, with every limit low."""
    limits = {"api_key": "secret", "max_request_bytes": 2000, "max_concurrent": 2}
    with running(llm, checkpoint, **limits) as (address, _):
        yield address


@pytest.fixture(scope="module")
def client(address: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{address}/v1", api_key="any", max_retries=0) as client:
        yield client


def offline(dense: LLM, prompt: str | list[int], **options: Any) -> Any:
    return dense.generate(prompt, SamplingParams(**{"max_tokens": TOKENS} | options)).outputs[0]


def chat_ids(dense: LLM, text: str = CHAT_TEXT) -> list[int]:
    assert dense.tokenizer is not None
    return [BYTE_END_ID, *dense.tokenizer.encode(text).ids]


# The same answers as without a server.


def test_a_completion_is_what_the_engine_makes_without_speculation(
    client: openai.OpenAI, dense: LLM
) -> None:
    answer = client.completions.create(
        model="tiny", prompt="the old fox", max_tokens=TOKENS, temperature=0
    )
    expected = offline(dense, "the old fox")
    assert answer.choices[0].text == expected.text
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None
    used = (answer.usage.prompt_tokens, answer.usage.completion_tokens, answer.usage.total_tokens)
    assert used == (11, TOKENS, 11 + TOKENS)


def test_several_prompts_are_answered_in_their_order(client: openai.OpenAI, dense: LLM) -> None:
    prompts = ["one", "two, longer", "three"]
    answer = client.completions.create(
        model="tiny", prompt=prompts, max_tokens=TOKENS, temperature=0
    )
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert [choice.text for choice in answer.choices] == [
        offline(dense, prompt).text for prompt in prompts
    ]
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == sum(map(len, prompts))
    assert answer.usage.completion_tokens == 3 * TOKENS


def test_token_ids_are_a_prompt_and_are_given_back_if_asked_for(
    client: openai.OpenAI, dense: LLM
) -> None:
    ids = [200, 3, 256, 77]
    for prompt in (ids, [ids]):
        answer = client.completions.create(
            model="tiny", prompt=prompt, temperature=0, extra_body={"return_token_ids": True}
        )
        made = answer.choices[0].model_extra or {}
        assert made["token_ids"] == offline(dense, ids, max_tokens=16).token_ids


def test_a_chat_is_the_completion_of_its_template(client: openai.OpenAI, dense: LLM) -> None:
    answer = client.chat.completions.create(
        model="tiny", messages=CHAT, max_completion_tokens=TOKENS, temperature=0
    )
    expected = offline(dense, chat_ids(dense))
    message = answer.choices[0].message
    assert (message.role, message.content) == ("assistant", expected.text)
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == 1 + len(CHAT_TEXT)


def test_options_reach_the_template_and_parts_are_lines(client: openai.OpenAI, dense: LLM) -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    answer = client.chat.completions.create(
        model="tiny",
        messages=[{"role": "user", "content": parts}],
        max_tokens=TOKENS,
        temperature=0,
        extra_body={"chat_template_kwargs": {"lead": "sage"}},
    )
    expected = offline(dense, chat_ids(dense, "user: a\nb\nsage:"))
    assert answer.choices[0].message.content == expected.text


def test_a_chat_without_a_limit_goes_on_to_the_models(
    checkpoint: Path,
) -> None:
    with LLM(checkpoint, max_seq_len=64, max_batch_size=1) as short:
        assert len(chat_ids(short)) < 60
        with running(short, checkpoint) as (address, _):
            answer = post(address, "chat/completions", messages=CHAT).json()
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["usage"]["total_tokens"] == 64


def test_streamed_pieces_join_to_the_same_text(client: openai.OpenAI, dense: LLM) -> None:
    stream = client.completions.create(
        model="tiny",
        prompt="the old fox",
        max_tokens=TOKENS,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = list(stream)
    pieces = [chunk.choices[0] for chunk in chunks[:-1]]
    assert "".join(piece.text for piece in pieces) == offline(dense, "the old fox").text
    assert len(pieces) > 3
    assert [piece.finish_reason for piece in pieces] == [None] * (len(pieces) - 1) + ["length"]
    assert not chunks[-1].choices
    assert chunks[-1].usage is not None
    assert (chunks[-1].usage.prompt_tokens, chunks[-1].usage.completion_tokens) == (11, TOKENS)
    assert len({chunk.id for chunk in chunks}) == 1


def test_a_streamed_chat_names_its_role_once(client: openai.OpenAI, dense: LLM) -> None:
    stream = client.chat.completions.create(
        model="tiny", messages=CHAT, max_tokens=TOKENS, temperature=0, stream=True
    )
    choices = [chunk.choices[0] for chunk in stream]
    assert [c.delta.role for c in choices] == ["assistant"] + [None] * (len(choices) - 1)
    text = "".join(choice.delta.content or "" for choice in choices)
    assert text == offline(dense, chat_ids(dense)).text
    assert choices[-1].finish_reason == "length"


def test_the_bytes_of_a_stream_are_events_that_end_with_done(address: str) -> None:
    body = {"prompt": "x", "max_tokens": 3, "stream": True}
    with httpx.stream("POST", f"{address}/v1/completions", json=body) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        events = response.read().decode().split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    for event in events[:-2]:
        chunk = json.loads(event.removeprefix("data: "))
        assert chunk["object"] == "text_completion"
        assert "usage" not in chunk


def test_sixteen_streams_at_once_are_each_what_they_are_alone(address: str, dense: LLM) -> None:
    prompts = ["ab" * (1 + 3 * i) for i in range(16)]

    async def text_of(client: openai.AsyncOpenAI, prompt: str) -> str:
        stream = await client.completions.create(
            model="tiny", prompt=prompt, max_tokens=TOKENS, temperature=0, stream=True
        )
        return "".join([chunk.choices[0].text async for chunk in stream])

    async def texts() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{address}/v1", api_key="any") as client:
            return await asyncio.gather(*(text_of(client, prompt) for prompt in prompts))

    outputs = dense.generate(prompts, SamplingParams(max_tokens=TOKENS))
    assert asyncio.run(texts()) == [output.outputs[0].text for output in outputs]
    wait_until(lambda: metric(address, "wmtp_lanes_used") == 0)


# Options.


def test_a_stop_string_ends_the_text_before_it(client: openai.OpenAI, dense: LLM) -> None:
    whole = offline(dense, "the old fox").text
    stop = whole[9:12]
    for stream in (False, True):
        answer = client.completions.create(
            model="tiny",
            prompt="the old fox",
            max_tokens=TOKENS,
            temperature=0,
            stop=[stop],
            stream=stream,
        )
        choices = [c.choices[0] for c in answer] if stream else answer.choices
        assert "".join(choice.text for choice in choices) == whole[: whole.index(stop)]
        assert choices[-1].finish_reason == "stop"


def test_a_seed_gives_the_same_text_and_n_takes_the_next_ones(client: openai.OpenAI) -> None:
    def texts(seed: int, n: int = 1) -> list[str]:
        answer = client.completions.create(
            model="tiny", prompt="the old fox", max_tokens=TOKENS, seed=seed, n=n
        )
        assert answer.usage is not None
        assert answer.usage.prompt_tokens == 11
        assert answer.usage.completion_tokens == n * TOKENS
        return [choice.text for choice in answer.choices]

    several = texts(7, n=3)
    assert several == texts(7) + texts(8) + texts(9)
    assert len(set(several)) == 3
    assert texts(-1) == texts(-1)


def test_temperature_is_one_by_default_and_options_reach_the_engine(
    client: openai.OpenAI, dense: LLM, llm: LLM
) -> None:
    options: dict[str, Any] = {"presence_penalty": 1.5, "frequency_penalty": -0.5, "top_p": 0.9}
    extra = {"top_k": 40, "min_p": 0.01, "repetition_penalty": 1.2, "stop_token_ids": [300]}
    answer = client.completions.create(
        model="tiny", prompt="fox", max_tokens=TOKENS, seed=3, extra_body=extra, **options
    )
    params = SamplingParams(max_tokens=TOKENS, seed=3, temperature=1.0, **options, **extra)
    assert answer.choices[0].text == llm.generate("fox", params).outputs[0].text
    plain = SamplingParams(max_tokens=TOKENS, seed=3, temperature=1.0)
    assert answer.choices[0].text != llm.generate("fox", plain).outputs[0].text


def test_logprobs_of_a_completion_are_the_engines(client: openai.OpenAI, dense: LLM) -> None:
    expected = offline(dense, "the old fox", logprobs=2)
    for stream in (False, True):
        answer = client.completions.create(
            model="tiny",
            prompt="the old fox",
            max_tokens=TOKENS,
            temperature=0,
            logprobs=2,
            stream=stream,
        )
        choices = [c.choices[0] for c in answer] if stream else answer.choices
        reports = [choice.logprobs for choice in choices if choice.logprobs is not None]
        tokens = [token for report in reports for token in report.tokens or ()]
        assert "".join(tokens) == expected.text
        offsets = [offset for report in reports for offset in report.text_offset or ()]
        assert offsets == [len("".join(tokens[:at])) for at in range(TOKENS)]
        values = [value for report in reports for value in report.token_logprobs or ()]
        mine = [
            entry[i].logprob for i, entry in zip(expected.token_ids, expected.logprobs, strict=True)
        ]
        assert values == pytest.approx(mine, abs=1e-4)
        tops = [top for report in reports for top in report.top_logprobs or ()]
        for top, entry in zip(tops, expected.logprobs, strict=True):
            listed = [logprob.logprob for logprob in entry.values()]
            assert sorted(top.values()) == pytest.approx(sorted(listed), abs=1e-4)


def test_logprobs_of_a_chat_name_tokens_by_text_and_bytes(
    client: openai.OpenAI, dense: LLM
) -> None:
    answer = client.chat.completions.create(
        model="tiny", messages=CHAT, max_tokens=TOKENS, temperature=0, logprobs=True, top_logprobs=3
    )
    report = answer.choices[0].logprobs
    assert report is not None
    assert report.content is not None
    text = answer.choices[0].message.content
    assert b"".join(bytes(token.bytes or ()) for token in report.content).decode() == text
    expected = offline(dense, chat_ids(dense), logprobs=3)
    for token, i, entry in zip(report.content, expected.token_ids, expected.logprobs, strict=True):
        assert token.logprob == pytest.approx(entry[i].logprob, abs=1e-4)
        ranked = sorted((logprob.logprob for logprob in entry.values()), reverse=True)[:3]
        assert [top.logprob for top in token.top_logprobs] == pytest.approx(ranked, abs=1e-4)
        assert token.top_logprobs[0].token == token.token  # greedy


# What a server owes its neighbours.


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_frees_its_lane(address: str, stream: bool) -> None:
    before = metric(address, "wmtp_requests_total", finish_reason="abort")
    body = {"prompt": "x", "max_tokens": LONG, "stream": stream}
    head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    data = json.dumps(body).encode()
    host, port = address.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as connection:
        connection.sendall(f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data)
        wait_until(lambda: metric(address, "wmtp_lanes_used") == 1)
    wait_until(lambda: metric(address, "wmtp_lanes_used") == 0)
    assert metric(address, "wmtp_requests_total", finish_reason="abort") == before + 1
    assert metric(address, "wmtp_requests_running") == 0


def test_metrics_count_what_was_served(address: str) -> None:
    def counts() -> list[float]:
        names = ("wmtp_prompt_tokens_total", "wmtp_output_tokens_total", "wmtp_requests_total")
        return [metric(address, name, **({"finish_reason": "length"} if "requests" in name else {}))
                for name in names]  # fmt: skip

    before = counts()
    assert post(address, prompt="abc", max_tokens=9).status_code == 200
    assert [now - then for now, then in zip(counts(), before, strict=True)] == [3, 9, 1]
    assert 1 <= metric(address, "wmtp_acceptance_length", model="tiny") <= 4
    exposed = get(f"{address}/metrics").text
    assert "# TYPE wmtp_steps_total counter" in exposed
    assert "# TYPE wmtp_conditional_acceptance gauge" in exposed


LIMITS = {"max_tokens": 2}
WRONG = {
    "no prompt": ({}, "prompt"),
    "prompt of a wrong kind": ({"prompt": 3}, "prompt"),
    "empty list": ({"prompt": []}, "prompt"),
    "mixed list": ({"prompt": ["a", 1]}, "prompt"),
    "booleans as ids": ({"prompt": [True]}, "prompt"),
    "empty prompt": ({"prompt": ""}, None),
    "id out of range": ({"prompt": [999]}, None),
    "negative id": ({"prompt": [-1]}, None),
    "too long a prompt": ({"prompt": "x" * 5000}, None),
    "half a surrogate pair": ({"prompt": "\ud800"}, None),
    "max_tokens as text": ({"prompt": "a", "max_tokens": "2"}, "max_tokens"),
    "max_tokens of 0": ({"prompt": "a", "max_tokens": 0}, "max_tokens"),
    "temperature as text": ({"prompt": "a", "temperature": "hot"}, "temperature"),
    "negative temperature": ({"prompt": "a", "temperature": -1}, "temperature"),
    "top_p over 1": ({"prompt": "a", "top_p": 1.5}, "top_p"),
    "penalty over 2": ({"prompt": "a", "presence_penalty": 3}, "presence_penalty"),
    "seed as a fraction": ({"prompt": "a", "seed": 0.5}, "seed"),
    "n of 0": ({"prompt": "a", "n": 0}, "n"),
    "logprobs over 20": ({"prompt": "a", "logprobs": 21}, "logprobs"),
    "logprobs as a boolean": ({"prompt": "a", "logprobs": True}, "logprobs"),
    "stream as text": ({"prompt": "a", "stream": "yes"}, "stream"),
    "stream_options alone": ({"prompt": "a", "stream_options": {}}, "stream_options"),
    "an empty stop": ({"prompt": "a", "stop": [""]}, "stop"),
    "a stop that is an object": ({"prompt": "a", "stop": [{}]}, "stop"),
    "a long stop": ({"prompt": "a", "stop": "x" * 2000}, "stop"),
    "echo": ({"prompt": "a", "echo": True}, "echo"),
    "best_of": ({"prompt": "a", "best_of": 3}, "best_of"),
    "logit_bias": ({"prompt": "a", "logit_bias": {"5": 1}}, "logit_bias"),
    "too many prompts": ({"prompt": ["a"] * 300}, None),
    "more completions than memory": ({"prompt": "a", "n": 10**15}, None),
}
WRONG_CHATS = {
    "no messages": ({}, "messages"),
    "messages as text": ({"messages": "hi"}, "messages"),
    "a message as text": ({"messages": ["hi"]}, "messages"),
    "no role": ({"messages": [{"content": "hi"}]}, "messages"),
    "no content": ({"messages": [{"role": "user"}]}, "messages"),
    "an image": (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
        "messages",
    ),
    "tools": ({"messages": CHAT, "tools": [{"type": "function"}]}, "tools"),
    "a schema": ({"messages": CHAT, "response_format": {"type": "json_object"}}, "response_format"),
    "top_logprobs alone": ({"messages": CHAT, "top_logprobs": 2}, "top_logprobs"),
    "too long a chat": ({"messages": [{"role": "user", "content": "x" * 5000}]}, None),
}


def check_refusal(response: httpx.Response, param: str | None) -> None:
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error["type"] == "invalid_request_error"
    assert error["param"] == param
    assert error["message"].count("; ") >= 1  # value, rule; remedy


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_completion_is_refused_and_named(address: str, case: str) -> None:
    body, param = WRONG[case]
    check_refusal(post(address, **LIMITS | body), param)


@pytest.mark.parametrize("case", WRONG_CHATS)
def test_a_wrong_chat_is_refused_and_named(address: str, case: str) -> None:
    body, param = WRONG_CHATS[case]
    check_refusal(post(address, "chat/completions", **LIMITS | body), param)


def test_a_wrong_stream_is_refused_by_its_status(address: str) -> None:
    check_refusal(post(address, prompt="x" * 5000, stream=True), None)


@pytest.mark.parametrize("body", [b"", b"{", b"[1]", b"null", b"\xff", b"[" * 100_000])
def test_a_body_that_is_no_json_object_is_refused(address: str, body: bytes) -> None:
    headers = {"Content-Type": "application/json"}
    check_refusal(
        httpx.post(f"{address}/v1/completions", content=body, headers=headers, timeout=PATIENCE_S),
        None,
    )


def test_other_refusals_have_their_status(address: str) -> None:
    unknown = post(address, model="gpt-4", prompt="a")
    assert (unknown.status_code, unknown.json()["error"]["code"]) == (404, "model_not_found")
    assert get(f"{address}/v1/models/gpt-4").status_code == 404
    assert get(f"{address}/v1/embeddings").json()["error"]["type"] == "invalid_request_error"
    assert get(f"{address}/v1/completions").status_code == 405
    form = httpx.post(f"{address}/v1/completions", data={"prompt": "a"})
    assert form.status_code == 415
    assert "application/json" in form.json()["error"]["message"]


def test_the_server_lives_on_and_names_its_model(client: openai.OpenAI, address: str) -> None:
    assert [model.id for model in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").id == "tiny"
    assert get(f"{address}/health").json() == {"status": "ok"}
    assert post(address, prompt="a", **LIMITS, user="x", unheard_of=1).status_code == 200
    assert metric(address, "wmtp_requests_running") == 0


def test_a_key_is_asked_for(strict: str) -> None:
    for key in (None, "secre", "secret2", "sécret"):
        header = {} if key is None else {"Authorization": f"Bearer {key}".encode()}
        refused = get(f"{strict}/v1/models", header)
        assert refused.status_code == 401
        assert refused.json()["error"]["code"] == "invalid_api_key"
        assert "secret" not in refused.text
    with openai.OpenAI(base_url=f"{strict}/v1", api_key="secret") as client:
        assert client.models.list().data
    with (
        openai.OpenAI(base_url=f"{strict}/v1", api_key="no") as client,
        pytest.raises(openai.AuthenticationError),
    ):
        client.completions.create(model="tiny", prompt="a")
    assert get(f"{strict}/health").status_code == 200


def test_too_large_a_request_is_refused(strict: str) -> None:
    headers = {"Authorization": "Bearer secret", "Content-Type": "application/json"}

    def parts() -> Iterator[bytes]:  # sent in chunks: no length is announced
        yield from [b"x" * 1000] * 3

    for content in (b"x" * 2001, b"x" * 3_000_000, parts()):
        refused = httpx.post(
            f"{strict}/v1/completions", content=content, headers=headers, timeout=PATIENCE_S
        )
        assert refused.status_code == 413
        assert "--max-request-bytes" in refused.json()["error"]["message"]


def test_more_requests_than_places_are_told_to_come_again(strict: str) -> None:
    with openai.OpenAI(base_url=f"{strict}/v1", api_key="secret", max_retries=0) as client:
        streams = [
            client.completions.create(model="tiny", prompt="a", max_tokens=LONG, stream=True)
            for _ in range(2)
        ]
        with pytest.raises(openai.RateLimitError) as refused:
            client.completions.create(model="tiny", prompt="a")
        assert refused.value.code == "rate_limit_exceeded"
        assert int(refused.value.response.headers["retry-after"]) >= 1
        ended = {"finish_reason": "abort"}
        before = metric(strict, "wmtp_requests_total", **ended)
        for stream in streams:
            stream.close()
        wait_until(lambda: metric(strict, "wmtp_requests_total", **ended) == before + 2)
        with pytest.raises(openai.BadRequestError, match="at most 2"):
            client.completions.create(model="tiny", prompt=["a", "b", "c"])
        assert client.completions.create(model="tiny", prompt="a", max_tokens=1).choices


def test_what_does_not_end_in_time_is_told_so_at_a_stop(llm: LLM, checkpoint: Path) -> None:
    with (
        running(llm, checkpoint, shutdown_timeout_s=0.0) as (address, server),
        openai.OpenAI(base_url=f"{address}/v1", api_key="any", max_retries=0) as client,
    ):
        stream = client.completions.create(model="tiny", prompt="a", max_tokens=LONG, stream=True)
        next(stream)
        server.should_exit = True
        with pytest.raises(openai.APIError, match="shutting down"):
            list(stream)
    wait_until(lambda: llm.usage().lanes_used == 0)
