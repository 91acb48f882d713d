"""Clients that send anything, take nothing, and leave at any moment."""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import random
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from openai_server import (
    CHAT,
    PATIENCE_S,
    get,
    metric,
    post,
    running,
    served_checkpoint,
    wait_until,
)
from starlette.responses import JSONResponse

from tllm_wmtp import LLM, MtpConfig
from tllm_wmtp.serving.openai import app, calls
from tllm_wmtp.serving.openai import server as server_module
from tllm_wmtp.serving.openai.errors import HttpError
from tllm_wmtp.serving.openai.server import Server

CLIENTS, AT_ONCE = 200, 8
#: Tokens of an answer that is longer than small socket buffers.
MANY = 160
#: Characters of an error: what it shows of a value, and its own words.
LONGEST_ERROR = 1000


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return served_checkpoint(tmp_path_factory.mktemp("hostile"), ascii_only=False)


@pytest.fixture(scope="module")
def llm(checkpoint: Path) -> Iterator[LLM]:
    speculation = MtpConfig(depth=4, window=8, n_sink=2)
    with LLM(checkpoint, speculation, max_seq_len=1024, max_batch_size=4) as llm:
        yield llm


@pytest.fixture(scope="module")
def serving(llm: LLM, checkpoint: Path) -> Iterator[tuple[str, Server]]:
    with running(llm, checkpoint) as both:
        yield both


@pytest.fixture(scope="module")
def address(serving: tuple[str, Server]) -> str:
    return serving[0]


@contextmanager
def connected(address: str, receive_bytes: int | None = None) -> Iterator[socket.socket]:
    host, port = address.removeprefix("http://").rsplit(":", 1)
    with socket.socket() as connection:
        if receive_bytes is not None:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
        connection.settimeout(PATIENCE_S)
        connection.connect((host, int(port)))
        yield connection


def request_of(path: str = "/v1/completions", **body: Any) -> bytes:
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data


def ended(address: str, *reasons: str) -> float:
    return sum(metric(address, "wmtp_requests_total", finish_reason=reason) for reason in reasons)


def nothing_is_held(address: str, server: Server, llm: LLM) -> bool:
    usage = llm.usage()
    return (
        (usage.running, usage.waiting, usage.lanes_used, usage.kv_pages_used) == (0, 0, 0, 0)
        and server._service._taken == 0
        and not server._service._batches
    )


# What they send.


def nested(depth: int) -> list[Any]:
    value: list[Any] = []
    for _ in range(depth):
        value = [value]
    return value


ODD: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 2**31, 2**63, 2**64, 10**400, -(10**400), 0.5, -0.0, 1e308,
    math.nan, math.inf, -math.inf, "", "x", "1", "\ud800", "\0", "x" * 100_000, [], {}, [[]],
    [None], [{}], [1, "a"], ["a"], [True], [math.nan], {"a": {}}, nested(400), [10**400],
    ["\ud800"], {"\ud800": 1}, [[1]], [["a"]], [[], []], [-1], [2**70], [1.5],
)  # fmt: skip
FIELDS = sorted({*calls.SAMPLING, *calls.ABSENT, *calls.OTHERS, "user", "\ud800"})
IN_A_MESSAGE = ("role", "content", "name", "tool_calls", "tool_call_id", "audio", "function_call")
MESSAGE = {"role": "user", "content": "a"}


def answers_or_refuses(read: Callable[[Any], calls.Call], body: dict[str, Any]) -> None:
    refused = None
    try:
        read(calls.read_object(json.dumps(body).encode()))
    except HttpError as error:
        refused = error
    if refused is not None:
        assert 400 <= refused.status < 500
        assert len(str(refused)) < LONGEST_ERROR
        JSONResponse(refused.body())  # has neither NaN nor half a surrogate pair


@pytest.mark.parametrize("field", FIELDS, ids=ascii)
def test_any_value_of_any_field_is_taken_or_refused_in_few_words(field: str) -> None:
    for value in ODD:
        body = {"prompt": "a", "messages": [MESSAGE], "stream": True, "logprobs": 1, field: value}
        answers_or_refuses(calls.read_completion, body)
        answers_or_refuses(calls.read_chat, body | {"logprobs": True, field: value})


def test_any_value_in_a_message_is_taken_or_refused_in_few_words() -> None:
    for place, value in itertools.product(IN_A_MESSAGE, ODD):
        answers_or_refuses(calls.read_chat, {"messages": [MESSAGE | {place: value}]})


NUMBERS = ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty")
BODIES: dict[str, bytes] = {
    **{f"{name} beyond any float": b'{"prompt": "a", "%s": 1%s}' % (name.encode(), b"0" * 400)
       for name in NUMBERS},
    "a number of more digits than Python reads": b'{"prompt": "a", "seed": 1%s}' % (b"0" * 5000),
    "not a number": b'{"prompt": "a", "temperature": NaN}',
    "infinity": b'{"prompt": "a", "top_p": 1e999}',
    "infinitely many": b'{"prompt": "a", "n": Infinity}',
    "a long wrong value": b'{"prompt": "a", "top_k": "%s"}' % (b"x" * 100_000),
    "a role that is half a surrogate pair": b'{"messages": [{"role": "\\ud800", "content": ""}]}',
    "a model that is half a surrogate pair": b'{"prompt": "a", "model": "\\ud800"}',
    "bytes of no encoding": b'{"prompt": "\xff\xfe"}',
    "two objects": b'{"prompt": "a"} {"prompt": "b"}',
    **{f"{depth} lists in one another":
           b'{"prompt": "a", "tools": %s}' % (b"[" * depth + b"]" * depth)
       for depth in (200, *range(900, 1000, 10), 5000, 100_000)},
}  # fmt: skip


def test_odd_json_is_refused_in_openais_form_and_costs_nothing(
    serving: tuple[str, Server], llm: LLM
) -> None:
    address, server = serving
    headers = {"Content-Type": "application/json"}
    with httpx.Client(base_url=address, headers=headers, timeout=PATIENCE_S) as client:
        for name, body in BODIES.items():
            path = "/v1/chat/completions" if b"messages" in body else "/v1/completions"
            refused = client.post(path, content=body)
            assert refused.status_code in (400, 404), name
            message = refused.json()["error"]["message"]
            assert len(message) < LONGEST_ERROR, name
            assert message.count("; ") >= 1, name
    wait_until(lambda: nothing_is_held(address, server, llm))


def test_what_openai_allows_and_is_seldom_sent_is_served(address: str) -> None:
    chats = (
        [{"role": "user", "content": ""}],
        [{"role": "tool", "tool_call_id": "1", "content": "12 degrees"}],
        [*CHAT, {"role": "assistant", "content": [{"type": "text", "text": ""}], "name": "x"}],
    )
    for messages in chats:
        answer = post(address, "chat/completions", messages=messages, max_tokens=1)
        assert answer.status_code == 200, answer.text
    nothing = {"best_of": 1, "logit_bias": {}, "tools": [], "suffix": None, "stop": None}
    assert post(address, prompt="\0", max_tokens=1, **nothing).status_code == 200


def test_a_body_that_stays_away_is_told_so_and_gives_its_place_back(
    serving: tuple[str, Server], llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    address, server = serving
    monkeypatch.setattr(app, "BODY_TIMEOUT_S", 0.2)
    with connected(address) as connection:
        connection.sendall(request_of(prompt="a")[:-5])
        answer = b""
        while not answer.endswith(b"}}"):
            answer += connection.recv(1 << 16)
        head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 408 ")
    error = json.loads(body)["error"]
    assert "a body that took more than" in error["message"]
    wait_until(lambda: nothing_is_held(address, server, llm))


# What they take.


def events(raw: bytes) -> list[dict[str, Any]]:
    """Chunks of a chunked HTTP response with server-sent events."""
    lines = raw.decode().splitlines()
    data = [line.removeprefix("data: ") for line in lines if line.startswith("data: {")]
    return [json.loads(line) for line in data]


@pytest.fixture
def small_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server whose unsent bytes do not disappear in the kernel."""
    bind = server_module.bind

    def bind_small(host: str, port: int) -> socket.socket:
        listener = bind(host, port)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 16384)
        return listener

    monkeypatch.setattr("openai_server.bind", bind_small)


@pytest.mark.usefixtures("small_buffers")
def test_a_slow_reader_keeps_its_place_and_gets_all(llm: LLM, checkpoint: Path) -> None:
    body = {"prompt": "a", "max_tokens": MANY, "temperature": 0, "ignore_eos": True, "logprobs": 20}
    with (
        running(llm, checkpoint, max_concurrent=1) as (address, server),
        connected(address, receive_bytes=4096) as connection,
    ):
        connection.sendall(request_of(**body, stream=True))
        # The engine has done its part, and gives it to others.
        wait_until(lambda: ended(address, "length") == 1)
        assert llm.usage().lanes_used == 0
        assert post(address, **body).status_code == 429
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 20)
        raw = b""
        while b"[DONE]" not in raw:
            raw += connection.recv(1000)
        streamed = "".join(event["choices"][0]["text"] for event in events(dechunked(raw)))
        wait_until(lambda: nothing_is_held(address, server, llm))
        assert streamed == post(address, **body).json()["choices"][0]["text"]


def dechunked(raw: bytes) -> bytes:
    """The body of a response in HTTP's chunks, of which the last may be missing."""
    rest, parts = raw.partition(b"\r\n\r\n")[2], []
    while rest:
        size, _, rest = rest.partition(b"\r\n")
        parts.append(rest[: int(size, 16)])
        rest = rest[int(size, 16) + 2 :]
    return b"".join(parts)


@pytest.mark.skipif(not hasattr(socket, "TCP_USER_TIMEOUT"), reason="only Linux ends them")
@pytest.mark.usefixtures("small_buffers")
@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_takes_nothing_is_ended(
    stream: bool, llm: LLM, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_module, "SEND_TIMEOUT_S", 0.5)
    body = {"prompt": "a", "max_tokens": MANY, "ignore_eos": True, "logprobs": 20}
    with (
        running(llm, checkpoint, max_concurrent=1) as (address, server),
        connected(address, receive_bytes=4096) as connection,
    ):
        connection.sendall(request_of(**body, stream=stream))
        wait_until(lambda: ended(address, "length", "abort") == 1)
        wait_until(lambda: nothing_is_held(address, server, llm))
        wait_until(lambda: not server.server_state.connections)


def test_two_hundred_clients_that_leave_at_any_moment_leave_nothing(
    serving: tuple[str, Server], llm: LLM
) -> None:
    address, server = serving
    turns, before = iter(range(CLIENTS)), ended(address, "abort")
    lock, broken = threading.Lock(), list[str]()

    def come_and_go() -> None:
        while True:
            with lock:
                turn = next(turns, None)
            if turn is None:
                return
            chance = random.Random(turn)
            chat = {"path": "/v1/chat/completions", "messages": CHAT}
            asked = chat if turn % 3 == 0 else {"prompt": ["x" * (1 + turn % 50)] * (1 + turn % 4)}
            sent = request_of(**asked, max_tokens=300, stream=turn % 2 == 0, n=1 + turn % 2)
            try:
                with connected(address) as connection:
                    whole = chance.random() < 0.7
                    connection.sendall(sent if whole else sent[: chance.randrange(len(sent))])
                    connection.settimeout(chance.choice((0.001, 0.01, 0.05)))
                    with contextlib.suppress(TimeoutError):
                        while whole and chance.random() < 0.7:
                            connection.recv(1 + chance.randrange(3000))
                    if chance.random() < 0.5:  # with a reset instead of a goodbye
                        linger = struct.pack("ii", 1, 0)
                        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
            except Exception as error:
                broken.append(repr(error))

    threads = [threading.Thread(target=come_and_go) for _ in range(AT_ONCE)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert broken == []
    wait_until(lambda: nothing_is_held(address, server, llm))
    assert ended(address, "abort") > before + CLIENTS / 10
    assert metric(address, "wmtp_requests_running") == 0
    assert ended(address, "error") == 0
    assert post(address, prompt="a", max_tokens=2).status_code == 200


def test_a_server_that_stops_refuses_what_is_new(serving: tuple[str, Server]) -> None:
    address, server = serving
    server._service.draining = True
    try:
        refused = post(address, prompt="a")
        assert (refused.status_code, get(f"{address}/health").status_code) == (503, 503)
        assert refused.json()["error"]["code"] == "shutting_down"
    finally:
        server._service.draining = False


# What they get.


def streamed(address: str, **body: Any) -> list[dict[str, Any]]:
    url = f"{address}/v1/completions"
    with httpx.stream("POST", url, json={**body, "stream": True}, timeout=PATIENCE_S) as answer:
        return events(answer.read())


def texts(chunks: list[dict[str, Any]], n: int = 1) -> list[str]:
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    return ["".join(c["text"] for c in choices if c["index"] == index) for index in range(n)]


def test_characters_of_several_tokens_are_never_cut(address: str) -> None:
    """The tokens are bytes, so that every other character takes several, and many are none."""
    several = 0
    for seed in range(3):
        body = {"prompt": "\N{SNOWMAN}\N{GRINNING FACE}", "max_tokens": 40, "seed": seed}
        whole = post(address, **body).json()["choices"][0]["text"]
        assert texts(streamed(address, **body)) == [whole]
        several += sum(ord(character) > 127 for character in whole)
    assert several > 5


def test_streams_of_several_completions_with_seeds_are_those_of_whole_answers(
    address: str,
) -> None:
    body = {"prompt": ["ab", "cde"], "n": 2, "max_tokens": 20, "seed": 5, "return_token_ids": True}
    whole = post(address, **body).json()
    chunks = streamed(address, **body, stream_options={"include_usage": True})
    assert texts(chunks, 4) == [choice["text"] for choice in whole["choices"]]
    assert chunks[-1]["usage"] == whole["usage"] | {
        "prompt_tokens_details": chunks[-1]["usage"]["prompt_tokens_details"]
    }
    made = sum(len(choice["token_ids"]) for choice in whole["choices"])
    assert (whole["usage"]["prompt_tokens"], whole["usage"]["completion_tokens"]) == (5, made)
    reasons = [choice["finish_reason"] for chunk in chunks for choice in chunk["choices"]]
    assert sum(reason is not None for reason in reasons) == 4


def test_a_stop_string_over_several_chunks_does_not_begin_to_show(address: str) -> None:
    body = {"prompt": "the old fox", "max_tokens": 60, "temperature": 0, "ignore_eos": True}
    pieces = [chunk["choices"][0]["text"] for chunk in streamed(address, **body)]
    whole = "".join(pieces)
    begin = len("".join(pieces[:3])) - 1
    stop = whole[begin : begin + len(pieces[3]) + 2]  # ends of the third and fifth around a fourth
    assert len(pieces[3]) > 0
    stopped = streamed(address, **body, stop=stop)
    assert texts(stopped) == [whole[: whole.index(stop)]]
    assert stopped[-1]["choices"][0]["finish_reason"] == "stop"


def test_it_can_be_reached_over_ipv6_alone(llm: LLM, checkpoint: Path) -> None:
    with socket.socket(socket.AF_INET6) as probe:
        try:
            probe.bind(("::1", 0))
        except OSError as error:
            pytest.skip(f"this machine has no IPv6 loopback ({error})")
    with running(llm, checkpoint, host="::1") as (address, _):
        assert address.startswith("http://[::1]:")
        assert post(address, prompt="a", max_tokens=2).status_code == 200
        port = int(address.rsplit(":", 1)[1])
        with pytest.raises(OSError, match="refused"):
            socket.create_connection(("127.0.0.1", port), PATIENCE_S)
