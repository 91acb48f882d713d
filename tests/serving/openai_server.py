"""A server of OpenAI's interface in a thread, and what asks it."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
from tiny_model import add_byte_tokenizer, tiny_checkpoint

from tllm_wmtp import LLM
from tllm_wmtp.serving.openai.chat_template import ChatTemplate
from tllm_wmtp.serving.openai.server import Server, bind, url
from tllm_wmtp.serving.openai.settings import ServerSettings

TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}{{ lead | default('assistant') }}:{% endif %}"
)
CHAT = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hello"}]
CHAT_TEXT = "system: be brief\nuser: hello\nassistant:"
#: Seconds that a busy machine may take for what is done at once.
PATIENCE_S = 30.0


def served_checkpoint(folder: Path, ascii_only: bool = True) -> Path:
    """A random checkpoint with a tokenizer of bytes and a chat template."""
    add_byte_tokenizer(tiny_checkpoint(folder, seed=51, vocab_size=257), ascii_only=ascii_only)
    config = {"bos_token": "<|end|>", "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


@contextmanager
def running(
    llm: LLM, checkpoint: Path, host: str = "127.0.0.1", **settings: Any
) -> Iterator[tuple[str, Server]]:
    """A server on a free port, in a thread."""
    with bind(host, 0) as listener:
        address, up = url(listener), threading.Event()
        server = Server(
            llm,
            ServerSettings(**{"served_name": "tiny"} | settings),
            ChatTemplate.of(checkpoint),
            up.set,
        )
        thread = threading.Thread(target=server.run, args=([listener],))
        thread.start()
        try:
            assert up.wait(PATIENCE_S)
            yield address, server
        finally:
            server.should_exit = True
            thread.join(PATIENCE_S)
    assert not thread.is_alive()


def metric(address: str, name: str, **labels: str) -> float:
    for line in get(f"{address}/metrics").text.splitlines():
        if line.startswith(f"{name}{{") and all(f'{k}="{v}"' in line for k, v in labels.items()):
            return float(line.rsplit(" ", 1)[1])
    raise AssertionError(f"no {name} {labels}")


def wait_until(condition: Any, seconds: float = PATIENCE_S) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def get(address: str, headers: dict[str, Any] | None = None) -> httpx.Response:
    return httpx.get(address, headers=headers, timeout=PATIENCE_S)


def post(address: str, path: str = "completions", **body: Any) -> httpx.Response:
    headers = {"Content-Type": "application/json"}
    content = json.dumps(body)  # escapes what is not ASCII, and what no encoding has
    return httpx.post(f"{address}/v1/{path}", content=content, headers=headers, timeout=PATIENCE_S)
