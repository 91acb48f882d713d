"""A client of OpenAI's ``/v1/completions``, streaming."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from dataclasses import asdict
from time import perf_counter
from typing import TYPE_CHECKING, Any

from tllm_wmtp.bench.inputs import Prompt
from tllm_wmtp.bench.sweep.cells import Cell, SamplingConfig, TargetConfig
from tllm_wmtp.bench.sweep.endpoint import TokenCounter
from tllm_wmtp.bench.sweep.streams import Piece, Stream
from tllm_wmtp.errors import ConfigError, RequestError

if TYPE_CHECKING:
    from types import ModuleType

    import httpx
    from tokenizers import Tokenizer

#: Longest part of a server's answer that an error shows.
MOST_SHOWN = 300


class OpenAiClient:
    """Prompts are sent as token ids, so that they have the length that was asked for.

    Args:
        tokenizer: counts tokens where the server gives no ids.

    Raises:
        ConfigError: httpx is not there, or the key's variable is not set.
    """

    def __init__(self, config: TargetConfig, tokenizer: Tokenizer):
        self._config, self._tokenizer = config, tokenizer
        self._base = (config.url or "").rstrip("/").removesuffix("/v1") + "/v1"
        self._headers = {}
        if config.api_key_env is not None:
            key = os.environ.get(config.api_key_env)
            if not key:
                raise ConfigError(
                    f"api_key_env {config.api_key_env!r}",
                    "the environment has no such variable, or an empty one",
                    "set it to the server's key",
                )
            self._headers["Authorization"] = f"Bearer {key}"

    def check(self) -> None:
        with self._connected() as http:
            response = http.get(f"{self._base}/models")
            self._refuse_failure(response.status_code, response.text)
            try:
                names = [card["id"] for card in response.json()["data"]]
            except (ValueError, KeyError, TypeError):
                raise ConfigError(
                    f"{self._base}/models",
                    "it does not list models as OpenAI's interface does",
                    "check the url",
                ) from None
        if self._config.model not in names:
            raise ConfigError(
                f"model {self._config.model!r}",
                f"{self._config.url} serves {', '.join(map(repr, names))}",
                "use one of these as the target's model",
            )

    def ask(self, cell: Cell, prompt: Prompt, seed: int) -> Stream:
        body = self._body(cell.sampling, prompt, seed)
        pieces: list[Piece] = []
        ids: list[int] | None = [] if self._config.return_token_ids else None
        counter = TokenCounter(self._tokenizer)
        usage: dict[str, Any] = {}
        with self._connected() as http:
            sent = perf_counter()
            with http.stream("POST", f"{self._base}/completions", json=body) as response:
                if response.status_code != 200:
                    response.read()
                    self._refuse_failure(response.status_code, response.text)
                for event in events(response.iter_lines()):
                    now = perf_counter()
                    usage = event.get("usage") or usage
                    for choice in event.get("choices", ()):
                        tokens = counter.add(choice.get("text") or "")
                        if ids is not None:
                            given = choice.get("token_ids")
                            if given is None and tokens:
                                raise _without_ids()
                            ids += given or ()
                            tokens = len(given or ())
                        if tokens:
                            pieces.append(Piece(now, tokens))
        details = usage.get("prompt_tokens_details") or {}
        return Stream(
            sent=sent,
            pieces=pieces,
            prompt_tokens=usage.get("prompt_tokens") or len(prompt.ids),
            text=counter.text,
            token_ids=None if ids is None else tuple(ids),
            output_tokens=usage.get("completion_tokens"),
            cached_tokens=details.get("cached_tokens"),
        )

    def _body(self, sampling: SamplingConfig, prompt: Prompt, seed: int) -> dict[str, Any]:
        """Options that ask for nothing are left out: not every server knows all of them."""
        defaults = asdict(SamplingConfig())
        chosen = {
            name: value for name, value in asdict(sampling).items() if value != defaults[name]
        }
        body = {
            "model": self._config.model,
            "prompt": prompt.ids,
            "stream": True,
            "stream_options": {"include_usage": True},
            **chosen,
            "max_tokens": sampling.max_tokens,
            "temperature": sampling.temperature,
        }
        if not sampling.greedy:
            body["seed"] = seed
        if self._config.return_token_ids:
            body["return_token_ids"] = True
        return body

    @contextlib.contextmanager
    def _connected(self) -> Iterator[httpx.Client]:
        httpx = _httpx()
        timeout = httpx.Timeout(self._config.timeout_s, connect=min(30.0, self._config.timeout_s))
        try:
            with httpx.Client(headers=self._headers, timeout=timeout) as http:
                yield http
        except httpx.HTTPError as error:
            raise RequestError(
                f"{self._config.url}: {type(error).__name__} {error}".rstrip(),
                "the server must answer",
                "check the url and the server, or raise timeout_s",
            ) from error

    def _refuse_failure(self, status: int, text: str) -> None:
        if status != 200:
            raise RequestError(
                f"status {status} of {self._config.url}: {text[:MOST_SHOWN]}",
                "the server must answer",
                "correct what it names; return_token_ids: false asks for no token ids",
            )


def events(lines: Iterator[str]) -> Iterator[dict[str, Any]]:
    """The objects of a stream of server-sent events, until ``[DONE]``.

    Raises:
        RequestError: the server reports an error, sends no JSON, or ends too soon.
    """
    for line in lines:
        if not line.startswith("data:"):
            continue
        content = line.removeprefix("data:").strip()
        if content == "[DONE]":
            return
        try:
            event = json.loads(content)
        except ValueError:
            event = None
        if not isinstance(event, dict):
            raise _broken(f"event {content[:MOST_SHOWN]!r}", "an event is a JSON object")
        if "error" in event:
            shown = json.dumps(event["error"])[:MOST_SHOWN]
            raise _broken(f"error {shown}", "the stream must come to its end")
        yield event
    raise _broken("a stream without [DONE]", "it must come to its end")


def _broken(value: str, rule: str) -> RequestError:
    return RequestError(value, rule, "see the server's log")


def _without_ids() -> RequestError:
    return RequestError(
        "text without token_ids",
        "the server was asked for token ids, and gives none",
        "add return_token_ids: false to the target; tokens are then counted in the text",
    )


def _httpx() -> ModuleType:
    try:
        import httpx
    except ImportError as error:
        raise ConfigError(
            "a target openai",
            f"it needs a package that is not there ({error.name})",
            "pip install 'tllm-wmtp[bench]'",
        ) from None
    return httpx
