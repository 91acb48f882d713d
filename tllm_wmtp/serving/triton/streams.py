"""All requests under way of one instance: they share one LLM, and each has a stream of its own."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import numpy as np

from tllm_wmtp.errors import RequestError
from tllm_wmtp.llm import LLM, RequestHandle
from tllm_wmtp.metrics import RequestMetrics
from tllm_wmtp.serving.measures import Prometheus
from tllm_wmtp.serving.triton.call import Call
from tllm_wmtp.serving.triton.replies import Reply

log = logging.getLogger(__name__)

#: Seconds between two looks at what the engine holds.
USAGE_PERIOD_S = 1.0
#: Seconds that :meth:`Streams.close` leaves ended requests to send their last response.
CLOSING_S = 10.0


class Client(Protocol):
    """The other end of one stream. Nothing may be sent after the last response or an error."""

    def send(self, tensors: dict[str, np.ndarray], last: bool) -> None: ...

    def fail(self, kind: str, message: str) -> None:
        """Ends the stream; ``kind`` is a name among Triton's error codes."""

    def has_left(self) -> bool: ...


@dataclass(frozen=True)
class _End:
    """How a stream ends; ``send`` sends its last response."""

    reason: str
    send: Callable[[], None]
    metrics: RequestMetrics | None = None


class Streams:
    """An event loop in a thread of its own: one task per request passes on what the LLM makes, and
    one ends the requests whose client has left.

    Args:
        llm: shared by all requests; the caller shuts it down before :meth:`close`.
        most: requests under way, running and waiting; further ones are refused.
        cancellation_check_s: seconds between two looks for clients that have left.
        prometheus: None shows no metrics.
    """

    def __init__(
        self, llm: LLM, most: int, cancellation_check_s: float, prometheus: Prometheus | None
    ):
        self._llm, self._most, self._check_s = llm, most, cancellation_check_s
        self._prometheus = prometheus
        self._open: set[Client] = set()
        self._handles: dict[Client, RequestHandle] = {}  # the event loop's
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="wmtp-streams", daemon=True)
        self._thread.start()

    def start(self, call: Call, client: Client) -> None:
        """Serves a call, or refuses it if too many are under way; returns at once."""
        if len(self._open) >= self._most:
            busy = RequestError(
                f"a request besides {len(self._open)} others",
                f"{self._most} may run and wait at the same time",
                "send it again later, or raise max_queue_size in config.pbtxt",
            )
            client.fail("UNAVAILABLE", str(busy))
            return
        self._open.add(client)
        asyncio.run_coroutine_threadsafe(self._serve(call, client), self._loop)

    def close(self) -> None:
        """Ends the thread once every stream has ended."""
        asyncio.run_coroutine_threadsafe(self._drained(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        watchers = [self._loop.create_task(self._watch_clients())]
        if self._prometheus is not None:
            watchers.append(self._loop.create_task(self._watch_engine(self._prometheus)))
        self._loop.run_forever()
        for watcher in watchers:
            watcher.cancel()
        self._loop.run_until_complete(asyncio.gather(*watchers, return_exceptions=True))
        self._loop.run_until_complete(self._loop.shutdown_default_executor())
        self._loop.close()

    async def _serve(self, call: Call, client: Client) -> None:
        try:
            end = await self._stream(call, client)
        except RequestError as error:
            end = _End("error", partial(client.fail, "INVALID_ARG", str(error)))
        except Exception as error:
            log.exception("a stream failed; the others go on")
            if client in self._handles:
                self._handles[client].abort()
            message = f"{type(error).__name__}: {error}"
            end = _End("error", partial(client.fail, "INTERNAL", message))
        try:
            await self._show(end)
            end.send()
        except Exception:
            log.exception("a stream could not be ended")
        finally:
            self._open.discard(client)
            self._handles.pop(client, None)

    async def _stream(self, call: Call, client: Client) -> _End:
        """Sends every response of a call but the last."""
        # A long prompt takes its time to tokenize; the other streams do not wait for it.
        handle = await asyncio.to_thread(self._llm.generate_async, call.prompt, call.params)
        self._handles[client] = handle
        reply = Reply(call)
        async for output in handle:
            reply.add(output)
            if call.stream and not output.finished:
                client.send(reply.take(output), last=False)
        reason = output.outputs[0].finish_reason or "error"
        if reason == "abort":
            send = partial(client.fail, "CANCELLED", "the request was ended before it was finished")
        elif reason == "error":
            # Without metrics the engine has refused it: it is the request that is wrong.
            kind = "INVALID_ARG" if output.metrics is None else "INTERNAL"
            send = partial(client.fail, kind, str(output.error))
        else:
            send = partial(client.send, reply.take(output), last=True)
        return _End(reason, send, output.metrics)

    async def _show(self, end: _End) -> None:
        """Metrics of a request that has ended, before its last response: see :meth:`_watch_engine`.

        The last one of all also shows the engine empty; nobody is left to make it wait for a step.
        """
        if self._prometheus is None:
            return
        self._prometheus.count(end.reason, end.metrics)
        if len(self._open) == 1:
            self._prometheus.show_usage(await asyncio.to_thread(self._llm.usage))
            self._prometheus.show_acceptance()

    async def _watch_clients(self) -> None:
        while True:
            await asyncio.sleep(self._check_s)
            for client, handle in list(self._handles.items()):
                if client.has_left():
                    handle.abort()

    async def _watch_engine(self, prometheus: Prometheus) -> None:
        """Shows every second what the engine holds, as long as a request is under way: Triton does
        not unload a model then, and to touch a metric during an unload can block for ever, with
        the interpreter's lock held."""
        while True:
            await asyncio.sleep(USAGE_PERIOD_S)
            if self._open:
                # Answered between two steps: a thread waits for it, not the streams.
                usage = await asyncio.to_thread(self._llm.usage)
                if self._open:
                    prometheus.show_usage(usage)
                    prometheus.show_acceptance()

    async def _drained(self) -> None:
        deadline = self._loop.time() + CLOSING_S
        while self._open and self._loop.time() < deadline:
            await asyncio.sleep(0.01)
