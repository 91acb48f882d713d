"""The public interface: a model, requests, outputs. It mirrors TensorRT-LLM's ``LLM``."""

from __future__ import annotations

import asyncio
import logging
import numbers
import operator
import queue
import threading
import weakref
from collections.abc import AsyncIterator, Callable, Generator, Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar, overload

import torch

from tllm_wmtp.checkpoint.loader import load_model, read_config
from tllm_wmtp.config import EngineConfig, KvCacheConfig, MtpConfig
from tllm_wmtp.errors import ConfigError, RequestError, WmtpError
from tllm_wmtp.executor.engine import Engine, as_request_error
from tllm_wmtp.executor.request import Request, Update
from tllm_wmtp.metrics import EngineMetrics, EngineUsage
from tllm_wmtp.outputs import CompletionOutput, RequestOutput
from tllm_wmtp.sampling import SamplingParams

log = logging.getLogger(__name__)

Prompt = str | Sequence[int]
Answer = TypeVar("Answer")


class RequestHandle:
    """A request under way: wait for it, iterate over it, or await it.

    ``for output in handle`` and ``async for output in handle`` yield the output each time it has
    grown, the last time with a finish reason; ``handle.result()`` and ``await handle`` give the
    finished output. A request that could not be served ends with ``finish_reason`` ``error`` and
    its ``error`` set; nothing is raised. One consumer per handle; one that stops early leaves the
    request running until ``abort()``.
    """

    def __init__(self, llm: LLM, prompt: str | None, prompt_ids: list[int]):
        self._llm = llm  # lives at least as long as its requests
        self._updates: queue.SimpleQueue[Update] = queue.SimpleQueue()
        self._arrival = threading.Lock()  # guards _wake
        self._wake: Callable[[], None] | None = None
        self._request: Request | None = None
        self._output = RequestOutput(-1, prompt_ids, prompt, [CompletionOutput()])

    def result(self, timeout: float | None = None) -> RequestOutput:
        """The finished output.

        Raises:
            TimeoutError: ``timeout`` seconds passed without a new token.
        """
        while not self._output.finished:
            try:
                self._apply(self._updates.get(timeout=timeout))
            except queue.Empty:
                raise TimeoutError(f"no new token in {timeout} s") from None
        return self._output

    def abort(self) -> None:
        """Ends the request early; its output ends with ``finish_reason`` ``abort``."""

        def abort() -> None:
            if self._request is not None:
                self._llm._engine.abort(self._request)

        self._llm._worker.call(abort)

    def __iter__(self) -> Iterator[RequestOutput]:
        while not self._output.finished:
            yield self._apply(self._updates.get())

    async def __aiter__(self) -> AsyncIterator[RequestOutput]:
        loop = asyncio.get_running_loop()
        arrived = asyncio.Event()

        def wake() -> None:
            loop.call_soon_threadsafe(arrived.set)

        with self._arrival:
            self._wake = wake
        try:
            while not self._output.finished:
                try:
                    update = self._updates.get_nowait()
                except queue.Empty:
                    await arrived.wait()
                    arrived.clear()
                    continue
                yield self._apply(update)
        finally:
            with self._arrival:
                self._wake = None

    def __await__(self) -> Generator[Any, None, RequestOutput]:
        return self._finished().__await__()

    async def _finished(self) -> RequestOutput:
        async for _ in self:
            pass
        return self._output

    def _push(self, update: Update) -> None:
        self._updates.put(update)
        with self._arrival:
            if self._wake is None:
                return
            try:
                self._wake()
            except RuntimeError:  # the consumer's event loop has closed
                self._wake = None

    def _refuse(self, error: WmtpError) -> None:
        self._output.error = error
        self._push(Update([], "", "error"))

    def _apply(self, update: Update) -> RequestOutput:
        completion = self._output.outputs[0]
        completion.token_ids.extend(update.token_ids)
        completion.text += update.text
        completion.token_ids_diff, completion.text_diff = update.token_ids, update.text
        completion.logprobs_diff = update.logprobs
        if update.logprobs is not None:
            completion.logprobs = (completion.logprobs or []) + update.logprobs
        completion.finish_reason = update.finish_reason
        if self._request is not None:
            self._output.request_id = self._request.request_id
            self._output.metrics = self._request.metrics
            self._output.error = self._request.error
        return self._output


class LLM:
    """Serves one checkpoint.

    Args:
        model: a Hugging Face checkpoint directory.
        speculation: None (dense), ``MtpConfig(...)`` (windowed draft) or ``MtpConfig.native()``
            (full-context draft). It changes the speed, never the output.
        kv_cache_config: the target's KV pool, and what later requests may reuse of it.
        max_batch_size: requests that run at the same time.
        max_seq_len: most tokens per request, prompt and output; the model's limit by default.
        dtype: ``float32`` or ``bfloat16``, of weights and computation.
        device: ``cpu`` or ``cuda``.
        prefill_chunk: most prompt tokens per forward.
        prefill_pruning: leave out rows of the last layer that nobody reads (exact).

    Raises:
        ConfigError, CheckpointError: before anything large is allocated.

    Requests run in a background thread, batched together whoever submitted them. Close with
    ``shutdown()`` or use as a context manager.
    """

    def __init__(
        self,
        model: str | Path,
        speculation: MtpConfig | None = None,
        kv_cache_config: KvCacheConfig | None = None,
        max_batch_size: int = 8,
        max_seq_len: int | None = None,
        dtype: str = "float32",
        device: str = "cpu",
        prefill_chunk: int = 2048,
        prefill_pruning: bool = True,
    ):
        config = EngineConfig(
            speculation=speculation,
            kv_cache=kv_cache_config or KvCacheConfig(),
            max_batch_size=max_batch_size,
            max_seq_len=max_seq_len,
            dtype=dtype,
            device=device,
            prefill_chunk=prefill_chunk,
            prefill_pruning=prefill_pruning,
        )
        if str(device).startswith("cuda") and not torch.cuda.is_available():
            raise ConfigError(
                f"device {str(device)!r}",
                "this machine has no usable CUDA device",
                "use device='cpu'",
            )
        config.resolved(read_config(model).max_position_embeddings)  # refused before weights load
        loaded = load_model(model, getattr(torch, dtype), str(device), speculation is not None)
        self.tokenizer = loaded.tokenizer
        self._engine = Engine(loaded, config)
        self._worker = _Worker(self._engine)
        # An LLM that is dropped, or alive at the process's exit, is shut down.
        self._finalizer = weakref.finalize(self, self._worker.stop)

    @property
    def config(self) -> EngineConfig:
        """The configuration with every default made concrete."""
        return self._engine.config

    @property
    def arm(self) -> str:
        """``dense``, ``native`` or ``windowed``."""
        return self._engine.arm

    @overload
    def generate(
        self, prompts: str | list[int], sampling_params: SamplingParams | None = None
    ) -> RequestOutput: ...

    @overload
    def generate(
        self,
        prompts: list[str] | list[list[int]] | list[str | list[int]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[RequestOutput]: ...

    def generate(
        self,
        prompts: str | list[int] | list[str] | list[list[int]] | list[str | list[int]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> RequestOutput | list[RequestOutput]:
        """Answers one prompt (text or token ids) or several, in order.

        Of several, one that cannot be served comes back with its ``error`` set and no tokens,
        while the others are answered.

        Raises:
            RequestError: the only prompt cannot be served.
        """
        if hasattr(prompts, "tolist"):  # an array or a tensor
            prompts = prompts.tolist()
        single = isinstance(prompts, str) or (
            len(prompts) > 0 and isinstance(prompts[0], numbers.Integral)
        )
        batch: Sequence[Any] = [prompts] if single else prompts
        if sampling_params is None or isinstance(sampling_params, SamplingParams):
            params = [sampling_params or SamplingParams()] * len(batch)
        elif isinstance(sampling_params, (list, tuple)):
            params = list(sampling_params)
        else:
            raise _no_sampling_params(sampling_params)
        if len(params) != len(batch):
            raise RequestError(
                f"{len(params)} sampling_params for {len(batch)} prompts",
                "there must be one for all or one for each",
                "pass a single SamplingParams",
            )
        handles = self._submit(list(zip(batch, params, strict=True)))
        try:
            outputs = [handle.result() for handle in handles]
        except BaseException:
            for handle in handles:
                handle.abort()
            raise
        if not single:
            return outputs
        if outputs[0].error is not None:
            raise outputs[0].error
        return outputs[0]

    def generate_async(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None
    ) -> RequestHandle:
        """Starts one request and returns at once; see :class:`RequestHandle`."""
        return self._submit([(prompt, sampling_params or SamplingParams())])[0]

    def metrics(self) -> EngineMetrics:
        """Acceptance and times over the latest requests, those under way included."""
        return self._worker.ask(self._engine.metrics)

    def usage(self) -> EngineUsage:
        """Requests, pages and lanes that are in use now."""
        return self._worker.ask(self._engine.usage)

    def shutdown(self) -> None:
        """Ends the background thread; requests under way end with ``abort``."""
        self._worker.stop()

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.shutdown()

    def _submit(self, work: list[tuple[Prompt, SamplingParams]]) -> list[RequestHandle]:
        for _, params in work:
            if not isinstance(params, SamplingParams):
                raise _no_sampling_params(params)
        prepared = [(self._handle(prompt), params) for prompt, params in work]

        def enqueue() -> None:
            for handle, params in prepared:
                if handle._output.error is None:
                    self._enqueue(handle, params)

        self._worker.submit(enqueue)
        return [handle for handle, _ in prepared]

    def _handle(self, prompt: Prompt) -> RequestHandle:
        text = prompt if isinstance(prompt, str) else None
        try:
            ids, error = self._token_ids(prompt), None
        except RequestError as refusal:
            ids, error = [], refusal
        handle = RequestHandle(self, text, ids)
        if error is not None:
            handle._refuse(error)
        return handle

    def _token_ids(self, prompt: Prompt) -> list[int]:
        if not isinstance(prompt, str):
            try:
                return [operator.index(i) for i in prompt]
            except TypeError as error:
                raise RequestError(
                    f"a prompt of type {type(prompt).__name__} ({error})",
                    "a prompt is text or a sequence of token ids",
                    "pass a str or a list of int",
                ) from None
        if self.tokenizer is None:
            raise RequestError(
                "a text prompt",
                "the checkpoint has no tokenizer.json",
                "pass token ids, or add the file to the directory",
            )
        try:
            return list(self.tokenizer.encode(prompt).ids)
        except Exception as error:  # half of a surrogate pair, for one
            raise RequestError(
                f"a text prompt ({error})",
                "the tokenizer must be able to encode it",
                "pass valid Unicode text, or token ids",
            ) from error

    def _enqueue(self, handle: RequestHandle, params: SamplingParams) -> None:
        prompt_ids = handle._output.prompt_token_ids
        try:
            handle._request = self._engine.submit(prompt_ids, params, handle._push)
        except Exception as error:
            handle._refuse(as_request_error(error))


def _no_sampling_params(given: object) -> RequestError:
    return RequestError(
        f"sampling_params {given!r}",
        "it must be a SamplingParams, or one for each prompt",
        "pass SamplingParams(max_tokens=...)",
    )


class _Worker:
    """The engine's thread. It holds no LLM, so that one nobody refers to can be collected."""

    def __init__(self, engine: Engine):
        self._engine = engine
        self._calls: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._closed = False
        self._submission = threading.Lock()  # nothing is submitted after the last call
        self._thread = threading.Thread(target=self._run, name="wmtp-engine", daemon=True)
        self._thread.start()

    def call(self, call: Callable[[], object]) -> None:
        """Runs ``call`` in the engine's thread, between steps; never if that has ended."""
        self._calls.put(call)

    def submit(self, call: Callable[[], object]) -> None:
        """The same for work that somebody waits for.

        Raises:
            RequestError: the thread has ended, or belongs to another process.
        """
        with self._submission:
            if self._closed:
                raise RequestError(
                    "a request after shutdown()", "the engine is gone", "make a new LLM"
                )
            if not self._thread.is_alive():
                raise RequestError(
                    "a request in a forked process",
                    "an LLM serves only the process that made it",
                    "make the LLM after the fork, or start processes with 'spawn'",
                )
            self.call(call)

    def ask(self, call: Callable[[], Answer]) -> Answer:
        """What ``call`` returns between steps; at once from the thread itself or after its end."""
        answer: Future[Answer] = Future()

        def run() -> None:
            try:
                answer.set_result(call())
            except BaseException as error:
                answer.set_exception(error)

        if threading.current_thread() is self._thread:
            return call()
        with self._submission:
            alive = not self._closed and self._thread.is_alive()
            if alive:
                self.call(run)
        return answer.result() if alive else call()

    def stop(self) -> None:
        """Ends the thread after the step under way; requests that are left end with ``abort``."""
        with self._submission:
            if not self._closed:
                self._closed = True
                self._calls.put(None)
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _run(self) -> None:
        # The OpenMP team of this thread is its own: give it the size that the process chose.
        torch.set_num_threads(torch.get_num_threads())
        while (call := self._next()) is not None:
            try:
                call()
            except Exception as error:
                log.exception("the engine failed; its requests end, later ones are served")
                self._engine.end_all("error", error)
            call = None  # it may refer to requests that are over
        self._engine.end_all("abort")

    def _next(self) -> Callable[[], object] | None:
        """Every waiting call comes before the next step."""
        try:
            return self._calls.get(block=not self._engine.has_work)
        except queue.Empty:
            return self._engine.step
