"""What clients of a real Triton server get."""

from __future__ import annotations

import http.client
import json
import threading
import time
from typing import Any

import numpy as np
import pytest
from listening_sockets import listening_addresses, only_loopback
from triton_server import DEPTH, LANES, MAX_SEQ_LEN, N_SINK, QUEUE, WINDOW, Reply, Server

from tllm_wmtp import LLM, SamplingParams
from tllm_wmtp.serving.measures import GAUGES

LONG = {"max_tokens": 4000, "ignore_eos": True, "stream": True}


def text(length: int, seed: int) -> str:
    letters = np.random.default_rng(seed).integers(97, 123, length)
    return bytes(letters.astype(np.uint8)).decode()


def test_sixteen_concurrent_streams_equal_offline_outputs(server: Server, llm: LLM) -> None:
    prompts = [text(20 + 17 * i, seed=i) for i in range(LANES)]
    options: list[dict[str, Any]] = [
        {"max_tokens": 48, "ignore_eos": True}
        | ({"temperature": 0.8, "top_p": 0.95, "seed": i} if i % 2 else {})
        for i in range(LANES)
    ]
    replies = [Reply()] * LANES
    start = threading.Barrier(LANES)

    def ask(i: int) -> None:
        start.wait()
        replies[i] = server.ask(prompts[i], stream=True, **options[i])

    threads = [threading.Thread(target=ask, args=(i,)) for i in range(LANES)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    expected = llm.generate(prompts, [SamplingParams(**o) for o in options])
    for reply, output in zip(replies, expected, strict=True):
        assert reply.error is None
        assert reply.token_ids == output.outputs[0].token_ids
        assert reply.text == output.outputs[0].text
        assert len(reply.responses) > 5
        assert [r["finish_reason"].item() for r in reply.responses[-1:]] == [b"length"]
        assert all("finish_reason" not in r for r in reply.responses[:-1])
    spans = [(reply.times[0], reply.times[-1]) for reply in replies]
    together = [sum(a <= begin <= b for a, b in spans) for begin, _ in spans]
    assert max(together) > LANES // 2, "one request at a time"


def test_without_stream_one_response_has_all_of_it(server: Server, llm: LLM) -> None:
    prompt = text(30, seed=90)
    expected = llm.generate(prompt, SamplingParams(max_tokens=40, ignore_eos=True))
    reply = server.ask(prompt, max_tokens=40, ignore_eos=True, return_metrics=True)
    (response,) = reply.responses
    assert reply.text == expected.outputs[0].text
    assert expected.metrics is not None
    assert response["accepted_histogram"][0].tolist() == expected.metrics.accepted_histogram
    assert response["acceptance_length"] == pytest.approx(expected.metrics.acceptance_length)
    assert (response["prompt_tokens"], response["output_tokens"]) == (30, 40)
    assert response["ttft_ms"] > 0
    assert response["tpot_ms"] > 0


def test_what_has_no_value_is_left_out(server: Server) -> None:
    (response,) = server.ask("a", max_tokens=1, return_metrics=True).responses
    assert {"ttft_ms", "accepted_histogram", "finish_reason"} <= response.keys()
    assert not {"acceptance_length", "tpot_ms", "output_log_probs"} & response.keys()


def test_log_probs_and_stop_words_are_those_of_the_engine(server: Server, llm: LLM) -> None:
    prompt = text(25, seed=91)
    whole = llm.generate(prompt, SamplingParams(max_tokens=40, ignore_eos=True, logprobs=0))
    completion = whole.outputs[0]
    assert completion.logprobs is not None
    stop = completion.text[8:11]
    reply = server.ask(
        prompt, max_tokens=40, ignore_eos=True, stream=True, stop_words=["", stop],
        return_log_probs=True,
    )  # fmt: skip
    assert reply.text == completion.text[: completion.text.index(stop)]
    assert reply.responses[-1]["finish_reason"].item() == b"stop"
    got = np.concatenate([r["output_log_probs"][0] for r in reply.responses])
    count = len(reply.token_ids)
    made = zip(completion.token_ids[:count], completion.logprobs[:count], strict=True)
    np.testing.assert_allclose(got, [entry[i].logprob for i, entry in made], atol=1e-4)
    assert reply.responses[-1]["cum_log_probs"] == pytest.approx(got.sum(), rel=1e-4)


def test_http_answers_at_once_and_as_events(server: Server, llm: LLM) -> None:
    prompt = text(12, seed=92)
    expected = llm.generate(prompt, SamplingParams(max_tokens=20, ignore_eos=True))
    body = {"text_input": prompt, "max_tokens": 20, "ignore_eos": True}
    status, answer = server.post("/v2/models/wmtp/generate", body)
    assert status == 200, answer
    assert json.loads(answer)["text_output"] == expected.outputs[0].text
    _, answer = server.post("/v2/models/wmtp/generate_stream", body | {"stream": True})
    events = [json.loads(line[6:]) for line in answer.splitlines() if line.startswith("data: ")]
    assert len(events) > 2
    assert "".join(event["text_output"] for event in events) == expected.outputs[0].text


def test_a_client_that_disconnects_gives_its_lane_back(server: Server) -> None:
    aborted = server.metrics("wmtp_requests_total")["abort"]
    made = server.metrics("wmtp_output_tokens_total").get("", 0)
    with server.stream("endless", **LONG) as stream:
        for _ in range(3):
            stream.next()
        server.metric_becomes("wmtp_lanes_used", lambda lanes: lanes == 1)
    server.metric_becomes("wmtp_lanes_used", lambda lanes: lanes == 0)
    server.metric_becomes("wmtp_requests_total", lambda n: n == aborted + 1, "abort")
    assert server.metrics("wmtp_kv_pages_used")[""] == 0
    assert server.metrics("wmtp_output_tokens_total")[""] - made < LONG["max_tokens"]


def test_more_requests_than_may_wait_are_refused_and_waiting_ones_can_leave(server: Server) -> None:
    replies: list[Reply] = []
    leave = threading.Event()
    refused = threading.Semaphore(0)

    def ask() -> None:
        with server.stream("busy", **LONG) as stream:
            stream.next()
            if stream.reply.error is not None:
                replies.append(stream.reply)
                refused.release()
                return
            leave.wait()

    def wait_in_line() -> None:
        with server.stream("in line", **LONG):
            leave.wait()

    threads = [threading.Thread(target=ask) for _ in range(LANES)]
    for thread in threads:
        thread.start()
    server.metric_becomes("wmtp_requests_running", lambda n: n == LANES)
    in_line = [threading.Thread(target=wait_in_line) for _ in range(QUEUE)]
    for thread in in_line:
        thread.start()
    server.metric_becomes("wmtp_requests_waiting", lambda n: n == QUEUE)
    late = server.ask("late", max_tokens=1)
    leave.set()
    for thread in (*threads, *in_line):
        thread.join()
    assert replies == []
    assert f"{LANES + QUEUE} may run and wait" in str(late.error)
    assert "send it again later" in str(late.error)
    server.metric_becomes("wmtp_requests_waiting", lambda n: n == 0)
    server.metric_becomes("wmtp_lanes_used", lambda n: n == 0)


@pytest.mark.parametrize(
    ("prompt", "options", "parts"),
    [
        ("", {}, ("an empty prompt", "at least one token", "add one")),
        (b"\xff\xfe", {}, ("text_input", "must be UTF-8", "encode it")),
        ("a", {"max_tokens": 0}, ("max_tokens 0", "at least one token", "1 or more")),
        ("a", {"temperature": -0.5}, ("temperature -0.5", "0 or more", "use 0")),
        ("a", {"temperature": float("nan")}, ("temperature nan", "finite", "use 0")),
        ("a", {"top_p": 1.5}, ("top_p 1.5", "from 0 to 1", "correct it")),
        ("a", {"repetition_penalty": 0.0}, ("repetition_penalty 0.0", "factor", "use 1")),
        ("a", {"stop_token_ids": [-1]}, ("stop_token_ids (-1,)", "0 or more", "correct it")),
        ("a", {"seed": 1, "random_seed": 2}, ("seed 1", "one thing", "leave random_seed out")),
        ("a", {"depth": 7}, ("depth 7", f"is {DEPTH}", "leave it out")),
        ("a", {"speculation": "native"}, ("'native'", "is windowed", "--arm")),
        ("x" * MAX_SEQ_LEN, {}, (f"{MAX_SEQ_LEN} tokens", "max_seq_len is", "shorten")),
        ("x" * (2 << 20), {}, ("2097152 bytes", "at most 1048576", "max_prompt_bytes")),
    ],
    ids=lambda case: str(case)[:24] if isinstance(case, dict) else None,
)
def test_a_bad_request_gets_value_rule_and_remedy(
    server: Server, prompt: str, options: dict[str, Any], parts: tuple[str, ...]
) -> None:
    error = server.ask(prompt, **options).error
    assert error is not None
    for part in parts:
        assert part in error
    assert server.ask("still there", max_tokens=2).error is None


def test_speculation_that_is_the_instances_own_is_accepted(server: Server) -> None:
    own = {"speculation": "windowed", "depth": DEPTH, "window": WINDOW, "n_sink": N_SINK}
    assert server.ask("a", max_tokens=3, **own).error is None


def test_tensors_of_the_wrong_form_are_refused_by_the_server_itself(server: Server) -> None:
    assert "shape" in str(server.ask("a", max_tokens=[1, 2]).error)
    status, answer = server.post("/v2/models/wmtp/generate", {"max_tokens": 3})
    assert status == 400
    assert "an empty prompt" in answer


def test_the_start_command_listens_on_loopback_alone(server: Server) -> None:
    addresses = listening_addresses(server.processes())
    assert {port for _, port in addresses} >= {
        server.http_port, server.grpc_port, server.metrics_port,
    }  # fmt: skip
    assert only_loopback(addresses), addresses


def test_a_slip_in_an_options_name_is_no_silent_default(server: Server) -> None:
    status, answer = server.post("/v2/models/wmtp/generate", {"text_input": "a", "max_tokns": 3})
    assert status == 400
    for part in ("'max_tokns'", "no input of that name", "max_tokens"):
        assert part in answer


def test_health_and_metadata(server: Server) -> None:
    for path in ("/v2/health/live", "/v2/health/ready", "/v2/models/wmtp/ready"):
        assert server.get(path)[0] == 200
    config = json.loads(server.get("/v2/models/wmtp/config")[1])
    assert config["model_transaction_policy"]["decoupled"]
    assert config["parameters"]["depth"]["string_value"] == str(DEPTH)


def test_metrics_count_what_was_served(server: Server) -> None:
    before = server.metrics("wmtp_steps_total")
    ended = server.metrics("wmtp_requests_total")["length"]
    reply = server.ask(text(9, 5), max_tokens=30, ignore_eos=True, return_metrics=True)
    histogram = reply.responses[-1]["accepted_histogram"][0].tolist()
    server.metric_becomes("wmtp_requests_total", lambda n: n == ended + 1, "length")
    after = server.metrics("wmtp_steps_total")
    assert [after[str(n)] - before.get(str(n), 0) for n in range(DEPTH)] == histogram
    time.sleep(1.2)  # gauges are renewed every second
    shown = server.get("/metrics", server.metrics_port)[1]
    for name in (*GAUGES, 'wmtp_conditional_acceptance{model="wmtp",position="1"'):
        assert f"\n{name}" in shown
    assert 1 <= server.metrics("wmtp_acceptance_length")[""] <= DEPTH


def test_an_http_client_that_hangs_up_gives_its_lane_back(server: Server) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", server.http_port, timeout=30)
    body = json.dumps({"text_input": "endless", **LONG})
    connection.request("POST", "/v2/models/wmtp/generate_stream", body)
    answer = connection.getresponse()
    assert answer.read(20)
    answer.close()
    connection.close()
    server.metric_becomes("wmtp_lanes_used", lambda lanes: lanes == 0)
