"""Scores worked out by hand."""

from __future__ import annotations

import pytest

from tllm_wmtp.bench.inputs import Prompt, score


def prompt(scoring: str, *answers: str) -> Prompt:
    return Prompt("task", [0], "text", answers, {}, scoring, 0)


@pytest.mark.parametrize(
    ("output", "expected"),
    [
        ("The codes are 1234567 and 7654321.", 1.0),
        ("1234567", 0.5),
        ("7654321, 7654321, 7654321", 0.5),
        ("91234567 and 76543210", 0.0),
        ("", 0.0),
    ],
)
def test_the_share_of_answers_found_as_words_of_their_own(output: str, expected: float) -> None:
    assert score(prompt("all", "1234567", "7654321"), output) == expected


def test_case_and_spaces_do_not_matter_but_the_order_of_words_does() -> None:
    two_words = prompt("all", "Lion pear")
    assert score(two_words, " amber =  lion\n PEAR ;") == 1.0
    assert score(two_words, "pear lion") == 0.0
    assert score(two_words, "sealion pear") == 0.0


def test_signs_in_answers_are_only_signs() -> None:
    assert score(prompt("all", "a.c", "ab-12"), "abc, ab-12") == 0.5


@pytest.mark.parametrize(
    ("output", "right"),
    [
        ("The correct answer is (B).", True),
        ("the correct answer is B", True),
        ("Thinking: (A) is false. The correct answer is: **B**", True),
        ("(B) because of the second chapter", True),
        ("B", True),
        ("B.", True),
        ("The correct answer is (A), not (B).", False),
        ("Before we begin, ...", False),
        ("A long text about B", False),
        ("", False),
    ],
)
def test_the_letter_that_is_stated_counts(output: str, right: bool) -> None:
    assert score(prompt("letter", "B"), output) == float(right)


@pytest.mark.parametrize(
    ("target", "output", "right"),
    [
        ("kitchen", " The apple is in the Kitchen. Then it was in the garden.", True),
        ("kitchen", "garden. kitchen", False),
        ("kitchen", "kitchenette", False),
        ("apple,milk", "He carries the milk and the apple", True),
        ("apple,milk", "apple", False),
        ("2", "\n2\n", True),
    ],
)
def test_a_target_stands_in_the_first_sentence(target: str, output: str, right: bool) -> None:
    assert score(prompt("target", target), output) == float(right)


def test_a_continuation_counts_until_its_first_difference() -> None:
    expected = prompt("continuation", "fox dog cat owl")
    assert score(expected, " fox dog cat owl king") == 1.0
    assert score(expected, " fox dog owl cat") == 0.5
    assert score(expected, " dog cat owl") == 0.0
    assert score(expected, "") == 0.0


def test_a_task_without_answers_has_no_score() -> None:
    assert score(prompt("none"), "anything") is None
