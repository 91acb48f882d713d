"""Clients of a Triton server that send anything, take nothing, and leave at any moment."""

from __future__ import annotations

import contextlib
import json
import random
import signal
import socket
import struct
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import triton_server
from triton_server import Server

from tllm_wmtp import LLM, SamplingParams
from tllm_wmtp.serving.triton.repository import write_python_repository
from tllm_wmtp.serving.triton.settings import InstanceSettings

CLIENTS, AT_ONCE = 200, 8
PATIENCE_S = 60.0
#: Tokens of a stream that is under way when its server is told to stop.
LONG = 600

BODIES: dict[str, bytes] = {
    "nothing": b"",
    "no JSON": b"{",
    "no object": b"[1]",
    "no prompt": b'{"max_tokens": 2}',
    "a number as the prompt": b'{"text_input": 3}',
    "an object as the prompt": b'{"text_input": {"a": 1}}',
    "several prompts": b'{"text_input": ["a", "b"]}',
    "an empty prompt": b'{"text_input": ""}',
    "text as a number": b'{"text_input": "a", "max_tokens": "2"}',
    # Triton cuts it down to 32 bits, here to a negative number.
    "a number beyond its type": b'{"text_input": "a", "max_tokens": 2147483648}',
    "a number of many digits": b'{"text_input": "a", "seed": 1%s}' % (b"0" * 400),
    "a fraction as a whole": b'{"text_input": "a", "top_k": 0.5}',
    "not a number": b'{"text_input": "a", "temperature": NaN}',
    "a number as a boolean": b'{"text_input": "a", "stream": 7}',
    "lists in one another": b'{"text_input": "a", "stop_words": %s}' % (b"[" * 200 + b"]" * 200),
    "an unknown option": b'{"text_input": "a", "best_of": 3}',
    "a negative stop id": b'{"text_input": "a", "stop_token_ids": [-1]}',
    "bytes of no encoding": b'{"text_input": "\xff\xfe"}',
}  # fmt: skip


def nothing_is_held(server: Server) -> None:
    for name in ("wmtp_requests_running", "wmtp_requests_waiting", "wmtp_lanes_used"):
        server.metric_becomes(name, lambda held: held == 0)
    server.metric_becomes("wmtp_kv_pages_used", lambda pages: pages == 0)


def test_odd_json_is_refused_and_the_process_lives_on(server: Server) -> None:
    before = server.processes()
    for name, body in BODIES.items():
        status, answer = server._request("/v2/models/wmtp/generate", body, None)
        assert 400 <= status < 600, (name, answer)
        assert len(json.loads(answer)["error"]) < 2000, name
    assert server.processes() == before
    assert server.ask("still there", max_tokens=2).error is None
    nothing_is_held(server)


@contextlib.contextmanager
def asking(server: Server, sent: bytes) -> Iterator[socket.socket]:
    with socket.create_connection(("127.0.0.1", server.http_port), PATIENCE_S) as connection:
        connection.sendall(sent)
        yield connection


def request_of(path: str, **body: Any) -> bytes:
    data = json.dumps(body).encode()
    head = f"POST /v2/models/wmtp/{path} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(data)}"
    return f"{head}\r\n\r\n".encode() + data


def test_two_hundred_clients_that_leave_at_any_moment_leave_nothing(server: Server) -> None:
    before = server.processes()
    turns, lock, broken = iter(range(CLIENTS)), threading.Lock(), list[str]()

    def come_and_go() -> None:
        while True:
            with lock:
                turn = next(turns, None)
            if turn is None:
                return
            chance = random.Random(turn)
            options = {"max_tokens": 100, "ignore_eos": True, "stream": turn % 2 == 0}
            sent = request_of(
                "generate_stream" if turn % 2 == 0 else "generate",
                text_input="x" * (1 + turn % 50),
                **options,
            )
            try:
                if turn % 10 == 0:  # the same over gRPC, whose clients take longer to make
                    with server.stream("x", **options) as stream:
                        for _ in range(chance.randrange(3)):
                            if not stream.finished:
                                stream.next()
                    continue
                whole = chance.random() < 0.8
                part = sent if whole else sent[: chance.randrange(len(sent))]
                with asking(server, part) as connection:
                    connection.settimeout(chance.choice((0.001, 0.01, 0.1)))
                    with contextlib.suppress(TimeoutError):
                        while chance.random() < 0.8 and connection.recv(1 + chance.randrange(2000)):
                            pass
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
    nothing_is_held(server)
    assert server.processes() == before
    assert server.ask("still there", max_tokens=2).error is None


def test_a_client_that_takes_nothing_holds_no_lane_beyond_its_end(server: Server) -> None:
    ended = server.metrics("wmtp_requests_total")["length"]
    sent = request_of(
        "generate_stream", text_input="a", max_tokens=300, ignore_eos=True, stream=True,
        return_log_probs=True,
    )  # fmt: skip
    with asking(server, sent) as connection:
        server.metric_becomes("wmtp_requests_total", lambda n: n == ended + 1, "length")
        nothing_is_held(server)
        assert server.ask("a neighbour", max_tokens=2).error is None
        connection.settimeout(PATIENCE_S)
        raw = b""
        while b'"finish_reason":"length"' not in raw:
            raw += connection.recv(1 << 16)


@pytest.mark.slow
def test_two_models_of_one_server_answer_by_name_and_finish_when_told_to_stop(
    settings: InstanceSettings, tmp_path: Path, llm: LLM
) -> None:
    reason = triton_server.reason_to_skip()
    if reason is not None:
        pytest.skip(reason)
    repository = tmp_path / "repository"
    write_python_repository(repository, "first", settings)
    dense = InstanceSettings(settings.model, "dense", max_batch_size=2, max_seq_len=1024)
    write_python_repository(repository, "second", dense)
    expected = llm.generate("the old fox", SamplingParams(max_tokens=LONG, ignore_eos=True))
    long = {"max_tokens": LONG, "ignore_eos": True, "stream": True}
    server = Server(repository, tmp_path / "log.txt")
    try:
        with (
            server.stream("the old fox", model="first", **long) as first,
            server.stream("the old fox", model="second", **long) as second,
        ):
            first.next()
            second.next()
            assert (first.reply.error, second.reply.error) == (None, None)
            server.process.send_signal(signal.SIGTERM)
            assert first.rest().text == second.rest().text == expected.outputs[0].text
    finally:
        code = server.close()
    assert code == 0
