"""``wmtp serve`` as a process: how it starts, what it refuses, and how it ends."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import textwrap
from pathlib import Path

import httpx
import openai
import pytest
import torch
from listening_sockets import listening_addresses
from tiny_model import add_byte_tokenizer, tiny_checkpoint

from tllm_wmtp import LLM, SamplingParams
from tllm_wmtp.cli import main
from tllm_wmtp.serving.openai.server import bind, is_loopback

TOKENS = 600
PATIENCE_S = 120.0


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("serve")
    return add_byte_tokenizer(tiny_checkpoint(folder, seed=51, vocab_size=257), ascii_only=True)


def test_a_stream_goes_on_to_its_end_after_sigterm(checkpoint: Path) -> None:
    command = [
        sys.executable, "-m", "tllm_wmtp.cli", "serve", str(checkpoint), "--port", "0", "--json",
        "--served-model-name", "tiny", "--depth", "4", "--window", "8", "--sink", "2",
        "--max-seq-len", "1024",
    ]  # fmt: skip
    environment = os.environ | {"OMP_NUM_THREADS": "1", "WMTP_API_KEY": "from the environment"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment, text=True) as server:
        assert server.stdout is not None
        state = json.loads(server.stdout.readline())
        assert state["url"].startswith("http://127.0.0.1:")
        listening = listening_addresses([server.pid])
        assert listening == {("127.0.0.1", int(state["url"].rsplit(":", 1)[1]))}
        key = environment["WMTP_API_KEY"]
        assert httpx.get(f"{state['url']}/v1/models", timeout=PATIENCE_S).status_code == 401
        with openai.OpenAI(
            base_url=f"{state['url']}/v1", api_key=key, max_retries=0, timeout=PATIENCE_S
        ) as client:
            stream = client.completions.create(
                model="tiny", prompt="the old fox", max_tokens=TOKENS, temperature=0, stream=True
            )
            text = next(stream).choices[0].text
            server.send_signal(signal.SIGTERM)
            choices = [chunk.choices[0] for chunk in stream]
        text += "".join(choice.text for choice in choices)
        assert choices[-1].finish_reason == "length"
        assert server.wait(PATIENCE_S) == 0
        with pytest.raises(httpx.ConnectError):
            httpx.get(f"{state['url']}/health")
    with LLM(checkpoint, max_seq_len=1024, max_batch_size=1) as llm:
        expected = llm.generate("the old fox", SamplingParams(max_tokens=TOKENS))
    assert text == expected.outputs[0].text


def test_an_address_in_use_is_refused_before_the_weights_are_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert main(["serve", str(tmp_path), "--port", str(port)]) == 2
    assert "choose another --host or --port" in capsys.readouterr().err


@pytest.mark.parametrize("device", ["cuda", "cuda:1", "tpu"])
def test_a_device_that_is_not_there_is_refused_before_the_weights_are_read(
    device: str, checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if device == "cuda" and torch.cuda.is_available():
        pytest.skip("this machine has a CUDA device")
    (tmp_path / "config.json").write_bytes((checkpoint / "config.json").read_bytes())
    assert main(["serve", str(tmp_path), "--port", "0", "--device", device]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert f"device '{device}'" in shown.err
    assert shown.err.count("\n") == 1


def test_only_addresses_of_this_machine_alone_pass_without_a_key_unsaid() -> None:
    for host, alone in (("127.0.0.1", True), ("localhost", True), ("0.0.0.0", False)):
        with bind(host, 0) as listener:
            assert is_loopback(listener) == alone


@pytest.mark.parametrize(
    "options",
    [
        ["--api-key", ""],
        ["--served-model-name", "\udcff"],
        ["--served-model-name", ""],
        ["--shutdown-timeout", "-1"],
        ["--shutdown-timeout", "nan"],
        ["--port", "70000"],
        ["--host", "no.such.host.invalid"],
        ["--arm", "dense", "--tree-width", "2"],
        ["--depth", "1"],
    ],
)
def test_what_no_server_can_have_is_refused(
    options: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["serve", str(tmp_path), *options]) == 2
    assert capsys.readouterr().err.count("; ") >= 1


def test_without_the_extra_the_package_works_and_says_what_to_install(tmp_path: Path) -> None:
    program = textwrap.dedent(
        """
        import sys
        for name in ("fastapi", "starlette", "uvicorn", "jinja2", "prometheus_client", "openai"):
            sys.modules[name] = None
        from tllm_wmtp.cli import main
        import tllm_wmtp.serving.openai
        sys.exit(main(["serve", sys.argv[1]]))
        """
    )
    run = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path)], capture_output=True, text=True
    )
    assert run.returncode == 2
    assert "pip install 'tllm-wmtp[serve]'" in run.stderr
    assert "fastapi" in run.stderr
