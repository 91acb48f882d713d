"""One server for all tests of this folder, over a random checkpoint that speaks ASCII.

The folder is not called ``triton``: its parent is on the import path, where torch looks for that.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import triton_server
from tiny_model import add_byte_tokenizer, tiny_checkpoint
from triton_server import DEPTH, LANES, MAX_SEQ_LEN, N_SINK, QUEUE, WINDOW, Server

from tllm_wmtp import LLM, MtpConfig
from tllm_wmtp.serving.triton.repository import write_python_repository
from tllm_wmtp.serving.triton.settings import InstanceSettings


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--soak-seconds", type=float, default=600, help="length of the soak test")


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tiny_checkpoint(tmp_path_factory.mktemp("served"), seed=71, vocab_size=257)
    return add_byte_tokenizer(folder, ascii_only=True)


@pytest.fixture(scope="session")
def settings(checkpoint: Path) -> InstanceSettings:
    return InstanceSettings(
        model=str(checkpoint),
        depth=DEPTH,
        window=WINDOW,
        n_sink=N_SINK,
        max_batch_size=LANES,
        max_seq_len=MAX_SEQ_LEN,
        max_queue_size=QUEUE,
        kv_tokens=LANES * 1024,
    )


@pytest.fixture(scope="session")
def server(
    settings: InstanceSettings, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    reason = triton_server.reason_to_skip()
    if reason is not None:
        pytest.skip(reason)
    folder = tmp_path_factory.mktemp("triton")
    write_python_repository(folder / "repository", "wmtp", settings)
    server = Server(folder / "repository", folder / "log.txt")
    yield server
    server.close()


@pytest.fixture(scope="session")
def llm(checkpoint: Path) -> Iterator[LLM]:
    """The same engine without a server."""
    torch.set_num_threads(1)
    speculation = MtpConfig(DEPTH, WINDOW, N_SINK)
    with LLM(checkpoint, speculation, max_batch_size=4, max_seq_len=MAX_SEQ_LEN) as llm:
        yield llm
