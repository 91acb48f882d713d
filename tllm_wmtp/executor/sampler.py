"""Which tokens a step drafts and keeps, so that the output is distributed as the target's alone.

Chains: speculative sampling (Leviathan et al. 2023, Chen et al. 2023). A draft x drawn from q is
kept with probability min(1, p(x) / q(x)); the first one refused is replaced by a token drawn from
norm(max(p - q, 0)); after the last one the target adds a token drawn from p. Drafts that were not
drawn from a distribution (``draft`` was never asked) count as certain: q is 1 at the draft.

Trees: the target draws x from p at the row it has reached and goes on to the child that holds x.
What it draws does not depend on the tree, so any tree is exact that was chosen before.

p and q are what :func:`filtered` makes of the logits after :meth:`SamplingState.penalise`. A greedy
request is the limit of temperature 0: all probability is at the most likely token, and both rules
become the longest matching prefix.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch

from tllm_wmtp.errors import RequestError
from tllm_wmtp.sampling import Logprob, SamplingParams

#: Random numbers that a request makes at a time.
_UNIFORMS = 64
#: Most likely tokens that are first tried as the nucleus of top_p; a full sort is the last resort.
_NUCLEUS = 512


class Filters(NamedTuple):
    """How logits become probabilities; rows with equal filters are processed together."""

    temperature: float  # 0: all probability at the highest logit
    min_p: float
    top_k: int  # 0: all tokens
    top_p: float

    @classmethod
    def of(cls, params: SamplingParams) -> Filters:
        if params.greedy:
            return cls(0.0, 0.0, 0, 1.0)
        return cls(
            1.0 if params.temperature is None else float(params.temperature),
            float(params.min_p or 0.0),
            params.top_k or 0,
            1.0 if params.top_p is None else float(params.top_p),
        )


class SamplingState:
    """What the choice of a request's tokens depends on besides logits; lives as long as it does.

    Args:
        params: the request's options.
        prompt_ids: its prompt. It is looked at, and memory for penalties is taken, when the first
            token is chosen, so a request that waits costs nothing and may yet be refused.
        vocab_size: width of the logits.
        device: where the logits are. Random numbers come from the CPU, so that a seed means the
            same on every device.

    Raises:
        RequestError: more log-probabilities are asked for than there are tokens.
    """

    def __init__(
        self,
        params: SamplingParams,
        prompt_ids: Sequence[int],
        vocab_size: int,
        device: torch.device | str = "cpu",
    ):
        if params.logprobs is not None and params.logprobs > vocab_size:
            raise RequestError(
                f"logprobs {params.logprobs}",
                f"the vocabulary has {vocab_size} tokens",
                "ask for fewer",
            )
        self.params, self.filters, self.penalised = params, Filters.of(params), params.penalised
        self.plain_greedy = params.greedy and not params.penalised and params.logprobs is None
        self._generator = torch.Generator()
        if params.seed is None:
            self._generator.seed()
        else:
            self._generator.manual_seed(params.seed)
        self._uniforms: list[float] = []
        self._used: list[float] = []  # since the last commit
        self._prompt_ids, self._vocab_size, self._device = prompt_ids, vocab_size, device

    @cached_property
    def _counts(self) -> torch.Tensor:
        """How often the output holds each token, int32 ``[V]``."""
        return torch.zeros(self._vocab_size, dtype=torch.int32, device=self._device)

    @cached_property
    def _in_prompt(self) -> torch.Tensor:
        """bool ``[V]``."""
        ids = torch.tensor(self._prompt_ids, dtype=torch.int64, device=self._device)
        held = torch.zeros(self._vocab_size, dtype=torch.bool, device=self._device)
        return held.index_fill_(0, ids, True)

    def commit(self, tokens: Sequence[int]) -> None:
        """``tokens`` were added to the output. The pending token is one of them."""
        self._used.clear()
        if self.penalised:
            added = torch.tensor(tokens, dtype=torch.int64, device=self._counts.device)
            self._counts = self._seen_with(added)

    def uniform(self) -> float:
        """The request's next random number, in [0, 1)."""
        if not self._uniforms:
            drawn = torch.rand(_UNIFORMS, dtype=torch.float64, generator=self._generator)
            self._uniforms = drawn.tolist()
        self._used.append(self._uniforms.pop())
        return self._used[-1]

    def rewind(self) -> None:
        """A step that failed is repeated: the random numbers since the last commit come again."""
        while self._used:
            self._uniforms.append(self._used.pop())

    def penalise(self, logits: torch.Tensor, following: torch.Tensor) -> torch.Tensor:
        """``logits [V]`` of the token after the output and ``following [m]`` (int64, maybe none).

        Repetition as in Keskar et al. 2019 (prompt and output); frequency and presence as in the
        OpenAI API (output only).
        """
        counts, params = self._seen_with(following), self.params
        seen = counts > 0
        factor = params.repetition_penalty
        if factor != 1:
            repeated = torch.where(logits > 0, logits / factor, logits * factor)
            logits = torch.where(seen | self._in_prompt, repeated, logits)
        return logits - params.frequency_penalty * counts - params.presence_penalty * seen

    def _seen_with(self, tokens: torch.Tensor) -> torch.Tensor:
        """Counts ``[V]`` of the output followed by ``tokens [m]``."""
        return self._counts.scatter_add(0, tokens, torch.ones_like(tokens, dtype=torch.int32))


@dataclass(frozen=True)
class Verdict:
    """What a batch of B requests gained.

    Attributes:
        tokens: per request its accepted drafts and the target's own token after them.
        accepted: how many drafts that were, int64 ``[B]`` on the logits' device.
        finite: bool ``[B]``; False where a row of the target's logits held NaN, or had no finite
            highest value: then the request's tokens mean nothing.
        logprobs: per request None, or for each of its tokens the log-probabilities by token id,
            from the target's logits as they are, before penalties and filters.
    """

    tokens: list[list[int]]
    accepted: torch.Tensor
    finite: torch.Tensor
    logprobs: list[list[dict[int, Logprob]] | None]


class StepSampler:
    """The choices of one step, for the requests of ``states`` in this order.

    Each request uses only its own random numbers, one by one as it needs them, so its tokens do not
    depend on its neighbours. Without ``draft`` calls, ``verify`` takes the drafts as certain.
    """

    def __init__(self, states: Sequence[SamplingState]):
        self.states = states
        #: Every request takes the most likely token and reports nothing: argmax is enough.
        self.greedy = all(state.plain_greedy for state in states)
        self._everyone = list(range(len(states)))
        self._drafted: torch.Tensor | None = None  # [B, j]
        self._draft_probs: list[torch.Tensor] = []  # per draft what it was drawn from, [B, V]

    def draft(self, logits: torch.Tensor) -> torch.Tensor:
        """The next draft of every request, int64 ``[B]``, from the draft's ``logits [B, V]``."""
        if self.greedy:
            return logits.argmax(-1)
        before = _no_tokens(logits) if self._drafted is None else self._drafted
        probs = self._probabilities(self._everyone, logits, before)
        tokens = self._draw(self._everyone, probs)
        self._drafted = torch.cat((before, tokens.unsqueeze(1)), 1)
        self._draft_probs.append(probs)
        return tokens

    def candidates(
        self, logits: torch.Tensor, k: int, paths: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The ``k`` most likely drafts after each row of a tree, without a draw.

        Args:
            logits: ``[R, V]`` of the draft; R is a multiple of B, a request's rows are neighbours.
            k: candidates per row, at most V.
            paths: drafts ``[R, m]`` from the root to each row, for the penalties; None at the root.

        Returns:
            ids (int64) and log-probabilities (float32), both ``[R, k]``, the most likely first;
            those beyond ``top_k``, ``top_p`` or ``min_p`` have -inf. A greedy request has its
            distribution at temperature 1 here.
        """
        each = logits.shape[0] // len(self.states)
        rows = [request for request in self._everyone for _ in range(each)]
        before = _no_tokens(logits) if paths is None else paths
        probs = self._probabilities(rows, logits, before, greedy_temperature=1.0)
        top = probs.topk(k)
        return top.indices, top.values.log()

    def verify(self, logits: torch.Tensor, drafts: torch.Tensor) -> Verdict:
        """Rejection sampling of ``drafts [B, T - 1]`` (int64) by the target's ``logits [B, T, V]``.

        Row t of the logits follows the drafts before t. T may be 1.

        Raises:
            RuntimeError: the drafts are more than ``draft`` was asked for.
        """
        highest, choices = logits.max(-1)  # [B, T]; the highest shows any NaN
        finite = highest.isfinite().all(1)
        if self.greedy:
            accepted = (drafts == choices[:, :-1]).long().cumprod(dim=1).sum(dim=1)
            rows = zip(choices.tolist(), accepted.tolist(), strict=True)
            tokens = [chosen[: count + 1] for chosen, count in rows]
            return Verdict(tokens, accepted, finite, [None] * len(tokens))

        draft_len = drafts.shape[1]
        if self._draft_probs and len(self._draft_probs) < draft_len:
            raise RuntimeError(f"{draft_len} drafts, but only {len(self._draft_probs)} were drawn")
        tokens = [[] for _ in self._everyone]
        running = self._everyone
        for t in range(draft_len + 1):
            at = torch.tensor(running, device=logits.device)
            p = self._probabilities(running, logits[at, t], drafts[at, :t])
            if t < draft_len:
                kept, ended = self._judge(t, running, drafts[at, t], p)
            else:
                kept, ended = self._draw(running, p), set(running)
            for request, token in zip(running, kept.tolist(), strict=True):
                tokens[request].append(token)
            running = [request for request in running if request not in ended]
            if not running:
                break
        return self._verdict(tokens, finite, [list(range(len(t))) for t in tokens], logits)

    def choose(self, logits: torch.Tensor) -> Verdict:
        """One token each, from the target's ``logits [B, V]``: a verify without drafts."""
        return self.verify(logits.unsqueeze(1), _no_tokens(logits))

    def walk(
        self,
        logits: torch.Tensor,
        tokens: torch.Tensor,
        children: Sequence[Sequence[Sequence[int]]],
    ) -> tuple[Verdict, list[list[int]]]:
        """The way through each request's tree that the target takes.

        Args:
            logits: ``[B, N, V]`` of the target, one row per node.
            tokens: ``[B, N]`` (int64); row 0 is the root, the pending token.
            children: ``children[b][row]`` are the rows that follow ``row``, as
                :func:`tllm_wmtp.tree.children` gives them.

        Returns:
            the verdict, and per request the rows on its way, from 0 to the last one accepted.
        """
        highest, choices = logits.max(-1)
        ids, likeliest = tokens.tolist(), choices.tolist() if self.greedy else []
        chosen: list[list[int]] = [[] for _ in self._everyone]
        paths = [[0] for _ in self._everyone]
        running = self._everyone
        while running:
            if self.greedy:
                drawn = [likeliest[request][paths[request][-1]] for request in running]
            else:
                drawn = self._draw_at_ends(logits, tokens, running, paths)
            reached = []
            for request, token in zip(running, drawn, strict=True):
                chosen[request].append(token)
                below = children[request][paths[request][-1]]
                row = next((row for row in below if ids[request][row] == token), None)
                if row is not None:
                    paths[request].append(row)
                    reached.append(request)
            running = reached
        return self._verdict(chosen, highest.isfinite().all(1), paths, logits), paths

    def _draw_at_ends(
        self,
        logits: torch.Tensor,
        tokens: torch.Tensor,
        running: list[int],
        paths: list[list[int]],
    ) -> list[int]:
        """A draw from p at the last row of each running request's path, all equally long."""
        at = torch.tensor(running, device=logits.device)
        rows = torch.tensor([paths[request] for request in running], device=logits.device)
        before = tokens[at].gather(1, rows)[:, 1:]  # the pending token belongs to the output
        p = self._probabilities(running, logits[at, rows[:, -1]], before)
        return self._draw(running, p).tolist()

    def _probabilities(
        self,
        rows: Sequence[int],
        logits: torch.Tensor,
        before: torch.Tensor,
        greedy_temperature: float = 0.0,
    ) -> torch.Tensor:
        """Processed distributions, float32 ``[R, V]``.

        Args:
            rows: which request each row of ``logits [R, V]`` belongs to.
            before: the tokens ``[R, m]`` between the output and each row.
            greedy_temperature: of greedy requests.
        """
        logits = logits.float()
        # A row without a highest logit becomes uniform: its request ends by `finite` if it is the
        # target's; if it is the draft's, the target puts it right.
        broken = ~logits.amax(-1).isfinite()
        logits = logits.masked_fill(broken.unsqueeze(1), 0.0)
        penalised = [i for i, request in enumerate(rows) if self.states[request].penalised]
        for i in penalised:
            logits[i] = self.states[rows[i]].penalise(logits[i], before[i])

        alike: dict[Filters, list[int]] = {}
        for i, request in enumerate(rows):
            alike.setdefault(self.states[request].filters, []).append(i)
        probs = logits  # a private copy
        for filters, members in alike.items():
            if not filters.temperature:
                filters = filters._replace(temperature=greedy_temperature)
            if len(alike) == 1:
                return filtered(logits, filters)
            of_group = torch.tensor(members, device=logits.device)
            probs[of_group] = filtered(logits[of_group], filters)
        return probs

    def _judge(
        self, t: int, running: list[int], drafts: torch.Tensor, p: torch.Tensor
    ) -> tuple[torch.Tensor, set[int]]:
        """Draft t ``[n]`` of the running requests against ``p [n, V]``.

        Returns:
            the drafts with the refused ones replaced, and whose were refused.
        """
        if self._draft_probs:
            q = self._draft_probs[t][torch.tensor(running, device=p.device)]
        else:
            q = torch.zeros_like(p).scatter_(1, drafts.unsqueeze(1), 1.0)
        kept = accepts(_at(p, drafts), _at(q, drafts), self._uniforms(running, p.device))
        refused = (~kept).nonzero().squeeze(1)  # rows of p and q
        losers = [running[i] for i in refused.tolist()]
        if losers:
            replaced = self._draw(losers, residual(p[refused], q[refused]))
            drafts = drafts.index_copy(0, refused, replaced)
        return drafts, set(losers)

    def _uniforms(self, requests: Sequence[int], device: torch.device) -> torch.Tensor:
        drawn = [self.states[request].uniform() for request in requests]
        return torch.tensor(drawn, dtype=torch.float64, device=device)

    def _draw(self, requests: Sequence[int], weights: torch.Tensor) -> torch.Tensor:
        """A token ``[n]`` for each of ``requests``, in proportion to its row of ``weights``."""
        return draw(weights, self._uniforms(requests, weights.device))

    def _verdict(
        self,
        tokens: list[list[int]],
        finite: torch.Tensor,
        rows: list[list[int]],
        logits: torch.Tensor,
    ) -> Verdict:
        """``rows[b]`` are the rows of ``logits[b]`` that chose ``tokens[b]``."""
        accepted = torch.tensor([len(own) - 1 for own in tokens], device=logits.device)
        reports: list[list[dict[int, Logprob]] | None] = []
        for request, state in enumerate(self.states):
            top = state.params.logprobs
            if top is None:
                reports.append(None)
            else:
                at = torch.tensor(rows[request], device=logits.device)
                reports.append(log_probabilities(logits[request, at], tokens[request], top))
        return Verdict(tokens, accepted, finite, reports)


def filtered(logits: torch.Tensor, filters: Filters) -> torch.Tensor:
    """Probabilities ``[R, V]`` (float32): temperature, then min_p, top_k and top_p, renormalised.

    A token is kept if it is at least as likely as the least likely one that belongs to the most
    likely ``top_k``, or to the fewest whose probabilities reach ``top_p``; so equal tokens are all
    kept or all dropped, and no sorting order shows.
    """
    if not filters.temperature:
        certain = torch.zeros_like(logits)
        return certain.scatter_(1, logits.argmax(-1, keepdim=True), 1.0)
    # Relative to the highest first: then no temperature can overflow.
    scaled = (logits - logits.amax(-1, keepdim=True)) / filters.temperature
    if filters.min_p > 0:
        scaled.masked_fill_(scaled < math.log(filters.min_p), -math.inf)
    if 0 < filters.top_k < scaled.shape[1]:
        lowest = scaled.topk(filters.top_k).values[:, -1:]
        scaled.masked_fill_(scaled < lowest, -math.inf)
    probs = scaled.softmax(-1)
    if filters.top_p < 1:
        outside = probs < nucleus_floor(probs, filters.top_p)
        # Not probs / probs.sum(): a sum may round otherwise in a batch than alone.
        probs = scaled.masked_fill_(outside, -math.inf).softmax(-1)
    return probs


def nucleus_floor(probs: torch.Tensor, top_p: float) -> torch.Tensor:
    """Lowest probability ``[R, 1]`` in the nucleus of ``probs [R, V]``.

    The nucleus holds the tokens before which, in descending order, less than ``top_p`` (> 0) has
    been reached. It is nearly always small, so it is looked for among the likeliest tokens first.
    """
    vocab = probs.shape[1]
    width = min(_NUCLEUS, vocab)
    while True:
        top = probs.topk(width).values
        inside = top.double().cumsum(-1) - top < top_p
        if width == vocab or not inside[:, -1].any():
            return top.gather(1, inside.sum(-1, keepdim=True) - 1)
        width = min(width * 8, vocab)


def accepts(p: torch.Tensor, q: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
    """Whether drafts of probability ``q [n]`` are kept: with probability min(1, p / q)."""
    return uniforms * q < p


def residual(p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """Weights ``[n, V]`` of what replaces a refused draft: max(p - q, 0), not normalised.

    A refusal means that p exceeds q somewhere else; where rounding hides it they are equal, and p
    itself serves.
    """
    left = (p - q).clamp_(min=0)
    return torch.where(left.sum(-1, keepdim=True) > 0, left, p)


def draw(weights: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
    """Inverse of each row's cumulative ``weights [n, V]`` at ``uniforms [n]`` in [0, 1).

    It is summed in float64 and the first token beyond the point is taken, so a token of weight 0
    is never drawn.
    """
    reached = weights.double().cumsum(-1)
    points = uniforms.unsqueeze(1) * reached[:, -1:]
    return torch.searchsorted(reached, points, right=True).squeeze(1)


def log_probabilities(
    logits: torch.Tensor, tokens: Sequence[int], top: int
) -> list[dict[int, Logprob]]:
    """Per row of ``logits [n, V]`` those of its token and of the ``top`` most likely ones.

    The most likely come first; equal tokens have equal ranks.
    """
    logprobs = logits.float().log_softmax(-1)
    chosen = torch.tensor(tokens, device=logits.device)
    own = _at(logprobs, chosen)
    ranks = (logprobs > own.unsqueeze(1)).sum(-1) + 1
    likeliest = logprobs.topk(top)
    rows = zip(
        tokens,
        own.tolist(),
        ranks.tolist(),
        likeliest.values.tolist(),
        likeliest.indices.tolist(),
        strict=True,
    )
    reports = []
    for token, logprob, rank, values, ids in rows:
        report: dict[int, Logprob] = {}
        for place, (i, value) in enumerate(zip(ids, values, strict=True)):
            tied = place > 0 and value == values[place - 1]
            report[i] = Logprob(value, report[ids[place - 1]].rank if tied else place + 1)
        report.setdefault(token, Logprob(logprob, rank))
        reports.append(report)
    return reports


def _no_tokens(logits: torch.Tensor) -> torch.Tensor:
    """``[R, 0]`` for the rows of ``logits``."""
    return torch.empty(logits.shape[0], 0, dtype=torch.int64, device=logits.device)


def _at(rows: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
    """``rows[i, columns[i]]``, ``[n]``."""
    return rows.gather(1, columns.unsqueeze(1)).squeeze(1)
