"""The ring against a dict of positions, over random accept and reject traces."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tllm_wmtp.ring import RingSpec


class Simulation:
    """One lane of values, and the oracle: a dict from position to the value last written there."""

    def __init__(self, spec: RingSpec) -> None:
        self.spec = spec
        self.slots: list[object] = [None] * spec.capacity
        self.oracle: dict[int, object] = {}
        self.length = 0
        self.version = 0

    def append(self, start: int, n_rows: int) -> None:
        """Write rows as one launch does; a new version tells a rewritten position from the old."""
        self.version += 1
        written: set[int] = set()
        for position in range(start, start + n_rows):
            self.oracle[position] = (position, self.version)
        for position in self.spec.surviving_positions(start, n_rows):
            slot = self.spec.slot(position)
            assert slot not in written, f"slot {slot} written twice by one launch"
            written.add(slot)
            self.slots[slot] = self.oracle[position]

    def rollback(self, length: int) -> None:
        self.length = length
        for position in [p for p in self.oracle if p >= length]:
            del self.oracle[position]

    def visible(self, query: int) -> list[int]:
        """By the definition, not by the code."""
        sinks = {p for p in range(self.spec.n_sink) if p <= query}
        window = {p for p in range(query - self.spec.window + 1, query + 1) if p >= 0}
        return sorted(sinks | window)

    def check_query(self, query: int, own_key_written: bool = True) -> None:
        for position in self.visible(query):
            if position == query and not own_key_written:
                continue
            held = self.slots[self.spec.slot(position)]
            assert held == self.oracle[position], f"query {query} lost position {position}"

    def prefill(self, n_rows: int, chunk: int) -> None:
        for start in range(0, n_rows, chunk):
            count = min(chunk, n_rows - start)
            self.append(start, count)
            self.check_query(start + count - 1)
        self.length = n_rows

    def step(self, depth: int, width: int, accepted: int, as_one_launch: bool) -> None:
        """Write ``depth * width`` rows that may be rejected, keep ``accepted + 1`` positions."""
        start = self.length
        n_rows = depth * width
        if as_one_launch:
            self.append(start, n_rows)
        else:
            for i in range(n_rows):
                self.append(start + i, 1)
        for query in range(start, start + n_rows):
            self.check_query(query)
        if width > 1:
            # The kept branch of a tree is not contiguous: it is appended again, in order.
            self.rollback(start)
            self.check_query(start, own_key_written=False)
            self.append(start, accepted + 1)
        self.rollback(start + accepted + 1)
        self.check_query(self.length - 1)
        self.check_query(self.length, own_key_written=False)


specs = st.builds(
    lambda n_sink, window, gamma, width: (n_sink, window, gamma, width),
    st.integers(0, 9),
    st.integers(1, 40),
    st.integers(1, 15),
    st.integers(1, 3),
)


@settings(max_examples=150, deadline=None)
@given(
    specs,
    st.integers(0, 150),
    st.integers(1, 200),
    st.lists(st.tuples(st.integers(0, 15), st.booleans()), max_size=12),
)
def test_no_continuation_loses_a_visible_key(
    shape: tuple[int, int, int, int], prompt: int, chunk: int, steps: list[tuple[int, bool]]
) -> None:
    n_sink, window, gamma, width = shape
    depth = gamma + 1
    simulation = Simulation(RingSpec.for_chain(n_sink, window, depth, width))
    simulation.prefill(prompt, chunk)
    for accepted, as_one_launch in steps:
        simulation.step(depth, width, min(accepted, gamma), as_one_launch)


@pytest.mark.parametrize("gamma", range(1, 16))
def test_every_accept_count_at_every_wrap(gamma: int) -> None:
    depth = gamma + 1
    for n_sink, window in ((0, 1), (0, 5), (4, 8), (3, 1)):
        spec = RingSpec.for_chain(n_sink, window, depth)
        for prompt in range(2 * spec.capacity + 2):
            for accepted in range(gamma + 1):
                simulation = Simulation(spec)
                simulation.prefill(prompt, 7)
                simulation.step(depth, 1, accepted, as_one_launch=True)


@pytest.mark.parametrize("depth", range(2, 17))
def test_one_spare_slot_less_than_the_step_needs_loses_a_key(depth: int) -> None:
    """depth - 1 spare slots are the least that work: the property above can fail."""
    n_sink, window = 2, 6
    prompt = n_sink + window + depth
    tight = Simulation(RingSpec(n_sink, window, depth - 1))
    tight.prefill(prompt, prompt)
    tight.step(depth, 1, 0, as_one_launch=True)
    short = Simulation(RingSpec(n_sink, window, depth - 2))
    short.prefill(prompt, prompt)
    with pytest.raises(AssertionError, match="lost position"):
        short.step(depth, 1, 0, as_one_launch=True)


@settings(max_examples=200, deadline=None)
@given(specs, st.integers(0, 400))
def test_visible_positions_follow_the_definition(
    shape: tuple[int, int, int, int], query: int
) -> None:
    n_sink, window, gamma, width = shape
    spec = RingSpec.for_chain(n_sink, window, gamma + 1, width)
    expected = Simulation(spec).visible(query)
    assert spec.visible_positions(query) == expected
    segments = spec.visible_segments(query)
    assert len(segments) <= 3
    spelled = [(position + i, slot + i) for position, slot, count in segments for i in range(count)]
    assert [position for position, _ in spelled] == expected
    assert all(spec.slot(position) == slot for position, slot in spelled)
    if query < n_sink + window:
        assert len(segments) == 1


@settings(max_examples=200, deadline=None)
@given(specs, st.integers(0, 300), st.integers(0, 300))
def test_survivors_are_sinks_and_the_last_that_fit(
    shape: tuple[int, int, int, int], start: int, n_rows: int
) -> None:
    n_sink, window, gamma, width = shape
    spec = RingSpec.for_chain(n_sink, window, gamma + 1, width)
    end = start + n_rows
    expected = [p for p in range(start, end) if p < n_sink or p >= end - (spec.capacity - n_sink)]
    assert spec.surviving_positions(start, n_rows) == expected
