"""What a request may ask for, and when it is greedy."""

from __future__ import annotations

from typing import Any

import pytest

from tllm_wmtp.errors import RequestError
from tllm_wmtp.sampling import SamplingParams

NAN, INF = float("nan"), float("inf")
BAD: dict[str, tuple[Any, ...]] = {
    "temperature": (-0.1, NAN, INF, True, "1", [1.0]),
    "top_k": (-1, 1.5, True, "3"),
    "top_p": (-0.1, 1.1, NAN, INF, True, "0.9"),
    "min_p": (-0.1, 1.1, NAN, INF, False, "0.1"),
    "repetition_penalty": (0, -1.0, 1000, NAN, INF, True, None),
    "presence_penalty": (2.1, -2.1, NAN, INF, True, None),
    "frequency_penalty": (2.1, -2.1, NAN, INF, True, None),
    "seed": (-1, 1 << 64, 1.0, True, "7"),
    "logprobs": (-1, 1.0, True, "5"),
}


@pytest.mark.parametrize(("name", "value"), [(n, v) for n, values in BAD.items() for v in values])
def test_a_bad_value_is_refused_by_name_with_a_remedy(name: str, value: Any) -> None:
    with pytest.raises(RequestError) as caught:
        SamplingParams(**{name: value})
    assert caught.value.value == f"{name} {value!r}"
    assert caught.value.rule
    assert caught.value.remedy


@pytest.mark.parametrize(
    "changes",
    [
        {"temperature": 0},
        {"temperature": 3},
        {"top_k": 0},
        {"top_k": 1_000_000},
        {"top_p": 0},
        {"top_p": 1},
        {"min_p": 0.0},
        {"min_p": 1.0},
        {"repetition_penalty": 1.15, "presence_penalty": -2, "frequency_penalty": 2.0},
        {"seed": 0},
        {"seed": (1 << 64) - 1},
        {"logprobs": 0},
    ],
)
def test_the_ends_of_every_range_are_allowed(changes: dict[str, Any]) -> None:
    params = SamplingParams(**changes)
    assert {name: getattr(params, name) for name in changes} == changes


@pytest.mark.parametrize(
    ("changes", "greedy"),
    [
        ({}, True),
        ({"temperature": None}, True),
        ({"temperature": 0}, True),
        ({"temperature": 0.0, "top_p": 0.9}, True),
        ({"temperature": 1e-6}, True),
        ({"temperature": 0.7}, False),
        ({"top_k": 40}, False),  # a filter alone asks for temperature 1, as in TensorRT-LLM
        ({"top_p": 0.9}, False),
        ({"min_p": 0.1}, False),
        ({"temperature": 1.0, "top_k": 1}, True),
        ({"temperature": 1.0, "top_p": 0.0}, True),
        ({"repetition_penalty": 1.2, "seed": 3, "logprobs": 2}, True),
    ],
)
def test_a_request_is_greedy_unless_it_asks_to_sample(
    changes: dict[str, Any], greedy: bool
) -> None:
    assert SamplingParams(**changes).greedy is greedy


def test_each_penalty_makes_a_request_depend_on_its_tokens() -> None:
    assert not SamplingParams(temperature=0.5, top_k=3).penalised
    for name, value in (
        ("repetition_penalty", 1.1),
        ("presence_penalty", 0.1),
        ("frequency_penalty", -0.1),
    ):
        assert SamplingParams(**{name: value}).penalised
