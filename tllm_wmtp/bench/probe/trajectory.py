"""What a draft head meets on its way: the target's greedy output and its hidden states."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from tllm_wmtp.checkpoint.loader import LoadedModel
from tllm_wmtp.config import EngineConfig, KvCacheConfig
from tllm_wmtp.executor.draft import NullProposer
from tllm_wmtp.executor.engine import Engine
from tllm_wmtp.executor.request import Request
from tllm_wmtp.models.spec import DraftHead, Target
from tllm_wmtp.sampling import SamplingParams


@dataclass(frozen=True)
class Trajectory:
    """A prompt of P tokens and N greedy output tokens, each of which a draft phase may follow.

    Args:
        keys, values: ``[P + N - 1, Hkv, D]`` of the head's rows 0 .. P + N - 2.
        tokens: ``[N]``, the output; token n stands at position P + n.
        hidden: ``[N, H]``, the target's at the position before each of them.
        starts: ``[N]``, that position, P - 1 + n: where the draft phase's first row stands.
    """

    keys: torch.Tensor
    values: torch.Tensor
    tokens: torch.Tensor
    hidden: torch.Tensor
    starts: torch.Tensor


class Recorder(NullProposer):
    """Proposes nothing and keeps the rows that a draft head would have cached."""

    def __init__(self, target: Target, head: DraftHead):
        super().__init__(target.embed_tokens.weight.device)
        self.target, self.head = target, head
        self.stored: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.tokens: list[int] = []
        self.hidden: list[torch.Tensor] = []

    def rows_read(self, prompt_length: int) -> tuple[int, int]:
        return prompt_length, 0

    def store(self, request: Request, start: int, hidden: torch.Tensor) -> None:
        following = request.prompt_ids[start + 1 : start + 1 + len(hidden)]
        self._store(following, start, hidden[: len(following)])

    def keep(self, request: Request, tokens: list[int], hidden: torch.Tensor) -> None:
        super().keep(request, tokens, hidden)
        self._store(tokens, len(request.prompt_ids) - 1 + len(self.tokens), hidden)
        self.tokens += tokens
        self.hidden.append(hidden.clone())

    def _store(self, following: list[int], start: int, hidden: torch.Tensor) -> None:
        """Rows from position ``start``; ``following`` are the tokens one after each of them."""
        positions = torch.arange(start, start + len(following), device=self.device)
        ids = torch.tensor(following, dtype=torch.int64, device=self.device)
        self.stored.append(self.head.store(self.head.embed(self.target, ids), hidden, positions))


def engine_config(context: int, positions: int) -> EngineConfig:
    """The dense arm for one request of ``context`` tokens that makes ``positions`` more."""
    longest = context + positions
    return EngineConfig(
        speculation=None,
        kv_cache=KvCacheConfig(max_tokens=longest + 128, enable_block_reuse=False),
        max_batch_size=1,
        max_seq_len=longest,
    )


@torch.inference_mode()
def record(
    loaded: LoadedModel,
    prompt: Sequence[int],
    positions: int,
    on_progress: Callable[[int], None] | None = None,
) -> Trajectory:
    """The greedy output of ``positions`` tokens after ``prompt``; end tokens do not end it.

    Args:
        on_progress: called with the prompt tokens prefilled so far.

    Raises:
        WmtpError: the prompt does not fit, or the target's logits are not finite.
    """
    if loaded.head is None:
        raise RuntimeError("the model was loaded without its head")
    recorder = Recorder(loaded.target, loaded.head)
    engine = Engine(loaded, engine_config(len(prompt), positions), recorder)
    request = engine.submit(prompt, SamplingParams(max_tokens=positions, ignore_eos=True))
    while engine.step():
        if on_progress is not None:
            on_progress(request.prefilled)
    if request.error is not None:
        raise request.error
    keys, values = (torch.cat(parts) for parts in zip(*recorder.stored, strict=True))
    starts = torch.arange(positions, device=recorder.device) + len(prompt) - 1
    return Trajectory(
        keys, values, torch.tensor(recorder.tokens), torch.cat(recorder.hidden), starts
    )
