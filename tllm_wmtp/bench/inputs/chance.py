"""Random numbers that are the same on every platform and in every Python version.

Only ``random.Random(int).random()`` is called, whose sequence the language guarantees; seeds are
hashed with SHA-256.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Sequence
from typing import TypeVar

T = TypeVar("T")

_ROUNDS = 4


class Chance:
    """A stream of random choices, named by everything that it depends on."""

    def __init__(self, *name: object) -> None:
        self._name = "/".join(str(part) for part in name)
        digest = hashlib.sha256(self._name.encode()).digest()
        self.random = random.Random(int.from_bytes(digest, "big")).random

    def child(self, name: str) -> Chance:
        """An independent stream; how much was drawn from this one does not matter."""
        return Chance(self._name, name)

    def below(self, bound: int) -> int:
        """A uniform integer in 0..bound - 1."""
        return int(self.random() * bound)

    def pick(self, items: Sequence[T]) -> T:
        return items[int(self.random() * len(items))]

    def sample(self, items: Sequence[T], count: int) -> list[T]:
        """``count`` different items in random order (a partial Fisher-Yates shuffle)."""
        pool = list(items)
        for index in range(count):
            other = index + int(self.random() * (len(pool) - index))
            pool[index], pool[other] = pool[other], pool[index]
        return pool[:count]

    def shuffled(self, items: Sequence[T]) -> list[T]:
        return self.sample(items, len(items))

    def permutation(self, size: int) -> Permutation:
        return Permutation(size, f"{self._name}/permutation/{int(self.random() * 2**52)}")


class Permutation:
    """A random order of 0..size - 1 that is computed, not stored.

    A Feistel network of SHA-256 rounds over the next even number of bits; values beyond ``size``
    are sent through again, so every index meets a value of its own.
    """

    def __init__(self, size: int, key: str) -> None:
        if size < 1:
            raise ValueError(f"a permutation has one item or more, not {size}")
        self.size = size
        self._half = max(1, ((size - 1).bit_length() + 1) // 2)
        self._mask = (1 << self._half) - 1
        self._keys = [f"{key}/{number}/".encode() for number in range(_ROUNDS)]

    def __getitem__(self, index: int) -> int:
        if not 0 <= index < self.size:
            raise IndexError(f"{index} is not in 0..{self.size - 1}")
        value = index
        while True:
            left, right = value >> self._half, value & self._mask
            for key in self._keys:
                digest = hashlib.sha256(key + str(right).encode()).digest()
                left, right = right, left ^ (int.from_bytes(digest[:8], "big") & self._mask)
            value = left << self._half | right
            if value < self.size:
                return value
