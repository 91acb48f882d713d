"""A client of a decoupled Triton model with the tensors of docs/triton.md, over gRPC.

TensorRT-LLM's own models have the same names for what both have. What a model does not list, it is
not sent; an option that would change the output is then refused instead.
"""

from __future__ import annotations

import contextlib
import queue
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from time import perf_counter
from typing import TYPE_CHECKING, Any

import numpy as np

from tllm_wmtp.bench.inputs import Prompt
from tllm_wmtp.bench.sweep.cells import Cell, SamplingConfig, TargetConfig
from tllm_wmtp.bench.sweep.endpoint import TokenCounter
from tllm_wmtp.bench.sweep.streams import Piece, Stream
from tllm_wmtp.errors import ConfigError, RequestError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

NUMPY = {
    "INT32": np.int32, "INT64": np.int64, "UINT32": np.uint32, "UINT64": np.uint64,
    "FP32": np.float32, "BOOL": np.bool_, "BYTES": np.object_,
}  # fmt: skip


class TritonClient:
    """Args:
    tokenizer: counts tokens where the model gives no ids.

    Raises:
        ConfigError: tritonclient is not there.
    """

    def __init__(self, config: TargetConfig, tokenizer: Tokenizer):
        try:
            from tritonclient import grpc
        except ImportError as error:
            raise ConfigError(
                "a target triton",
                f"it needs a package that is not there ({error.name})",
                "pip install 'tllm-wmtp[bench]'",
            ) from None
        self._grpc, self._config, self._tokenizer = grpc, config, tokenizer
        self._inputs: dict[str, tuple[str, int]] | None = None

    def check(self) -> None:
        self._known_inputs()

    def ask(self, cell: Cell, prompt: Prompt, seed: int) -> Stream:
        tensors = self._tensors(self._values(cell, prompt, seed))
        arrived: queue.SimpleQueue[tuple[float, Any, Any]] = queue.SimpleQueue()
        pieces: list[Piece] = []
        ids: list[int] | None = []
        counter, histogram, prompt_tokens = TokenCounter(self._tokenizer), None, None
        with self._connected() as client:
            client.start_stream(lambda result, error: arrived.put((perf_counter(), result, error)))
            sent = perf_counter()
            client.async_stream_infer(self._config.model, tensors, enable_empty_final_response=True)
            while True:
                try:
                    at, result, error = arrived.get(timeout=self._config.timeout_s)
                except queue.Empty:
                    raise self._error(f"no answer in {self._config.timeout_s:g} s") from None
                if error is not None:
                    raise self._error(str(error))
                response = result.get_response()
                given = {o.name: result.as_numpy(o.name) for o in response.outputs}
                tokens = counter.add(_text(given.get("text_output")))
                if "token_ids" in given and ids is not None:
                    new = [int(each) for each in given["token_ids"].reshape(-1)]
                    ids, tokens = ids + new, len(new)
                elif tokens:
                    ids = None
                if tokens:
                    pieces.append(Piece(at, tokens))
                if "accepted_histogram" in given:
                    counts = given["accepted_histogram"].reshape(-1)
                    histogram = tuple(int(each) for each in counts)
                if "prompt_tokens" in given:
                    prompt_tokens = int(given["prompt_tokens"].item())
                if response.parameters["triton_final_response"].bool_param:
                    break
        return Stream(
            sent=sent,
            pieces=pieces,
            prompt_tokens=len(prompt.ids) if prompt_tokens is None else prompt_tokens,
            text=counter.text,
            token_ids=None if ids is None else tuple(ids),
            histogram=histogram,
        )

    def _values(self, cell: Cell, prompt: Prompt, seed: int) -> dict[str, Any]:
        """What is sent: the prompt and the options that ask for something; what our own models can
        be held to, if they list it: arm, depth, window and sinks."""
        known, sampling = self._known_inputs(), cell.sampling
        defaults = asdict(SamplingConfig())
        wanted = {
            name: value for name, value in asdict(sampling).items() if value != defaults[name]
        }
        wanted |= {"max_tokens": sampling.max_tokens, "stream": True}
        if wanted.keys() & {"top_k", "top_p", "min_p"}:  # without it, these mean a temperature of 1
            wanted["temperature"] = sampling.temperature
        if not sampling.greedy:
            wanted["seed"] = seed
        for name in wanted:
            if name not in known:
                raise ConfigError(
                    f"{name} {wanted[name]!r}",
                    f"the model {self._config.model!r} has no such input",
                    f"leave it out of the suite; it has {', '.join(sorted(known))}",
                )
        held: dict[str, Any] = {"return_metrics": True, "speculation": cell.arm}
        if cell.arm != "dense":
            held["depth"] = cell.depth
        if cell.arm == "windowed":
            held |= {"window": cell.window, "n_sink": cell.n_sink}
        held = {name: value for name, value in held.items() if name in known}
        return {"text_input": prompt.text, **wanted, **held}

    def _tensors(self, values: Mapping[str, Any]) -> list[Any]:
        """One value each, in as many dimensions as the model says."""
        made = []
        for name, value in values.items():
            kind, dimensions = self._known_inputs()[name]
            shown = value.encode() if isinstance(value, str) else value
            array: np.ndarray = np.full((1,) * dimensions, shown, NUMPY[kind])
            made.append(self._grpc.InferInput(name, list(array.shape), kind))
            made[-1].set_data_from_numpy(array)
        return made

    def _known_inputs(self) -> dict[str, tuple[str, int]]:
        """Type and number of dimensions of each input."""
        if self._inputs is None:
            with self._connected() as client:
                about = client.get_model_metadata(self._config.model)
            self._inputs = {each.name: (each.datatype, len(each.shape)) for each in about.inputs}
            if "text_input" not in self._inputs:
                raise ConfigError(
                    f"model {self._config.model!r}",
                    f"it has no text_input among {', '.join(self._inputs)}",
                    "name the model that takes text",
                )
        return self._inputs

    @contextlib.contextmanager
    def _connected(self) -> Iterator[Any]:
        client = self._grpc.InferenceServerClient(self._config.url)
        try:
            yield client
        except self._grpc.InferenceServerException as error:
            raise self._error(str(error)) from error
        finally:
            client.stop_stream(cancel_requests=True)
            client.close()

    def _error(self, message: str) -> RequestError:
        return RequestError(
            f"{self._config.url}: {' '.join(message.split())}",
            "the server must answer",
            "check the address, the model and the server's log, or raise timeout_s",
        )


def _text(given: np.ndarray | None) -> str:
    """New text; a character that a piece cuts through is not whole."""
    if given is None:
        return ""
    return b"".join(each if isinstance(each, bytes) else str(each).encode()
                    for each in given.reshape(-1)).decode("utf-8", "replace")  # fmt: skip
