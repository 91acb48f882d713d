"""The distribution that a request samples from, spelled out in float64, token by token."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from tllm_wmtp.sampling import SamplingParams


def distribution(
    logits: Sequence[float],
    params: SamplingParams,
    prompt: Sequence[int] = (),
    output: Sequence[int] = (),
) -> list[float]:
    """Penalties, temperature, min_p, top_k, top_p; one loop over the sorted tokens for each."""
    scores = []
    for token, logit in enumerate(logits):
        score = float(logit)
        if token in prompt or token in output:
            factor = params.repetition_penalty
            score = score / factor if score > 0 else score * factor
        times = list(output).count(token)
        score -= params.frequency_penalty * times
        score -= params.presence_penalty if times else 0.0
        scores.append(score)
    order = sorted(range(len(scores)), key=lambda token: -scores[token])
    if params.greedy:
        return [float(token == order[0]) for token in range(len(scores))]
    temperature = 1.0 if params.temperature is None else params.temperature
    best = scores[order[0]]
    weights = [math.exp((score - best) / temperature) for score in scores]
    kept = [token for token in order if weights[token] >= (params.min_p or 0.0)]
    if params.top_k:
        kept = kept[: params.top_k]
    if params.top_p is not None:
        total, reached, nucleus = sum(weights[token] for token in kept), 0.0, []
        for token in kept:
            if reached < params.top_p * total:
                nucleus.append(token)
            reached += weights[token]
        kept = nucleus
    total = sum(weights[token] for token in kept)
    return [weights[t] / total if t in kept else 0.0 for t in range(len(weights))]


def joint(
    logits_after: Callable[[tuple[int, ...]], Sequence[float]],
    params: SamplingParams,
    prompt: Sequence[int],
    length: int,
) -> dict[tuple[int, ...], float]:
    """Probability of every output of ``length`` tokens; ``logits_after`` sees prompt and output."""
    found = {(): 1.0}
    for _ in range(length):
        longer = {}
        for output, probability in found.items():
            after = logits_after((*prompt, *output))
            for token, p in enumerate(distribution(after, params, prompt, output)):
                if p:
                    longer[(*output, token)] = probability * p
        found = longer
    return found
