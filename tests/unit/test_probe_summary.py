"""How drafts are summed up: shares, means over positions, and what is missing."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest
import torch

from tllm_wmtp.bench.probe.samples import Outcome, Samples
from tllm_wmtp.bench.probe.summary import mean_and_interval, summarise

WINDOWS = {2: "window 2", 8: "window 8"}


def outcome(same: list[bool], jaccard: list[float] | None = None) -> Outcome:
    count = len(same)
    return Outcome(
        token=torch.tensor([7 if each else 8 for each in same]),
        same=torch.tensor(same),
        kl=torch.arange(count) / 10,
        change=torch.full((count,), 0.25),
        jaccard=None if jaccard is None else torch.tensor(jaccard),
    )


def samples(same: list[bool], jaccard: list[float] | None = None) -> Samples:
    """Two drafts at each of two positions: ``same`` is draft 1 of both, then draft 2 of both."""
    mass = torch.tensor([[0.1, 0.6, 0.3], [0.3, 0.2, 0.5]])
    return Samples(
        draft=torch.tensor([1, 1, 2, 2]),
        position=torch.tensor([0, 1, 0, 1]),
        margin=torch.tensor([1.0, 2.0, 3.0, 6.0]),
        judged=torch.tensor([True, True, True, False]),
        native=torch.full((4,), 7),
        truth=torch.tensor([7, 7, 8, 8]),
        keys=torch.tensor([[1, 2, 4]]).repeat(4, 1),
        mass=mass.repeat(4, 1, 1),
        value_norm=torch.tensor([[3.0, 4.0, 5.0]]).repeat(4, 1, 1),
        tail_entropy=torch.tensor([[math.log(2), math.log(4)]]).repeat(4, 1),
        tail_participation=torch.tensor([[2.0, 4.0]]).repeat(4, 1),
        outcomes={
            "window 2": outcome([False] * 4, jaccard),
            "window 8": outcome(same, jaccard),
            "shuffled": outcome([True] * 4, jaccard),
        },
    )


def summary_of(made: Samples) -> dict:  # type: ignore[type-arg]
    content = summarise(made, WINDOWS, 8, ["shuffled"])
    json.dumps(content, allow_nan=False)
    return content


def test_flips_and_their_margins() -> None:
    content = summary_of(samples([True, False, True, False]))
    assert (content["agreement"], content["flips"], content["drafts"]) == (0.5, 2, 4)
    assert content["margin_at_flips"] == 4.0
    assert content["margin_elsewhere"] == 2.0
    assert content["margin"] == 3.0
    # Wilson's score interval of 2 in 4, from its formula by hand.
    assert content["agreement_interval"] == pytest.approx([0.1500, 0.8500], abs=1e-4)
    assert [entry["agreement"] for entry in content["by_draft"]] == [0.5, 0.5]


def test_only_drafts_after_right_ones_are_held_against_the_target() -> None:
    content = summary_of(samples([True, False, False, False]))
    assert content["right_drafts"] == 3
    assert content["right_native"] == pytest.approx(2 / 3)
    assert content["right_windowed"] == pytest.approx(2 / 3)  # right, flipped, and flipped to right
    assert summary_of(samples([True, False, True, True]))["right_windowed"] == pytest.approx(1 / 3)


def test_bands_are_averaged_over_heads_and_given_for_each() -> None:
    content = summary_of(samples([True] * 4))
    assert content["mass"] == pytest.approx({"sink": 0.2, "window": 0.4, "tail": 0.4})
    assert content["mass_interval"]["tail"] == pytest.approx([0.4, 0.4])
    assert [head["tail"] for head in content["mass_by_head"]] == pytest.approx([0.3, 0.5])
    assert content["value_norm"] == {"sink": 3.0, "window": 4.0, "tail": 5.0}
    assert content["tail_participation"] == 3.0
    assert content["tail_entropy"] == pytest.approx(1.5 * math.log(2))
    assert content["tail_entropy_share"] == pytest.approx(0.75)


def test_every_window_is_on_the_curve_in_order() -> None:
    content = summary_of(samples([True, True, True, False]))
    assert [point["window"] for point in content["curve"]] == [2, 8]
    assert [point["agreement"] for point in content["curve"]] == [0.0, 0.75]
    assert content["perturbations"]["shuffled"]["agreement"] == 1.0


def test_what_is_missing_is_null_and_has_a_reason() -> None:
    content = summary_of(samples([True] * 4))
    for name in ("margin_at_flips", "router_jaccard"):
        assert content[name] is None
        assert content[f"{name}_interval"] is None
        assert content["missing"][name]
    assert "margin_elsewhere" not in content["missing"]
    assert summary_of(samples([False] * 4))["missing"]["margin_elsewhere"]


def test_without_a_tail_or_a_sink_their_fields_are_null() -> None:
    made = samples([True] * 4)
    made = replace(made, keys=torch.tensor([[0, 7, 0]]).repeat(4, 1))
    content = summary_of(made)
    assert content["mass"]["sink"] is None
    assert content["mass"]["tail"] is None
    assert content["value_norm"]["tail"] is None
    of_head = {"head": 0, "sink": None, "window": 0.6, "tail": None}
    assert content["mass_by_head"][0] == pytest.approx(of_head)
    for name in ("tail_entropy", "tail_entropy_share", "tail_participation", "mass.tail"):
        assert content["missing"][name].startswith("no key lies outside")
    assert content["missing"]["mass.sink"] == "the sink is empty"
    assert content["tail_keys"] == 0.0


def test_a_tail_of_one_key_has_an_entropy_but_no_share_of_the_most() -> None:
    made = replace(samples([True] * 4), keys=torch.tensor([[1, 2, 1]]).repeat(4, 1))
    content = summary_of(made)
    assert content["tail_entropy"] is not None
    assert content["tail_entropy_share"] is None


def test_jaccard_is_averaged_where_there_are_experts() -> None:
    content = summary_of(samples([True] * 4, jaccard=[1.0, 0.5, 0.5, 0.0]))
    assert content["router_jaccard"] == 0.5
    assert "router_jaccard" not in content["missing"]


def test_pooled_prompts_keep_their_positions_apart() -> None:
    one, other = samples([True] * 4), samples([False] * 4)
    pooled = Samples.pool([one, other])
    assert pooled.position.tolist() == [0, 1, 0, 1, 2, 3, 2, 3]
    content = summary_of(pooled)
    assert (content["agreement"], content["drafts"]) == (0.5, 8)


def test_an_interval_is_over_positions_not_over_drafts() -> None:
    """Four drafts of one position that agree are one observation."""
    values = torch.tensor([0.0] * 4 + [1.0] * 4)
    value, interval = mean_and_interval(values, torch.tensor([0] * 4 + [1] * 4))
    assert (value, interval) == (0.5, [0.0, 1.0])
    apart, narrow = mean_and_interval(values.repeat(50), torch.arange(400))
    assert apart == 0.5
    assert narrow is not None
    assert 0.44 < narrow[0] < 0.47
    assert 0.53 < narrow[1] < 0.56


def test_one_position_has_no_interval() -> None:
    assert mean_and_interval(torch.tensor([2.0, 4.0]), torch.tensor([3, 3])) == (3.0, None)


def test_positions_count_by_their_drafts() -> None:
    value, _ = mean_and_interval(torch.tensor([1.0, 1.0, 1.0, 5.0]), torch.tensor([0, 0, 0, 1]))
    assert value == 2.0
