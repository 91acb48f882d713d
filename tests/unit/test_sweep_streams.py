"""What the pieces of streams say, by hand."""

from __future__ import annotations

import json

import pytest

from tllm_wmtp.bench.sweep.openai_client import events
from tllm_wmtp.bench.sweep.streams import Piece, Stream, iterations
from tllm_wmtp.errors import RequestError


def stream(*pieces: tuple[float, int], **changes: object) -> Stream:
    options = {"sent": 1.0, "prompt_tokens": 50, "text": "", **changes}
    return Stream(pieces=[Piece(*each) for each in pieces], **options)  # type: ignore[arg-type]


LONE = stream((3.0, 1), (3.5, 4), (4.0, 2), (4.5, 1), token_ids=tuple(range(8)))


def test_steps_are_the_pieces_between_the_first_and_the_last() -> None:
    answer = LONE.answer()
    assert (answer.steps, answer.step_tokens, answer.output_tokens) == (2, 6, 8)
    assert answer.ttft_s == 2.0
    short = stream((3.0, 1), (3.5, 4), token_ids=(0,) * 5).answer()
    assert (short.steps, short.step_tokens) == (1, 4)  # the only one there is
    first = stream((3.0, 1), token_ids=(0,)).answer()
    assert (first.steps, first.step_tokens, first.output_tokens) == (0, 0, 1)
    nothing = stream().answer()
    assert (nothing.steps, nothing.ttft_s) == (0, None)


def test_a_server_knows_better_how_many_tokens_a_text_had() -> None:
    counted = stream((3.0, 2), (3.5, 9), (4.0, 9), output_tokens=9).answer()
    assert (counted.output_tokens, counted.steps, counted.step_tokens) == (9, 2, 8)
    with_ids = stream((3.0, 1), (3.5, 4), token_ids=(0,) * 5, output_tokens=7).answer()
    assert with_ids.output_tokens == 5


def test_a_servers_histogram_is_taken_over_the_pieces() -> None:
    answer = stream((3.0, 1), (4.0, 7), histogram=(1, 0, 2), token_ids=(0,) * 8).answer()
    assert (answer.steps, answer.step_tokens, answer.histogram) == (3, 7, (1, 0, 2))


def test_a_prompt_that_the_server_had_has_no_time_to_the_first_token() -> None:
    assert stream((3.0, 1), cached_tokens=0).answer().ttft_s == 2.0
    assert stream((3.0, 1), cached_tokens=48).answer().ttft_s is None


def test_a_gap_is_a_step_of_all_streams_under_way() -> None:
    other = stream((3.25, 1), (3.75, 3), (4.25, 3))
    found = iterations([LONE, other])
    assert [(each.seconds, each.requests) for each in found] == [
        (0.5, 2), (0.5, 2), (0.5, 1),  # the last piece of the first stream comes after the second
        (0.5, 2), (0.5, 2),
    ]  # fmt: skip
    assert [each.t_iter_s for each in found[:3]] == [0.25, 0.25, 0.5]
    assert iterations([stream()]) == []


# Server-sent events.


def test_events_end_with_done() -> None:
    lines = [": comment", "", 'data: {"a": 1}', "", 'data:{"b": 2}', "data: [DONE]", "data: {"]
    assert list(events(iter(lines))) == [{"a": 1}, {"b": 2}]


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        (['data: {"a": 1}'], "without .DONE."),
        (["data: {"], "an event is a JSON object"),
        (["data: 3"], "an event is a JSON object"),
        (["data: " + json.dumps({"error": {"message": "out of pages"}})], "out of pages"),
    ],
)
def test_a_stream_that_breaks_off_is_an_error(lines: list[str], words: str) -> None:
    with pytest.raises(RequestError, match=words):
        list(events(iter(lines)))
