"""Listening, and stopping without breaking off what is under way."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import signal
import socket
import threading
from collections.abc import Callable, Iterator

import uvicorn

from tllm_wmtp.errors import ConfigError
from tllm_wmtp.llm import LLM
from tllm_wmtp.serving.openai.app import make_app, make_front
from tllm_wmtp.serving.openai.chat_template import ChatTemplate
from tllm_wmtp.serving.openai.metrics import ServerMetrics
from tllm_wmtp.serving.openai.service import Service
from tllm_wmtp.serving.openai.settings import ServerSettings

#: Seconds for requests that were ended at a stop to send their last words.
CLOSING_S = 5.0
#: A client that takes nothing of its answer for so long has left (Linux; elsewhere it may stay).
SEND_TIMEOUT_S = 60.0


def bind(host: str, port: int) -> socket.socket:
    """A socket with this address that does not listen yet; port 0 takes a free one.

    Raises:
        ConfigError: it cannot be had.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if hasattr(socket, "TCP_USER_TIMEOUT"):  # passed on to every connection
            milliseconds = round(SEND_TIMEOUT_S * 1e3)
            listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, milliseconds)
        listener.bind(address)
    except (OSError, OverflowError) as error:
        raise ConfigError(
            f"address {host}:{port} ({getattr(error, 'strerror', None) or error})",
            "the server must be able to listen there",
            "choose another --host or --port",
        ) from None
    return listener


def is_loopback(listener: socket.socket) -> bool:
    """Whether only this machine can reach it; a name may stand for any address."""
    return ipaddress.ip_address(listener.getsockname()[0].partition("%")[0]).is_loopback


def url(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


class Server(uvicorn.Server):
    """Serves one LLM until a signal, or until ``should_exit`` is set.

    The first SIGINT or SIGTERM ends the listening and waits for what is under way, as long as
    ``shutdown_timeout_s`` allows; a second SIGINT does not wait.

    Args:
        llm: the caller shuts it down afterwards.
        template: see :class:`tllm_wmtp.serving.openai.app.Front`.
        announce: called once the server answers.
    """

    def __init__(
        self,
        llm: LLM,
        settings: ServerSettings,
        template: ChatTemplate | None = None,
        announce: Callable[[], None] = lambda: None,
    ):
        metrics = ServerMetrics(settings.served_name)
        self._service = Service(llm, settings.max_concurrent, metrics)
        self._timeout_s, self._announce = settings.shutdown_timeout_s, announce
        super().__init__(
            uvicorn.Config(
                make_app(make_front(llm, self._service, settings, template)),
                loop="asyncio",
                http="h11",
                ws="none",
                lifespan="off",
                log_config=None,
                access_log=False,
                server_header=False,
                timeout_graceful_shutdown=round(self._timeout_s + CLOSING_S),
            )
        )

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Unlike uvicorn's own, it does not raise them again: an orderly stop is no failure."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        handled = (signal.SIGINT, signal.SIGTERM)
        before = {number: signal.signal(number, self.handle_exit) for number in handled}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._announce()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._service.draining = True
        loop = asyncio.get_running_loop()
        deadline = loop.call_later(self._timeout_s, self._service.end_all)
        try:
            await super().shutdown(sockets)
        finally:
            deadline.cancel()
