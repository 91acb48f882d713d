"""The choice of experts by sigmoid scores, on numbers worked by hand."""

from __future__ import annotations

import math

import pytest
import torch

from tllm_wmtp.models.layers.sigmoid_router import RouterConfig, SigmoidRouter

SCORES = [0.9, 0.2, 0.6, 0.5, 0.7, 0.1]


def router(bias: list[float], **choice: object) -> SigmoidRouter:
    """Its input is the logits themselves."""
    made = SigmoidRouter(6, RouterConfig(num_experts=6, **choice))  # type: ignore[arg-type]
    made.weight.data = torch.eye(6)
    made.e_score_correction_bias.data = torch.tensor(bias)
    return made


def route(made: SigmoidRouter) -> dict[int, float]:
    """Weight of each chosen expert where the scores are ``SCORES``."""
    logits = torch.tensor([[math.log(s / (1 - s)) for s in SCORES]])
    weights, experts = made(logits)
    return dict(zip(experts[0].tolist(), weights[0].tolist(), strict=True))


def test_without_a_bias_the_best_scores_share_the_scaling_factor() -> None:
    assert route(router([0.0] * 6, top_k=2, routed_scaling_factor=2.0)) == pytest.approx(
        {0: 2 * 0.9 / 1.6, 4: 2 * 0.7 / 1.6}
    )


def test_weights_that_are_not_normalised_are_the_scores() -> None:
    made = router([0.0] * 6, top_k=2, norm_topk_prob=False, routed_scaling_factor=0.5)
    assert route(made) == pytest.approx({0: 0.45, 4: 0.35})


def test_the_bias_chooses_but_does_not_weigh() -> None:
    made = router([-0.5, 0.6, 0.0, 0.0, 0.0, 0.0], top_k=2)  # choice: .4 .8 .6 .5 .7 .1
    assert route(made) == pytest.approx({1: 0.2 / 0.9, 4: 0.7 / 0.9})


def test_only_the_groups_with_the_best_two_experts_are_seen() -> None:
    # Groups (.9 .2) (.6 .5) (.7 .1) have 1.1, 1.1 and 0.8; the third one's 0.7 is out of sight.
    made = router([0.0] * 6, top_k=3, n_group=3, topk_group=2)
    assert route(made) == pytest.approx({0: 0.9 / 2.0, 2: 0.6 / 2.0, 3: 0.5 / 2.0})


def test_an_expert_with_a_negative_choice_still_comes_before_those_out_of_sight() -> None:
    made = router([-1.0, -1.0, -2.0, -2.0, -2.0, -2.0], top_k=2, n_group=3, topk_group=1)
    assert route(made).keys() == {0, 1}
