"""A request's context, chunk by chunk, and which of its rows anyone reads.

The context is the prompt, and after a preemption the output so far as well. Nobody reads the final
hidden state of one of its rows, except the last one (it chooses the next token) and those whose
keys the draft will still see. So the last layer, where it is full attention, answers only these;
all rows still leave their keys and values in it. That is exact.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from tllm_wmtp.executor.draft import Proposer
from tllm_wmtp.executor.request import Request
from tllm_wmtp.models.spec import Target


def spans_read(
    start: int, stop: int, prompt_length: int, reads: tuple[int, int]
) -> list[tuple[int, int]]:
    """Ranges of positions in the chunk ``start .. stop - 1`` whose hidden state is read.

    ``reads`` is what :meth:`Proposer.rows_read` answers.
    """
    sink_end = min(reads[0], prompt_length)
    tail_begin = min(reads[1], prompt_length - 1)
    if tail_begin <= sink_end:
        return [(start, stop)]
    spans = [(start, min(stop, sink_end)), (max(start, tail_begin), stop)]
    return [(begin, end) for begin, end in spans if begin < end]


def union(spans: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """The same positions as ranges that ascend and do not touch."""
    merged: list[tuple[int, int]] = []
    for begin, end in sorted(spans):
        if merged and begin <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(merged[-1][1], end)
        else:
            merged.append((begin, end))
    return merged


def prefill_chunk(
    target: Target,
    proposer: Proposer,
    request: Request,
    chunk: int,
    pruning: bool,
    interval: int | None = None,
) -> torch.Tensor | None:
    """Runs the next rows: ``chunk`` of them, or fewer up to the end or a multiple of ``interval``.

    Args:
        pruning: False computes every row and reads the same ones: the reference for tests.
        interval: at its multiples a snapshot is to be taken, so what its ring holds is read there,
            as at the end of a prompt.

    Returns:
        the last row's hidden state ``[1, H]`` at the end and where a snapshot is to be taken.
    """
    states = request.prefill_states
    if states is None:
        raise RuntimeError("a request is prefilled before it was admitted")
    length = len(request.context_ids)
    start, stop = request.prefilled, min(request.prefilled + chunk, length)
    stops = [length]  # of this prompt and of the one that the next snapshot within it stands for
    if interval is not None:
        following = (start // interval + 1) * interval
        stop = min(stop, following)
        if following < length:  # of this chunk, later snapshots read no other rows
            stops.append(following)
    device = states.starts.device
    spans = union(
        span for end in stops for span in spans_read(start, stop, end, proposer.rows_read(end))
    )
    read = sum(end - begin for begin, end in spans)
    rows = None
    if read < stop - start:
        steps = [torch.arange(begin - start, end - start, device=device) for begin, end in spans]
        rows = torch.cat(steps) if steps else torch.empty(0, dtype=torch.int64, device=device)
    computed = rows if pruning and target.prunable else None
    states.begin(start, stop - start, computed)
    ids = torch.tensor([request.context_ids[start:stop]], device=device)
    hidden = target(ids, states.positions, states, rows if pruning else None)[0]
    if rows is not None and not pruning:
        hidden = hidden.index_select(0, rows)
    request.metrics.prefill_last_layer_rows += stop - start if computed is None else read
    begin_row = 0
    for begin, end in spans:
        proposer.store(request, begin, hidden[begin_row : begin_row + end - begin])
        begin_row += end - begin
    request.prefilled = request.kv_length = stop
    return hidden[-1:] if stop in stops else None
