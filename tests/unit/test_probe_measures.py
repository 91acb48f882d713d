"""What the probe measures of a read, against cases worked by hand."""

from __future__ import annotations

import math

import pytest
import torch

from tllm_wmtp.bench.probe.measures import (
    AttentionRecord,
    band_mass,
    band_means,
    entropy_and_participation,
    jaccard,
    kl_divergence,
    margin,
    relative_change,
)
from tllm_wmtp.bench.probe.reader import Pass, outcome_of
from tllm_wmtp.bench.probe.reads import SINK, TAIL, UNSEEN, WINDOW, Places

BANDS = torch.tensor([[SINK, TAIL, TAIL, WINDOW, UNSEEN]])
#: Softmax: 1/10, 2/10, 3/10, 4/10 of the four visible keys.
SCORES = torch.tensor([1.0, 2.0, 3.0, 4.0, 999.0]).log().view(1, 1, 5)
WEIGHTS = torch.tensor([0.1, 0.2, 0.3, 0.4, 0.0]).view(1, 1, 5)


def test_mass_is_what_each_band_weighs() -> None:
    torch.testing.assert_close(band_mass(WEIGHTS, BANDS), torch.tensor([[[0.1, 0.4, 0.5]]]))


def test_value_norms_are_means_over_the_keys_of_a_band() -> None:
    norms = torch.tensor([7.0, 2.0, 4.0, 5.0, 99.0]).view(1, 1, 5)
    torch.testing.assert_close(band_means(norms, BANDS), torch.tensor([[[7.0, 5.0, 3.0]]]))


def test_a_band_without_keys_has_no_mean_and_no_nan() -> None:
    only_sink = torch.zeros(1, 5, dtype=torch.uint8)
    assert band_means(WEIGHTS, only_sink).tolist()[0][0][1:] == [0.0, 0.0]


def test_entropy_and_participation_of_two_keys_worked_by_hand() -> None:
    # The tail alone is 2/5 and 3/5.
    entropy, participation = entropy_and_participation(SCORES, BANDS == TAIL)
    by_hand = -(0.4 * math.log(0.4) + 0.6 * math.log(0.6))
    assert entropy.item() == pytest.approx(by_hand, abs=1e-6)
    assert participation.item() == pytest.approx(1 / (0.4**2 + 0.6**2), abs=1e-6)


@pytest.mark.parametrize("count", [1, 2, 100, 4096])
def test_uniform_attention_has_the_entropy_ln_n_and_n_equal_keys(count: int) -> None:
    scores = torch.full((3, 1, count + 5), 0.7)
    inside = torch.arange(count + 5) < count
    entropy, participation = entropy_and_participation(scores, inside[None])
    torch.testing.assert_close(entropy, torch.full((1, 3), math.log(count)), atol=1e-4, rtol=1e-5)
    torch.testing.assert_close(participation, torch.full((1, 3), float(count)), rtol=1e-4, atol=0.0)


def test_one_key_that_takes_all_leaves_no_entropy() -> None:
    scores = torch.tensor([500.0, 0.0, 0.0]).view(1, 1, 3)
    entropy, participation = entropy_and_participation(scores, torch.ones(1, 3, dtype=torch.bool))
    assert entropy.item() == 0.0
    assert participation.item() == 1.0


def test_a_tail_far_below_the_rest_still_has_its_entropy() -> None:
    # exp(-200) is 0 in float32, so the tail's weights alone would say nothing.
    scores = torch.tensor([0.0, -200.0, -200.0]).view(1, 1, 3)
    inside = torch.tensor([[False, True, True]])
    entropy, participation = entropy_and_participation(scores, inside)
    assert entropy.item() == pytest.approx(math.log(2))
    assert participation.item() == pytest.approx(2.0)


def test_of_no_keys_there_is_no_nan() -> None:
    entropy, participation = entropy_and_participation(SCORES, torch.zeros_like(BANDS) > 0)
    assert (entropy.item(), participation.item()) == (0.0, 0.0)


def test_jaccard_counts_common_experts_whatever_their_order() -> None:
    one = torch.tensor([[3, 1], [3, 1], [0, 2], [0, 2]])
    other = torch.tensor([[1, 3], [1, 2], [1, 3], [2, 0]])
    torch.testing.assert_close(jaccard(one, other), torch.tensor([1.0, 1 / 3, 0.0, 1.0]))


def test_kl_divergence_worked_by_hand() -> None:
    native = torch.tensor([[0.5, 0.5]]).log()
    windowed = torch.tensor([[0.25, 0.75]]).log()
    by_hand = 0.5 * math.log(2) + 0.5 * math.log(2 / 3)
    assert kl_divergence(native, windowed).item() == pytest.approx(by_hand)
    assert kl_divergence(native, native + 3).item() == pytest.approx(0.0, abs=1e-12)


def test_a_margin_is_between_the_two_best() -> None:
    assert margin(torch.tensor([[1.0, 5.0, 4.5, -3.0]])).tolist() == [0.5]


def test_a_change_is_relative_to_the_native_answer() -> None:
    answer, other = torch.tensor([[[3.0], [4.0]]]), torch.tensor([[[3.0], [3.0]]])
    assert relative_change(answer, other).item() == pytest.approx(1 / 5)


def test_a_record_keeps_queries_in_order_and_its_masses_sum_to_one() -> None:
    record = AttentionRecord(window=2, n_sink=1)
    generator = torch.Generator().manual_seed(0)
    for queries in (torch.tensor([0, 4]), torch.tensor([7])):
        places = Places(torch.arange(8).expand(len(queries), 8), queries)
        seen = places.keys <= queries[:, None]
        scores = torch.randn(2, len(queries), 8, generator=generator)
        weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
        record(scores, weights, places, torch.ones(1, len(queries), 8))
    last = scores[0, 0, 1:6].double()  # the tail of the query at 7: after the sink, before 6
    p = last.exp() / last.exp().sum()
    seen_of = record.collect()
    assert seen_of["keys"].tolist() == [[1, 0, 0], [1, 2, 2], [1, 2, 5]]
    torch.testing.assert_close(seen_of["mass"].sum(-1), torch.ones(3, 2))
    assert seen_of["tail_entropy"].shape == seen_of["tail_participation"].shape == (3, 2)
    assert seen_of["tail_entropy"][2, 0].item() == pytest.approx(float(-(p * p.log()).sum()))
    assert seen_of["tail_participation"][2, 0].item() == pytest.approx(1 / float((p * p).sum()))
    assert seen_of["tail_entropy"][0].tolist() == [0.0, 0.0]  # the query at 0 has no tail
    assert seen_of["value_norm"].tolist()[1] == [[1.0, 1.0, 1.0]]


def test_an_outcome_holds_another_read_against_the_native_one() -> None:
    experts = [torch.tensor([[0, 1]]), torch.tensor([[0, 1]])]
    others = [torch.tensor([[1, 0]]), torch.tensor([[1, 2]])]
    output = torch.zeros(1, 1)
    native = Pass(output, torch.tensor([[0.5, 0.5]]).log(), torch.tensor([[[3.0, 4.0]]]), experts)
    other = Pass(output, torch.tensor([[0.25, 0.75]]).log(), torch.tensor([[[3.0, 0.0]]]), others)
    outcome = outcome_of(native, other)
    # 0.5 ln(0.5 / 0.25) + 0.5 ln(0.5 / 0.75) = 0.5 ln(4 / 3); 4 of 5; 1 and 1/3 of the experts.
    assert outcome.kl.item() == pytest.approx(0.5 * math.log(4 / 3))
    assert outcome.change.item() == pytest.approx(4 / 5)
    assert outcome.jaccard is not None
    assert outcome.jaccard.item() == pytest.approx(2 / 3)
    assert (outcome.token.item(), outcome.same.item()) == (1, False)
