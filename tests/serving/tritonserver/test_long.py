"""Long runs: memory of a server under mixed traffic, and a server without metrics."""

from __future__ import annotations

import os
import statistics
import threading
import time
from pathlib import Path

import pytest
import triton_server
from triton_server import Server

from tllm_wmtp.serving.triton.repository import write_python_repository
from tllm_wmtp.serving.triton.settings import InstanceSettings

PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
CLIENTS = 4
#: Share of the time after which caches, pools and the allocator's arenas have their size.
WARM_UP = 1 / 3
#: Growth that is no leak: what is left of warming up, and the allocator's fragments. A leak of one
#: prompt or one record per request is several times as much.
MOST_BYTES_PER_REQUEST = {"the Python process": 1024, "the server's own process": 4096}


def resident_bytes(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * PAGE_BYTES


def bytes_per_request(course: list[tuple[int, int]]) -> float:
    """Slope of the straight line through (requests served, resident bytes)."""
    requests, sizes = zip(*course, strict=True)
    return statistics.linear_regression(requests, sizes).slope


def test_a_slope_is_that_of_the_growth_and_noise_is_none() -> None:
    assert bytes_per_request([(n, 10**8 + 4096 * n) for n in range(0, 900, 7)]) == 4096
    noise = [(n, 10**8 + (-1) ** n * 500_000) for n in range(3000)]
    assert abs(bytes_per_request(noise)) < 1024


@pytest.mark.slow
def test_memory_stays_flat_under_mixed_traffic(
    server: Server, request: pytest.FixtureRequest
) -> None:
    """``--soak-seconds`` shortens it; streams, whole answers, sampled ones, clients that leave, and
    requests that are refused take turns.
    """
    end = time.monotonic() + request.config.getoption("--soak-seconds", 600.0)
    served: list[str] = []
    wrong: list[str] = []

    def traffic(client: int) -> None:
        turn = client
        while time.monotonic() < end:
            turn += 1
            prompt = f"client {client} turn {turn} " * (1 + turn % 9)  # none comes twice
            try:
                if turn % 5 == 0:
                    with server.stream(prompt, max_tokens=3000, stream=True) as stream:
                        stream.next()
                    served.append("left")
                elif turn % 5 == 1:
                    if server.ask(prompt, temperature=-1.0).error is None:
                        wrong.append("a bad request was served")
                    served.append("refused")
                else:
                    options = {"temperature": 0.9, "seed": turn} if turn % 5 == 2 else {}
                    reply = server.ask(
                        prompt, max_tokens=40, stream=turn % 5 == 3, return_metrics=True, **options
                    )
                    if reply.error is not None:
                        wrong.append(reply.error)
                    served.append("answered")
            except Exception as error:
                wrong.append(repr(error))

    threads = [threading.Thread(target=traffic, args=(i,)) for i in range(CLIENTS)]
    for thread in threads:
        thread.start()
    own, python = server.processes()
    processes = {"the server's own process": own, "the Python process": python}
    samples: dict[str, list[tuple[int, int]]] = {name: [] for name in processes}
    while time.monotonic() < end:
        for name, pid in processes.items():
            samples[name].append((len(served), resident_bytes(pid)))
        time.sleep(1)
    for thread in threads:
        thread.join()
    print({kind: served.count(kind) for kind in sorted(set(served))})
    assert wrong == []
    server.metric_becomes("wmtp_lanes_used", lambda lanes: lanes == 0)
    assert server.metrics("wmtp_kv_pages_used")[""] == 0
    slopes = {}
    for name, course in samples.items():
        shown = [f"{size / 2**20:.1f}" for _, size in course[:: max(1, len(course) // 12)]]
        slopes[name] = bytes_per_request(course[round(len(course) * WARM_UP) :])
        print(f"{name}, MiB: {', '.join(shown)}; at last {slopes[name]:.0f} bytes per request")
    for name, most in MOST_BYTES_PER_REQUEST.items():
        assert slopes[name] < most, name


@pytest.mark.slow
def test_a_server_without_metrics_serves_and_ends_cleanly(
    settings: InstanceSettings, tmp_path: Path
) -> None:
    reason = triton_server.reason_to_skip()
    if reason is not None:
        pytest.skip(reason)
    write_python_repository(tmp_path / "repository", "wmtp", settings)
    server = Server(tmp_path / "repository", tmp_path / "log.txt", "--allow-metrics=false")
    try:
        assert server.ask("the old fox", max_tokens=4).error is None
        children = server.processes()
    finally:
        code = server.close()
    assert code == 0
    assert "successfully unloaded 'wmtp'" in server.log.read_text()
    assert not any(Path(f"/proc/{pid}").exists() for pid in children)
