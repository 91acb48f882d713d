"""One draft forward, captured once and replayed for other batches, against rings on the CPU."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from tllm_wmtp.ops import cuda
from tllm_wmtp.ring import RingSpec
from tllm_wmtp.trtllm.kv import DraftRings, HeadShape

SPEC = RingSpec.for_chain(4, 28, 4)
HEADS = HeadShape(num_heads=8, num_kv_heads=2, head_dim=64, scale=0.125)


def rings(device: torch.device) -> DraftRings:
    return DraftRings(SPEC, HEADS, 4, torch.float32, device)


def captured(run: Callable[[], torch.Tensor], device: torch.device) -> Callable[[], torch.Tensor]:
    """What repeats ``run`` on the addresses it has now: a CUDA graph; on the CPU, the call."""
    if device.type != "cuda":
        return run
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run()

    def replay() -> torch.Tensor:
        graph.replay()
        return out

    return replay


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> torch.device:
    if request.param == "cuda":
        if not torch.cuda.is_available():
            pytest.skip("no CUDA device")
        try:
            cuda.find_library()
        except cuda.LibraryMissing as missing:
            pytest.skip(str(missing))
    return torch.device(request.param)


@pytest.mark.parametrize("by_length", [False, True])
def test_a_replayed_step_follows_other_requests(device: torch.device, by_length: bool) -> None:
    """Batches of other requests at other positions, until rings have wrapped."""
    there, here = rings(device), rings(torch.device("cpu"))
    generator = torch.Generator().manual_seed(4)
    positions = torch.zeros(8, dtype=torch.int32, device=device)
    lengths = torch.full((2,), 4, dtype=torch.int32, device=device)
    counts = torch.full((2,), 4, dtype=torch.int32, device=device)
    widths = (HEADS.num_heads * 64, HEADS.num_kv_heads * 64, HEADS.num_kv_heads * 64)
    qkv = torch.zeros(8, sum(widths), device=device)

    def step() -> torch.Tensor:
        there.aim(positions, 2, lengths=(lengths, counts) if by_length else None)
        return there.attend(*qkv.split(widths, dim=-1))

    there.publish([1, 2])
    replay = captured(step, device)
    # The capture has run on the rings: start again with empty ones.
    there.table.release(1)
    there.table.release(2)
    cached = dict.fromkeys((5, 6, 7), 0)
    for turn in range(24):
        batch = [(5, 6), (7, 5), (6, 7)][turn % 3]
        told = torch.cat([torch.arange(cached[one], cached[one] + 4) for one in batch])
        rows = torch.randn(8, sum(widths), generator=generator)
        there.publish(batch)
        here.publish(batch)
        positions.copy_(told)
        lengths.copy_(torch.tensor([cached[one] + 4 for one in batch]))
        qkv.copy_(rows)
        here.aim(told, 2)
        wanted = here.attend(*rows.split(widths, dim=-1))
        torch.testing.assert_close(replay().cpu(), wanted, atol=2e-5, rtol=1e-4)
        for place, one in enumerate(batch):
            cached[one] += 1 + (turn + place) % 4
    assert min(cached.values()) > SPEC.capacity
