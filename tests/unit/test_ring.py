"""RingSpec and LanePool: values, and errors that name value, rule and remedy."""

from __future__ import annotations

import dataclasses

import pytest

from tllm_wmtp.ring import LanePool, RingSpec


def test_capacity_is_sinks_and_window_and_spare() -> None:
    assert RingSpec(4, 128, 7).capacity == 139
    assert RingSpec.for_chain(4, 128, depth=7).spare == 7
    assert RingSpec.for_chain(4, 128, depth=7, width=3).spare == 21


def test_sinks_keep_their_slots_and_the_rest_go_round() -> None:
    spec = RingSpec(2, 3, 1)
    assert [spec.slot(p) for p in range(10)] == [0, 1, 2, 3, 4, 5, 2, 3, 4, 5]


def test_spec_is_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        RingSpec(1, 2, 3).window = 5  # type: ignore[misc]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ((-1, 4, 2), "n_sink -1 < 0.*pass 0"),
        ((0, 0, 2), "window 0 < 1.*raise window"),
        ((0, 4, -2), "spare -2 < 0.*pass the draft depth"),
    ],
)
def test_bad_spec_names_value_rule_remedy(values: tuple[int, int, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        RingSpec(*values)


def test_depth_below_two_is_refused() -> None:
    with pytest.raises(ValueError, match="depth 1 < 2.*raise depth"):
        RingSpec.for_chain(0, 8, depth=1)


def test_negative_positions_are_refused() -> None:
    spec = RingSpec(0, 4, 2)
    for call in (spec.slot, spec.visible_positions, spec.visible_segments):
        with pytest.raises(ValueError, match="-1 < 0"):
            call(-1)


def test_lanes_are_handed_out_lowest_first_and_reused() -> None:
    pool = LanePool(2)
    first, second = pool.acquire(), pool.acquire()
    assert (first.index, second.index) == (0, 1)
    assert not pool.can_acquire()
    with pytest.raises(RuntimeError, match="all 2 lanes are owned.*release"):
        pool.acquire()
    pool.release(first)
    assert pool.n_free == 1
    assert pool.acquire().index == 0


def test_rollback_only_shortens_and_extend_only_lengthens() -> None:
    pool = LanePool(1)
    lane = pool.acquire()
    pool.extend(lane, 10)
    pool.rollback(lane, 7)
    assert pool.length(lane) == 7
    with pytest.raises(ValueError, match="rollback to length 8.*use extend"):
        pool.rollback(lane, 8)
    with pytest.raises(ValueError, match="extend by -1.*use rollback"):
        pool.extend(lane, -1)


def test_a_stale_handle_is_refused_and_a_new_lane_starts_empty() -> None:
    pool = LanePool(1)
    stale = pool.acquire()
    pool.extend(stale, 5)
    pool.release(stale)
    fresh = pool.acquire()
    assert fresh.index == stale.index
    assert pool.length(fresh) == 0
    for call in (
        lambda: pool.length(stale),
        lambda: pool.extend(stale, 1),
        lambda: pool.rollback(stale, 0),
        lambda: pool.release(stale),
    ):
        with pytest.raises(ValueError, match="stale.*acquire a new handle"):
            call()


def test_a_pool_without_lanes_is_refused() -> None:
    with pytest.raises(ValueError, match="n_lanes 0 < 1.*raise n_lanes"):
        LanePool(0)
