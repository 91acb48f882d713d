"""Numbers as text, and what else the report computes by itself."""

from __future__ import annotations

import pytest
import report_results as made

from tllm_wmtp.bench.report import paper, words
from tllm_wmtp.bench.report.plot import spread
from tllm_wmtp.bench.report.records import record
from tllm_wmtp.bench.report.runs import Point, operating_point, overlap
from tllm_wmtp.bench.report.schema import RunRow


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "\u2013"), (0, "0"), (4.3567, "4.36"), (71.04, "71.0"), (301.78, "302"),
        (1040.2, "1,040"), (0.03165, "0.0316"), (-2.5, "-2.50"), (12345.6, "12,346"),
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
    assert operating_point(parsed) == Point(9, 512, 64)
    assert operating_point(parsed[-1:]) is None


def test_the_papers_shares_are_one_over_layers_and_one() -> None:
    for layers, share in paper.DRAFT_SHARE.values():
        assert share == pytest.approx(1 / (layers + 1), abs=5e-4)


def test_the_papers_steps_give_its_ratios() -> None:
    for model, (native, windowed) in paper.STEP_MS.items():
        # Of other runs than the sweep's: within two points of it.
        assert native / windowed == pytest.approx(paper.STEP_RATIO[model][1], abs=0.025)
