"""Does a step cost the same with random keys and values as with those of a real prompt?

Random ones save the prefill (:mod:`tllm_wmtp.bench.step`). Here a prompt is prefilled, and requests
of both kinds take steps in turns, which gives paired ratios. What differs with the content besides
keys and values is how many drafts are accepted, and so how many rows the next step feeds: every
draft is therefore replaced, after it was made, by another token, and pairs in which one of the two
requests had a draft accepted all the same do not count.
"""

from __future__ import annotations

import dataclasses
import random
import statistics
from collections.abc import Callable, Sequence
from typing import Any

import torch

from tllm_wmtp.bench.common import interval_of, median_draws
from tllm_wmtp.bench.depth import make_prompt
from tllm_wmtp.bench.step import ARMS, Contestant, StepBench
from tllm_wmtp.checkpoint.loader import LoadedModel, load_model
from tllm_wmtp.demo import CHECKPOINT, CHECKPOINT_MAMBA2
from tllm_wmtp.errors import ConfigError
from tllm_wmtp.executor.draft import Drafts
from tllm_wmtp.executor.engine import Engine
from tllm_wmtp.executor.request import Phase, Request
from tllm_wmtp.executor.sampler import StepSampler
from tllm_wmtp.sampling import SamplingParams

PARTS = ("step", "draft", "verify")
WARM_UP_PAIRS = 3
SEED = 50_001


class PrefilledContestant(Contestant):
    """One arm's engine with one request whose prompt ``ids`` were really prefilled."""

    def __init__(self, arm: str, bench: StepBench, loaded: LoadedModel, ids: list[int]):
        self.arm, self.context = arm, len(ids)
        self.engine = Engine(loaded, bench.engine_config(arm, len(ids)))
        params = SamplingParams(max_tokens=bench.output, ignore_eos=True)
        self.request = self.engine.submit(ids, params)

    def prefill(self) -> None:
        """Ends with the first step, which follows the last chunk."""
        while self.request.phase is not Phase.DECODE:
            self.step()


def run_content_check(
    bench: StepBench, on_progress: Callable[[str, int, int], None] | None = None
) -> dict[str, Any]:
    """:func:`check_content` of the bench's model."""
    loaded = load_model(bench.model, getattr(torch, bench.dtype), "cpu", with_head=True)
    return check_content(bench, loaded, on_progress)


def check_content(
    bench: StepBench,
    loaded: LoadedModel,
    on_progress: Callable[[str, int, int], None] | None = None,
) -> dict[str, Any]:
    """Paired ratios, random over prefilled, at the shortest of the contexts, per arm.

    Returns:
        ``{"context", "prompt": what it is made of, "arms": [{"arm", "pairs", "pairs_left_out",
        "step_ratio", "step_ratio_interval", "draft_ratio", ...}]}``: medians with 95 % bootstrap
        intervals. The dense arm has no draft ratio.

    Raises:
        WmtpError: the context does not fit, or too few pairs are left.
    """
    ids, made_of = prompt_ids(bench, loaded, bench.contexts[0])
    return {
        "context": len(ids),
        "prompt": made_of,
        "arms": [_arm(arm, bench, loaded, ids, on_progress) for arm in ARMS],
    }


def prompt_ids(bench: StepBench, loaded: LoadedModel, tokens: int) -> tuple[list[int], str]:
    """About ``tokens`` ids that mean something to the model, and what they are."""
    if bench.model in (CHECKPOINT, CHECKPOINT_MAMBA2):
        return make_prompt("easy", tokens, SEED), "logs of the demonstration's language"
    if loaded.tokenizer is None:
        chance = random.Random(SEED)
        vocab = loaded.config.vocab_size
        return [chance.randrange(vocab) for _ in range(tokens)], "random ids, without a tokenizer"
    from pydoc_data.topics import topics

    encoded = loaded.tokenizer.encode("\n".join(topics.values()), add_special_tokens=False).ids
    whole = list(encoded) * (tokens // len(encoded) + 1)
    return whole[:tokens], "Python's help texts, repeated where they end"


def _arm(
    arm: str,
    bench: StepBench,
    loaded: LoadedModel,
    ids: list[int],
    on_progress: Callable[[str, int, int], None] | None,
) -> dict[str, Any]:
    prefilled = PrefilledContestant(arm, bench, loaded, ids)
    synthetic = Contestant(arm, bench, loaded, len(ids))
    vocab = loaded.config.vocab_size
    for contestant in (synthetic, prefilled):
        refuse_drafts(contestant.engine, vocab)
    prefilled.prefill()
    ratios: dict[str, list[float]] = {part: [] for part in PARTS}
    left_out = 0
    for pair in range(WARM_UP_PAIRS + bench.repeats):
        for contestant in (synthetic, prefilled) if pair % 2 else (prefilled, synthetic):
            contestant.step()
        if on_progress is not None:
            on_progress(f"content, {arm}", pair + 1, WARM_UP_PAIRS + bench.repeats)
        if pair < WARM_UP_PAIRS:
            continue
        if any(each.request.metrics.accepted[-2] for each in (synthetic, prefilled)):
            left_out += 1
            continue
        for part, random_s, real_s in zip(
            PARTS, last_seconds(synthetic), last_seconds(prefilled), strict=True
        ):
            if part != "draft" or arm != "dense":
                ratios[part].append(random_s / real_s)
    if len(ratios["step"]) < 2:
        raise ConfigError(
            f"{len(ratios['step'])} pairs of {bench.repeats}",
            "in the others a draft was accepted, and an interval needs two",
            "raise --repeats",
        )
    shown: dict[str, Any] = {
        "arm": arm,
        "pairs": len(ratios["step"]),
        "pairs_left_out": left_out,
    }
    for part, values in ratios.items():
        if values:
            shown[f"{part}_ratio"] = statistics.median(values)
            shown[f"{part}_ratio_interval"] = median_interval(values)
    return shown


def refuse_drafts(engine: Engine, vocab: int) -> None:
    """Replaces every draft by the token after it, once all have been made."""
    propose = engine.proposer.propose

    def refused(requests: Sequence[Request], draft_len: int, sampler: StepSampler) -> Drafts:
        drafts = propose(requests, draft_len, sampler)
        return dataclasses.replace(drafts, tokens=torch.remainder(drafts.tokens + 1, vocab))

    engine.proposer.propose = refused  # type: ignore[method-assign]


def last_seconds(contestant: Contestant) -> tuple[float, float, float]:
    """``PARTS`` of the last step."""
    metrics = contestant.request.metrics
    return metrics.step_s[-1], metrics.draft_s[-1], metrics.verify_s[-1]


def median_interval(values: Sequence[float], seed: int = 0) -> list[float]:
    """95 % bootstrap interval of the median."""
    return interval_of(median_draws(values, seed))
