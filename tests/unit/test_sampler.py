"""Processed distributions, draws, verdicts and log-probabilities, each against another source."""

from __future__ import annotations

import math
from time import perf_counter
from typing import Any

import pytest
import torch
from sampling_reference import distribution
from transformers.generation import logits_process as hf

from tllm_wmtp.errors import RequestError
from tllm_wmtp.executor.sampler import (
    Filters,
    SamplingState,
    StepSampler,
    draw,
    filtered,
    log_probabilities,
    nucleus_floor,
    residual,
)
from tllm_wmtp.sampling import SamplingParams

VOCAB = 40


def randn(*shape: int, seed: int = 0, scale: float = 2.0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale


def processed(logits: torch.Tensor, **options: Any) -> torch.Tensor:
    return filtered(logits, Filters.of(SamplingParams(**options)))


def of_log(*probabilities: float) -> torch.Tensor:
    return torch.tensor([probabilities], dtype=torch.float64).log().float()


# Distributions ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "warpers"),
    [
        ({"temperature": 0.7}, [hf.TemperatureLogitsWarper(0.7)]),
        ({"top_k": 5}, [hf.TopKLogitsWarper(5)]),
        ({"top_p": 0.8}, [hf.TopPLogitsWarper(0.8)]),
        ({"min_p": 0.1}, [hf.MinPLogitsWarper(0.1)]),
        (
            {"temperature": 1.4, "min_p": 0.02, "top_k": 12, "top_p": 0.9},
            [
                hf.TemperatureLogitsWarper(1.4),
                hf.MinPLogitsWarper(0.02),
                hf.TopKLogitsWarper(12),
                hf.TopPLogitsWarper(0.9),
            ],
        ),
    ],
)
def test_filters_are_those_of_transformers(options: dict[str, Any], warpers: list[Any]) -> None:
    logits = randn(200, VOCAB)
    scores = logits.clone()
    for warper in warpers:
        scores = warper(None, scores)
    torch.testing.assert_close(processed(logits, **options), scores.softmax(-1))


def test_the_repetition_penalty_is_that_of_transformers() -> None:
    logits, prompt, output = randn(20, VOCAB), [3, 9, 3, 30], [7, 9]
    params = SamplingParams(temperature=1.0, repetition_penalty=1.3)
    state = SamplingState(params, prompt, VOCAB)
    state.commit(output[:1])
    drafted = torch.tensor(output[1:])
    oracle = hf.RepetitionPenaltyLogitsProcessor(1.3)
    for row in logits:
        expected = oracle(torch.tensor([prompt + output]), row[None].clone())[0]
        torch.testing.assert_close(state.penalise(row, drafted), expected)


def test_the_float64_reference_of_the_other_tests_agrees() -> None:
    params = SamplingParams(
        temperature=0.8,
        min_p=0.03,
        top_k=15,
        top_p=0.9,
        repetition_penalty=1.2,
        presence_penalty=0.4,
        frequency_penalty=0.3,
    )
    prompt, output = [1, 2, 3], [3, 4, 4]
    state = SamplingState(params, prompt, VOCAB)
    state.commit(output)
    for row in randn(50, VOCAB):
        ours = filtered(
            state.penalise(row, torch.tensor([], dtype=torch.int64))[None], state.filters
        )
        expected = distribution(row.tolist(), params, prompt, output)
        torch.testing.assert_close(
            ours[0].double(), torch.tensor(expected, dtype=torch.float64), atol=1e-6, rtol=0
        )


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        # Square roots of 0.64, 0.16, 0.16, 0.04 are 0.8, 0.4, 0.4, 0.2 of 1.8.
        ({"temperature": 2.0}, [8 / 18, 4 / 18, 4 / 18, 2 / 18]),
        (
            {"temperature": 0.5},
            [0.4096 / 0.4624, 0.0256 / 0.4624, 0.0256 / 0.4624, 0.0016 / 0.4624],
        ),
        ({"top_k": 3}, [0.64 / 0.96, 0.16 / 0.96, 0.16 / 0.96, 0]),
        ({"top_k": 2}, [0.64 / 0.96, 0.16 / 0.96, 0.16 / 0.96, 0]),  # the tie stays
        ({"top_p": 0.6}, [1, 0, 0, 0]),
        ({"top_p": 0.7}, [0.64 / 0.96, 0.16 / 0.96, 0.16 / 0.96, 0]),  # the tie stays
        ({"top_p": 0.97}, [0.64, 0.16, 0.16, 0.04]),
        ({"min_p": 0.2}, [0.64 / 0.96, 0.16 / 0.96, 0.16 / 0.96, 0]),
        ({"min_p": 0.3}, [1, 0, 0, 0]),
        ({"min_p": 0.2, "top_p": 0.66}, [1, 0, 0, 0]),  # 0.64 is 0.667 of what min_p leaves
        ({"temperature": 0}, [1, 0, 0, 0]),
        ({"temperature": 1.0, "top_k": 1}, [1, 0, 0, 0]),
    ],
)
def test_filters_by_hand(options: dict[str, Any], expected: list[float]) -> None:
    probs = processed(of_log(0.64, 0.16, 0.16, 0.04), **options)
    torch.testing.assert_close(probs, torch.tensor([expected], dtype=torch.float32))


def test_penalties_by_hand() -> None:
    logits = torch.tensor([2.0, -1.0, 3.0, 0.5, -2.0])
    options = {"repetition_penalty": 2.0, "frequency_penalty": 0.25, "presence_penalty": 0.5}
    state = SamplingState(SamplingParams(**options), [0, 1], 5)
    state.commit([2, 4, 2])
    # Token 0: 2 / 2, from the prompt. 1: -1 * 2. 2: 3 / 2 - 3 * 0.25 - 0.5. 4: -2 * 2 - 0.25 - 0.5.
    expected = torch.tensor([1.0, -2.0, 0.25, 0.5, -4.75])
    torch.testing.assert_close(state.penalise(logits, torch.tensor([2])), expected)
    assert state._counts.tolist() == [0, 0, 2, 0, 1]  # a draft is not yet output


def test_a_tie_goes_to_the_lower_id_when_greedy() -> None:
    assert processed(torch.tensor([[1.0, 3.0, 3.0]])).tolist() == [[0, 1, 0]]


def test_extreme_temperatures_make_no_nan() -> None:
    logits = torch.tensor([[1e30, -1e30, 5.0, 1e30]])
    torch.testing.assert_close(
        processed(logits, temperature=1e-5), torch.tensor([[0.5, 0, 0, 0.5]])
    )
    torch.testing.assert_close(
        processed(torch.tensor([[3.0, 1.0]]), temperature=1e30), torch.tensor([[0.5, 0.5]])
    )


@pytest.mark.parametrize("top_p", [0.1, 0.5, 0.9, 0.999, 1 - 1e-9])
@pytest.mark.parametrize("scale", [0.0, 0.5, 6.0])
def test_the_nucleus_is_found_without_a_sort_whatever_its_size(top_p: float, scale: float) -> None:
    probs = randn(3, 5000, scale=scale).softmax(-1)
    ordered = probs.sort(-1, descending=True).values
    before = ordered.double().cumsum(-1) - ordered
    floors = [row[mass < top_p].min() for row, mass in zip(ordered, before, strict=True)]
    torch.testing.assert_close(nucleus_floor(probs, top_p)[:, 0], torch.stack(floors))


# Draws --------------------------------------------------------------------------------------


def test_a_draw_inverts_the_cumulative_weights() -> None:
    weights = torch.tensor([[0.0, 0.25, 0.0, 0.5, 0.25, 0.0]])
    last = math.nextafter(1.0, 0.0)
    for uniform, token in ((0.0, 1), (0.2499, 1), (0.25, 3), (0.7499, 3), (0.75, 4), (last, 4)):
        assert draw(weights, torch.tensor([uniform], dtype=torch.float64)).tolist() == [token]
    unscaled = draw(weights * 7, torch.tensor([0.74], dtype=torch.float64))
    assert unscaled.tolist() == [3]


def test_the_residual_is_what_the_target_has_more() -> None:
    p, q = torch.tensor([[0.5, 0.3, 0.2]]), torch.tensor([[0.1, 0.6, 0.3]])
    torch.testing.assert_close(residual(p, q), torch.tensor([[0.4, 0.0, 0.0]]))
    torch.testing.assert_close(residual(p, p), p)


def test_a_seed_means_the_same_tokens_alone_and_in_any_company() -> None:
    def play(company: list[SamplingParams], place: int) -> list[int]:
        company = [*company[:place], SamplingParams(top_p=0.9, seed=77), *company[place:]]
        states = [SamplingState(params, [1], VOCAB) for params in company]
        made: list[int] = []
        for round_ in range(12):
            draft_len = (3, 0, 2)[round_ % 3]
            step, drafts = StepSampler(states), []
            for j in range(draft_len):
                own = randn(1, VOCAB, seed=1000 + 10 * round_ + j)
                logits = randn(len(states), VOCAB, seed=place + j)
                logits[place] = own[0]
                drafts.append(step.draft(logits))
            logits = randn(len(states), draft_len + 1, VOCAB, seed=place)
            logits[place] = randn(1, draft_len + 1, VOCAB, seed=2000 + round_)[0]
            given = torch.stack(drafts, 1) if drafts else torch.empty(len(states), 0).long()
            tokens = step.verify(logits, given).tokens
            for state, gained in zip(states, tokens, strict=True):
                state.commit(gained)
            made += tokens[place]
        return made

    alone = play([], 0)
    others = [
        SamplingParams(),
        SamplingParams(temperature=2.0),
        SamplingParams(temperature=0.9, presence_penalty=1.0, seed=77),
        SamplingParams(top_k=4, logprobs=3, seed=1),
    ]
    assert len(set(alone)) > 5
    for place in range(len(others) + 1):
        assert play(others, place) == alone
    assert play([SamplingParams()], 1) == alone


def test_without_a_seed_two_requests_differ() -> None:
    def numbers() -> list[float]:
        state = SamplingState(SamplingParams(temperature=1.0), [], 4)
        return [state.uniform() for _ in range(100)]

    first = numbers()
    assert len(set(first)) == 100
    assert not set(first) & set(numbers())


# Verdicts -----------------------------------------------------------------------------------


def greedy_truth(
    logits: torch.Tensor, drafts: torch.Tensor, params: SamplingParams, output: list[int]
) -> list[list[int]]:
    """Accepted drafts and the target's own token, one row after another."""
    told = []
    for rows, offered in zip(logits.tolist(), drafts.tolist(), strict=True):
        gained: list[int] = []
        for t, row in enumerate(rows):
            probs = distribution(row, params, [], output + gained)
            gained.append(probs.index(1.0))
            if t < len(offered) and gained[-1] != offered[t]:
                break
        told.append(gained)
    return told


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"logprobs": 1},
        {"frequency_penalty": 2.0},
        {"temperature": 1.0, "top_k": 1},
        {"top_p": 0.0, "repetition_penalty": 1.5},
    ],
)
@pytest.mark.parametrize("drawn", [False, True])
def test_a_greedy_request_keeps_the_longest_matching_prefix(
    options: dict[str, Any], drawn: bool
) -> None:
    batch, vocab = 200, 3  # so few tokens that every prefix length occurs
    params, output = SamplingParams(**options), [0, 2, 2]
    states = [SamplingState(params, [], vocab) for _ in range(batch)]
    for state in states:
        state.commit(output)
    step = StepSampler(states)
    assert step.greedy is (options.keys() <= {"temperature", "top_k"})
    if drawn:
        drafts = torch.stack([step.draft(randn(batch, vocab, seed=j)) for j in range(3)], 1)
    else:
        drafts = torch.randint(0, vocab, (batch, 3), generator=torch.Generator().manual_seed(1))
    logits = randn(batch, 4, vocab, seed=9)
    verdict = step.verify(logits, drafts)
    assert verdict.tokens == greedy_truth(logits, drafts, params, output)
    assert verdict.accepted.tolist() == [len(tokens) - 1 for tokens in verdict.tokens]
    assert set(verdict.accepted.tolist()) == {0, 1, 2, 3}
    assert verdict.finite.all()


@pytest.mark.parametrize("options", [{}, {"temperature": 1.0}, {"presence_penalty": 0.5}])
def test_a_draft_that_equals_the_target_is_always_kept(options: dict[str, Any]) -> None:
    states = [SamplingState(SamplingParams(**options, seed=i), [2], VOCAB) for i in range(50)]
    rows, step, drafts = randn(50, 4, VOCAB), StepSampler(states), []
    for j in range(3):
        drafts.append(step.draft(rows[:, j]))
    verdict = step.verify(rows, torch.stack(drafts, 1))
    assert verdict.accepted.tolist() == [3] * 50
    assert [tokens[:3] for tokens in verdict.tokens] == torch.stack(drafts, 1).tolist()


def test_a_draft_outside_the_targets_support_is_never_kept() -> None:
    states = [SamplingState(SamplingParams(top_k=2, seed=i), [], 4) for i in range(50)]
    target = torch.tensor([3.0, 2.0, 1.0, 0.0]).expand(50, 2, 4)
    verdict = StepSampler(states).verify(target, torch.full((50, 1), 3))
    assert verdict.accepted.tolist() == [0] * 50
    assert {tuple(tokens) for tokens in verdict.tokens} == {(0,), (1,)}


@pytest.mark.parametrize("options", [{}, {"temperature": 1.0, "logprobs": 1}])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_logits_that_are_not_finite_show_in_their_request_alone(
    options: dict[str, Any], bad: float
) -> None:
    states = [SamplingState(SamplingParams(**options, seed=i), [], VOCAB) for i in range(3)]
    logits = randn(3, 3, VOCAB)
    logits[1, 2, 5] = bad
    logits[2, :, 7] = -math.inf  # a token that is ruled out is no error
    verdict = StepSampler(states).verify(logits, torch.zeros(3, 2, dtype=torch.int64))
    assert verdict.finite.tolist() == [True, False, True]
    assert all(0 <= token < VOCAB for tokens in verdict.tokens for token in tokens)
    children = [[[1], [2], []]] * 3
    verdict, _ = StepSampler(states).walk(logits, torch.zeros(3, 3, dtype=torch.int64), children)
    assert verdict.finite.tolist() == [True, False, True]
    assert StepSampler(states).choose(logits[:, 2]).finite.tolist() == [True, False, True]


def test_a_draft_without_finite_logits_does_no_harm() -> None:
    states = [SamplingState(SamplingParams(temperature=1.0, seed=i), [], 4) for i in range(200)]
    step = StepSampler(states)
    drafts = step.draft(torch.full((200, 4), math.nan))
    certain = torch.tensor([0.0, 50.0, 0.0, 0.0]).expand(200, 2, 4)
    verdict = step.verify(certain, drafts[:, None])
    assert {token for tokens in verdict.tokens for token in tokens} == {1}
    assert verdict.finite.all()


def test_more_drafts_than_were_drawn_are_a_mistake() -> None:
    step = StepSampler([SamplingState(SamplingParams(temperature=1.0), [], VOCAB)])
    step.draft(randn(1, VOCAB))
    with pytest.raises(RuntimeError, match="2 drafts"):
        step.verify(randn(1, 3, VOCAB), torch.zeros(1, 2, dtype=torch.int64))


# Trees --------------------------------------------------------------------------------------


def test_candidates_are_the_likeliest_drafts_of_each_row() -> None:
    params = SamplingParams(temperature=0.8, top_k=2, presence_penalty=1.5)
    states = [SamplingState(SamplingParams(), [], 6), SamplingState(params, [], 6)]
    states[1].commit([5])
    logits, paths = randn(4, 6), torch.tensor([[0], [1], [2], [3]])
    ids, logs = StepSampler(states).candidates(logits, 3, paths)
    for row in range(4):
        owner, output = (SamplingParams(temperature=1.0), []) if row < 2 else (params, [5, row])
        expected = distribution(logits[row].tolist(), owner, [], output)
        order = sorted(range(6), key=lambda token: -expected[token])
        kept = 3 if row < 2 else 2
        assert ids[row, :kept].tolist() == order[:kept]
        for place in range(3):
            share = expected[order[place]]
            assert logs[row, place].exp() == pytest.approx(share, abs=1e-6)
    assert logs[2:, 2].tolist() == [-math.inf] * 2


@pytest.mark.parametrize("options", [{}, {"logprobs": 0}])
def test_a_greedy_walk_follows_the_likeliest_tokens(options: dict[str, Any]) -> None:
    logits = torch.zeros(1, 6, 10)
    for row, token in enumerate((4, 9, 7, 9, 2, 3)):
        logits[0, row, token] = 5.0
    tokens = torch.tensor([[0, 8, 4, 6, 7, 7]])
    # Row 0 wants 4: row 2. Row 2 wants 7: of its children, row 4. Row 4 wants 2: nobody has it.
    children = [[1, 2], [3], [4, 5], [], [], []]
    verdict, paths = StepSampler([SamplingState(SamplingParams(**options), [], 10)]).walk(
        logits, tokens, [children]
    )
    assert (verdict.tokens, paths) == ([[4, 7, 2]], [[0, 2, 4]])
    assert verdict.accepted.tolist() == [2]


def test_penalties_see_the_path_and_not_the_pending_token_twice() -> None:
    # Every row prefers 3, then 2, then 1; each occurrence costs 1.
    logits = torch.tensor([0.0, 1.0, 1.9, 2.2]).expand(1, 3, 4)
    state = SamplingState(SamplingParams(frequency_penalty=1.0), [], 4)
    state.commit([3])  # the pending token
    tokens, children = torch.tensor([[3, 2, 3]]), [[[1], [2], []]]
    # Root: 3 costs 1, so 2. Then both cost 1: 3 again (1.2 > 0.9). Then 3 costs 2: 1 (1.0 > 0.9).
    verdict, paths = StepSampler([state]).walk(logits, tokens, children)
    assert (verdict.tokens, paths) == ([[2, 3, 1]], [[0, 1, 2]])


# Log-probabilities --------------------------------------------------------------------------


def test_log_probabilities_come_from_the_logits_as_they_are() -> None:
    params = SamplingParams(temperature=0.3, top_k=3, presence_penalty=2.0, logprobs=2, seed=5)
    state, plain = SamplingState(params, [], VOCAB), SamplingState(SamplingParams(), [], VOCAB)
    state.commit([1])
    logits = randn(2, 3, VOCAB)
    verdict = StepSampler([state, plain]).verify(logits, logits[:, :2].argmax(-1))
    assert verdict.logprobs[1] is None
    reports = verdict.logprobs[0]
    assert reports is not None
    assert len(reports) == len(verdict.tokens[0])
    for row, token, report in zip(logits[0].double(), verdict.tokens[0], reports, strict=False):
        logs = row - row.exp().sum().log()
        order = logs.argsort(descending=True).tolist()
        assert set(report) == {*order[:2], token}
        for i, entry in report.items():
            assert entry.logprob == pytest.approx(float(logs[i]), abs=1e-5)
            assert entry.rank == order.index(i) + 1


def test_equal_tokens_have_equal_ranks() -> None:
    reports = log_probabilities(torch.tensor([[1.0, 2.0, 1.0, 1.0, 0.0]]), [3], 3)
    ranks = {token: entry.rank for token, entry in reports[0].items()}
    assert ranks.pop(3) == 2
    assert ranks.pop(1) == 1
    assert set(ranks.values()) == {2}
    assert log_probabilities(torch.zeros(1, 4), [2], 0)[0].keys() == {2}


def test_more_log_probabilities_than_tokens_are_refused() -> None:
    with pytest.raises(RequestError, match="logprobs 9"):
        SamplingState(SamplingParams(logprobs=9), [], 8)


# Size ---------------------------------------------------------------------------------------


def test_a_vocabulary_of_a_quarter_million_needs_no_sort() -> None:
    vocab, logits = 248_320, randn(8, 248_320, scale=1.5)

    def seconds(work: Any) -> float:
        times = []
        for _ in range(3):
            begin = perf_counter()
            work()
            times.append(perf_counter() - begin)
        return min(times)

    state = SamplingState(SamplingParams(temperature=0.7, top_k=50, top_p=0.9), [], vocab)
    step = StepSampler([state] * 8)
    whole = seconds(lambda: step.choose(logits))
    assert whole < seconds(lambda: logits.sort(-1))
