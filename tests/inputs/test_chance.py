"""Random choices that every platform makes alike."""

from __future__ import annotations

import hashlib
import random

import pytest

from tllm_wmtp.bench.inputs import words
from tllm_wmtp.bench.inputs.chance import Chance, Permutation
from tllm_wmtp.bench.inputs.generated import _zipf_weight


def test_a_stream_is_the_generator_seeded_with_the_hash_of_its_name() -> None:
    seed = int(hashlib.sha256(b"a/1/b").hexdigest(), 16)
    expected = random.Random(seed)
    stream = Chance("a", 1, "b")
    assert [stream.random() for _ in range(5)] == [expected.random() for _ in range(5)]


def test_first_numbers_are_those_written_down() -> None:
    stream = Chance("golden")
    assert [stream.below(1000) for _ in range(6)] == [785, 798, 635, 45, 373, 909]
    assert Chance("golden").shuffled("abcdefgh") == list("gafdchbe")
    order = Permutation(10, "golden")
    assert [order[index] for index in range(10)] == [1, 9, 5, 2, 7, 6, 3, 4, 8, 0]


def test_a_child_does_not_depend_on_what_was_drawn() -> None:
    fresh, used = Chance("a"), Chance("a")
    used.random()
    assert fresh.child("x").random() == used.child("x").random()
    assert fresh.child("x").random() != fresh.child("y").random()


@pytest.mark.parametrize("size", [1, 2, 3, 64, 100, 1023, 1025])
def test_a_permutation_meets_every_value_once(size: int) -> None:
    order = Permutation(size, "key")
    assert sorted(order[index] for index in range(size)) == list(range(size))
    if size > 63:
        assert [order[index] for index in range(size)] != list(range(size))


def test_a_large_permutation_repeats_nothing() -> None:
    order = Permutation(2**40, "key")
    assert len({order[index] for index in range(2000)}) == 2000


def test_a_permutation_has_bounds() -> None:
    with pytest.raises(IndexError):
        Permutation(5, "key")[5]
    with pytest.raises(ValueError, match="one item or more"):
        Permutation(0, "key")


def test_zipf_weights_are_powers_in_whole_numbers() -> None:
    assert _zipf_weight(1, 2.0) == 10**12
    assert _zipf_weight(2, 2.0) == 10**12 // 4
    assert _zipf_weight(4, 1.5) == 10**12 // 8
    # 3 ** -1.5 = 0.19245008972987525483...
    assert _zipf_weight(3, 1.5) == 192_450_089_729


def test_no_english_word_is_in_two_lists() -> None:
    lists = (
        words.ADJECTIVES, words.NOUNS, words.PEOPLE, words.VERBS, words.PLACES, words.TIMES,
        words.SHORT,
    )  # fmt: skip
    everything = [word for part in lists for word in part]
    assert len(everything) == len(set(everything))
    assert (len(words.ADJECTIVES), len(words.NOUNS)) == (64, 64)
