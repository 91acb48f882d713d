"""Mode ``engine``: the draft is a compiled engine, the verify stays TensorRT-LLM's own.

The executor's loop calls the MTP layer and then its shared head. Both calls are answered from one
forward of a :class:`~tllm_wmtp.engine.proposer.DraftForward`, which holds embedding, layer, rings
and lm_head and answers the last row of each request. So of the first forward's rows only the
accepted ones are fed; how many they are, the loop's own acceptance tells.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tllm_wmtp.engine.proposer import Answers, DraftForward, Rows
from tllm_wmtp.errors import ConfigError
from tllm_wmtp.ring import RingSpec
from tllm_wmtp.trtllm.kv import LaneTable, first_axis
from tllm_wmtp.trtllm.settings import Settings


def open_engine(settings: Settings, draft_len: int) -> DraftForward:
    """The engine that the settings name, made for this window and depth.

    Raises:
        ConfigError: it is not there, cannot run here, was built for another ring, or gives
            candidates in place of the logits that the executor samples from.
    """
    from tllm_wmtp.engine.directory import read_config
    from tllm_wmtp.engine.session import EngineSession

    assert settings.engine is not None
    directory = Path(settings.engine)
    built = read_config(directory)["options"]
    check_ring(
        RingSpec.for_chain(built["n_sink"], built["window"], built["depth"]), settings, draft_len
    )
    if built["top_k"]:
        raise ConfigError(
            f"engine {directory} of {built['top_k']} candidates",
            "the executor takes its drafts from all logits",
            "build with --top-k 0",
        )
    return EngineSession(directory)


def check_ring(ring: RingSpec, settings: Settings, draft_len: int) -> None:
    """
    Raises:
        ConfigError: the engine's ring is not the one that the settings describe.
    """
    wanted = RingSpec.for_chain(settings.n_sink, settings.window, draft_len + 1)
    if ring != wanted:
        raise ConfigError(
            f"an engine for {ring}",
            f"window, n_sink and max_draft_len ask for {wanted}",
            "build an engine with these, or change the settings",
        )


class EngineHead:
    """Stands in for an MTP layer and its shared head.

    The layer's weights are loaded all the same; they are not used.
    """

    in_graphs = False

    def __init__(self, layer: Any, worker: Any, forward: DraftForward, tp_size: int):
        if tp_size > 1:
            raise ConfigError(
                f"tensor_parallel_size {tp_size}",
                "a draft engine holds all heads and the whole lm_head on one GPU",
                "use mode 'ring' with tensor parallelism",
            )
        self._forward = forward
        self.table = LaneTable(forward.lanes)
        self._lanes: torch.Tensor | None = None
        self._accepted: torch.Tensor | None = None
        self._logits: torch.Tensor | None = None
        layer.forward = self.layer_forward
        layer.shared_head.forward = self.head_forward
        self._watch(worker)

    # --- The executor's bookkeeping ---

    def start(self, max_requests: int) -> None:
        if max_requests > self._forward.lanes:
            raise ConfigError(
                f"max_batch_size {max_requests}",
                f"the engine has rings for {self._forward.lanes} requests",
                "build it with more lanes, or lower max_batch_size",
            )

    def lane(self, request_id: int) -> int:
        return self.table.acquire(request_id)

    def release(self, request_id: int) -> None:
        self.table.release(request_id)

    def publish(self, request_ids: list[int]) -> None:
        lanes = torch.tensor(self.table.rows(request_ids), dtype=torch.int32)
        clear = getattr(self._forward, "clear_lane", None)
        for lane in self.table.drain_fresh():
            if clear is not None:
                clear(lane)
        if self._lanes is None or len(lanes) > len(self._lanes):
            device = getattr(self._forward, "device", torch.device("cpu"))
            self._lanes = torch.zeros(self._forward.lanes, dtype=torch.int32, device=device)
        self._lanes[: len(lanes)].copy_(lanes, non_blocking=True)

    def _watch(self, worker: Any) -> None:
        accept = worker.sample_and_accept_draft_tokens

        @functools.wraps(accept)
        def sample_and_accept_draft_tokens(*args: Any, **options: Any) -> Any:
            result = accept(*args, **options)
            self._accepted = result[1]
            return result

        worker.sample_and_accept_draft_tokens = sample_and_accept_draft_tokens

    # --- The draft loop ---

    def layer_forward(
        self,
        input_ids: torch.Tensor,
        position_ids: torch.Tensor,
        hidden_states: torch.Tensor,
        embed_tokens: nn.Module | None = None,
        attn_metadata: Any = None,
        **_: Any,
    ) -> torch.Tensor:
        """Hidden states ``[rows, H]``; only the rows that the loop gathers are filled."""
        if self._lanes is None or attn_metadata is None:
            raise RuntimeError("the draft layer runs before its batch is known")
        rows, requests = input_ids.shape[0], attn_metadata.num_seqs
        positions = first_axis(position_ids, rows).to(torch.int64)
        accepted, self._accepted = self._accepted, None
        lanes = self._lanes[:requests]
        if accepted is None:
            each = torch.arange(requests + 1, dtype=torch.int32, device=input_ids.device)
            answers = self._forward.run(
                Rows(input_ids.long(), hidden_states, positions, each, each, positions, lanes)
            )
            self._logits = answers.logits
            return answers.next_hidden.to(hidden_states.dtype)
        contexts = [int(n) for n in attn_metadata.seq_lens[: attn_metadata.num_contexts]]
        hidden, logits, last = [], [], []
        for first, counts, begin, end in self._groups(contexts, rows, requests):
            some = slice(first, first + len(counts))
            answers, at = self._first_forward(
                input_ids[begin:end].long(),
                hidden_states[begin:end],
                positions[begin:end],
                torch.tensor(counts, device=input_ids.device)
                if first < len(contexts)
                else accepted[some].long(),
                torch.arange(len(counts), device=input_ids.device) * ((end - begin) // len(counts)),
                lanes[some],
            )
            hidden.append(answers.next_hidden)
            logits.append(answers.logits)
            last.append(at + begin)
        self._logits = torch.cat(logits)
        out = hidden_states.new_zeros(rows, hidden_states.shape[1])
        return out.index_copy_(0, torch.cat(last), torch.cat(hidden).to(out.dtype))

    def head_forward(self, hidden_states: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        """Logits ``[requests, vocab]`` of the rows that the layer has just answered."""
        if self._logits is None or self._logits.shape[0] != hidden_states.shape[0]:
            raise RuntimeError("logits are asked for of other rows than the draft layer answered")
        return self._logits

    def _groups(
        self, contexts: Sequence[int], rows: int, requests: int
    ) -> list[tuple[int, list[int], int, int]]:
        """``(first request, rows of each, begin, end)``: what one forward can take.

        A context request is alone; generation requests, which have equally many rows, share.
        """
        groups, begin = [], 0
        for request, count in enumerate(contexts):
            groups.append((request, [count], begin, begin + count))
            begin += count
        generations = requests - len(contexts)
        if not generations:
            return groups
        each = (rows - begin) // generations
        most = max(self._forward.max_rows // each, 1)
        for first in range(len(contexts), requests, most):
            count = min(most, requests - first)
            groups.append((first, [each] * count, begin, begin + count * each))
            begin += count * each
        return groups

    def _first_forward(
        self,
        ids: torch.Tensor,
        hidden: torch.Tensor,
        positions: torch.Tensor,
        counts: torch.Tensor,
        begins: torch.Tensor,
        lanes: torch.Tensor,
    ) -> tuple[Answers, torch.Tensor]:
        """Feeds the first ``counts [b]`` rows of each request, and tells which row was its last.

        Rows move together and those that do not count go to the end, past the last offset, where
        the graph ignores them: nothing is read back to the host.
        """
        total, requests = ids.shape[0], counts.shape[0]
        if requests == 1 and total > self._forward.max_rows:
            ids, hidden, positions = self._store_all_but_last_piece(ids, hidden, positions, lanes)
            counts, begins = counts - (total - ids.shape[0]), begins
        rows = torch.arange(ids.shape[0], device=ids.device)
        ends = counts.cumsum(0)
        owner = torch.searchsorted(ends, rows, right=True).clamp_(max=requests - 1)
        source = (begins[owner] + rows - (ends - counts)[owner]).clamp_(max=ids.shape[0] - 1)
        offsets = torch.cat((ends.new_zeros(1), ends)).to(torch.int32)
        each = torch.arange(requests + 1, dtype=torch.int32, device=ids.device)
        answers = self._forward.run(
            Rows(
                ids[source],
                hidden[source],
                positions[source],
                offsets,
                each,
                positions[begins],
                lanes,
            )
        )
        return answers, begins + counts - 1 + (total - ids.shape[0])

    def _store_all_but_last_piece(
        self,
        ids: torch.Tensor,
        hidden: torch.Tensor,
        positions: torch.Tensor,
        lanes: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """A prompt's rows go in as many at a time as the graph takes."""
        most = self._forward.max_rows
        one = torch.arange(2, dtype=torch.int32, device=ids.device)
        while ids.shape[0] > most:
            self._forward.run(
                Rows(
                    ids[:most],
                    hidden[:most],
                    positions[:most],
                    one * most,
                    one,
                    positions[:1],
                    lanes,
                )
            )
            ids, hidden, positions = ids[most:], hidden[most:], positions[most:]
        return ids, hidden, positions
