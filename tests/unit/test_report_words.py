"""Numbers as text, and what else the report computes by itself."""

from __future__ import annotations

import pytest
import report_results as made

from tllm_wmtp.bench.report import paper, words
from tllm_wmtp.bench.report.plot import spread
from tllm_wmtp.bench.report.records import record
from tllm_wmtp.bench.report.runs import Case, Point, label, operating_points, overlap, points_text
from tllm_wmtp.bench.report.schema import RunRow


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "\u2013"), (0, "0"), (4.3567, "4.36"), (71.04, "71.0"), (301.78, "302"),
        (1040.2, "1,040"), (0.03165, "0.0316"), (-2.5, "\u22122.50"), (12345.6, "12,346"),
    ],
)  # fmt: skip
def test_numbers_have_three_digits_and_no_exponent(value: float | None, text: str) -> None:
    assert words.number(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (4032, "4,032"), (4096, "4K"), (65536, "64K"), (1_040_000, "1.04M"), (1 << 20, "1M"),
        (261_000, "261k"), (300, "300"),
    ],
)  # fmt: skip
def test_tokens_are_said_in_units_that_fit(value: int, text: str) -> None:
    assert words.tokens(value) == text


def test_an_interval_with_a_negative_end_is_not_read_as_a_difference() -> None:
    assert words.interval((3.09, 3.37)) == "3.09\u20133.37"
    assert words.interval((-4.74, 4.32)) == "\u22124.74 to 4.32"


def test_signs_lists_and_sizes() -> None:
    assert words.signed_percent(0.443) == "+44 %"
    assert words.signed_percent(-0.03) == "\u22123 %"
    assert words.signed_percent(0.001) == "0 %"
    assert words.listed(["a", "b", "c"]) == "a, b and c"
    assert words.size(4 << 20) == "4.0 MiB"
    assert words.size(508 << 20) == "508 MiB"
    assert words.plural(1, "row") == "1 row"
    assert words.percent_with_interval(0.93, (0.909, 0.946)) == "93.0 % (90.9\u201394.6)"


def test_labels_that_touch_are_moved_apart_by_as_little_as_possible() -> None:
    assert spread([0.0, 100.0], 10) == [0.0, 100.0]
    # Three at one height: the middle one stays.
    assert spread([50.0, 50.0, 50.0], 10) == [40.0, 50.0, 60.0]
    # Two pairs that collide once they are apart become one group around their mean.
    assert spread([0.0, 0.0, 8.0, 8.0], 10) == [-11.0, -1.0, 9.0, 19.0]


@pytest.mark.parametrize(
    ("one", "other", "answer"),
    [
        ((1.0, 2.0), (1.5, 3.0), True), ((1.0, 2.0), (2.0, 3.0), True),
        ((1.0, 2.0), (2.1, 3.0), False), ((2.1, 3.0), (1.0, 2.0), False), (None, (1.0, 2.0), None),
    ],
)  # fmt: skip
def test_intervals_overlap_where_they_share_a_value(one, other, answer) -> None:  # type: ignore[no-untyped-def]
    assert overlap(one, other) is answer


def test_the_operating_point_is_where_most_cases_were_measured() -> None:
    points = [(7, 4032), (7, 4032), (5, 4032), (9, 512), (9, 512)]
    rows = [made.run_row(depth=depth, window=window) for depth, window in points]
    parsed = [record(RunRow, row, "here") for row in [*rows, made.run_row("native", depth=3)]]
    # Two points have two rows; the deeper one is taken.
    assert operating_points(parsed) == {("demo", "embedded", 16384): Point(9, 512, 64)}
    assert operating_points(parsed[-1:]) == {}


def test_each_context_has_its_own_operating_point() -> None:
    rows = [
        record(RunRow, made.run_row(context=context, window=window), "here")
        for context, window in ((4096, 1024), (16384, 4032), (16384, 4032))
    ]
    points = operating_points(rows)
    places = [("demo", "embedded", context) for context in (4096, 16384)]
    assert points == dict(zip(places, [Point(7, 1024, 64), Point(7, 4032, 64)], strict=True))
    cases = [Case.of(row) for row in rows]
    assert points_text(points, cases[1:]) == "depth 7, window 4,032, sink 64"
    assert points_text(points, cases) == (
        "4K tokens: depth 7, window 1,024, sink 64; 16K tokens: depth 7, window 4,032, sink 64"
    )


def test_a_server_does_not_move_the_operating_point_of_others() -> None:
    rows = [
        record(RunRow, made.run_row(target=target, window=window), "here")
        for target, window in (("embedded", 1024), ("openai", 4032), ("openai", 4032))
    ]
    points = operating_points(rows)
    assert points["demo", "embedded", 16384] == Point(7, 1024, 64)
    assert points_text(points, [Case.of(row) for row in rows]) == (
        "demo, embedded, 16K tokens: depth 7, window 1,024, sink 64; "
        "demo, openai, 16K tokens: depth 7, window 4,032, sink 64"
    )
    server = Case.of(rows[1])
    assert label(server, [server]).endswith("openai")


def test_rows_of_other_settings_are_other_cases_and_labels_tell_them_apart() -> None:
    rows = [
        record(RunRow, made.run_row(**changes), "here")
        for changes in (
            {"batch": 1, "repeats": 1}, {"batch": 2, "repeats": 1}, {"batch": 8, "repeats": 1},
            {"batch": 1, "repeats": 2}, {"input": "vt", "repeats": 9},
        )
    ]  # fmt: skip
    cases = [Case.of(row) for row in rows]
    assert len(set(cases)) == 5
    assert [label(case, cases) for case in cases] == [
        "demo, logs, 16K", "demo, logs, 16K, batch 2", "demo, logs, 16K, batch 8",
        "demo, logs, 16K, repeats 2", "demo, vt, 16K",
    ]  # fmt: skip


def test_arms_and_their_addresses_do_not_make_a_case() -> None:
    rows = [made.run_row(arm, depth=depth) for arm, depth in (("native", 5), ("windowed", 7))]
    rows[0]["config"]["target"]["url"] = "http://one"
    rows[1]["config"]["target"]["url"] = "http://other"
    assert len({Case.of(record(RunRow, row, "here")) for row in rows}) == 1


def test_the_papers_shares_are_one_over_layers_and_one() -> None:
    for layers, share in paper.DRAFT_SHARE.values():
        assert share == pytest.approx(1 / (layers + 1), abs=5e-4)


def test_the_papers_steps_give_its_ratios() -> None:
    for model, (native, windowed) in paper.STEP_MS.items():
        # Of other runs than the sweep's: within two points of it.
        assert native / windowed == pytest.approx(paper.STEP_RATIO[model][1], abs=0.025)
