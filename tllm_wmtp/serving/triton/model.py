"""What Triton's Python backend calls. Only importable inside it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import triton_python_backend_utils as backend

from tllm_wmtp.errors import ConfigError, WmtpError
from tllm_wmtp.serving.triton.call import read_call
from tllm_wmtp.serving.triton.settings import InstanceSettings

if TYPE_CHECKING:
    from tllm_wmtp.metrics import EngineUsage
    from tllm_wmtp.serving.measures import Prometheus


class TritonPythonModel:
    """One instance: one LLM, which batches the requests that Triton hands over one by one."""

    # The runtime is imported in initialize(): Triton also loads this file for its configuration.

    def initialize(self, args: dict[str, str]) -> None:
        from tllm_wmtp import LLM
        from tllm_wmtp.serving.triton.streams import Streams

        _check_arrays()
        parameters = json.loads(args["model_config"]).get("parameters", {})
        self._settings = settings = InstanceSettings.from_parameters(parameters)
        device = settings.device
        if device == "cuda" and args["model_instance_kind"] == "GPU":
            device = f"cuda:{args['model_instance_device_id']}"
        config = settings.engine_config()
        self._llm = LLM(
            settings.model,
            speculation=config.speculation,
            kv_cache_config=config.kv_cache,
            max_batch_size=config.max_batch_size,
            max_seq_len=config.max_seq_len,
            dtype=config.dtype,
            device=device,
        )
        most_tokens = self._llm.config.max_seq_len
        if most_tokens is None:
            raise RuntimeError("the engine config has not been resolved")
        self._prompt_bytes = settings.prompt_bytes(most_tokens)
        self._streams = Streams(
            self._llm,
            settings.max_batch_size + settings.max_queue_size,
            settings.cancellation_check_period_ms / 1e3,
            _prometheus(args, self._llm.usage()),
        )
        backend.Logger.log_info(
            f"{args['model_name']}: {settings.model}, {self._llm.arm}, up to "
            f"{settings.max_batch_size} requests of {most_tokens} tokens"
        )

    def execute(self, requests: Sequence[Any]) -> None:
        """Starts the requests and returns; their responses come from the streams."""
        for request in requests:
            client = _Client(request)
            try:
                tensors = {tensor.name(): tensor.as_numpy() for tensor in request.inputs()}
                call = read_call(tensors, request.parameters(), self._settings, self._prompt_bytes)
                self._streams.start(call, client)
            except WmtpError as error:
                client.fail("INVALID_ARG", str(error))
            except Exception as error:
                backend.Logger.log_error(f"{type(error).__name__}: {error}")
                client.fail("INTERNAL", f"{type(error).__name__}: {error}")

    def finalize(self) -> None:
        self._llm.shutdown()
        self._streams.close()


class _Client:
    """One request's sender, as :class:`tllm_wmtp.serving.triton.streams.Client`."""

    def __init__(self, request: Any):
        self._sender = request.get_response_sender()

    def send(self, tensors: dict[str, np.ndarray], last: bool) -> None:
        outputs = [backend.Tensor(name, array) for name, array in tensors.items()]
        self._sender.send(backend.InferenceResponse(outputs), flags=_flags(last))

    def fail(self, kind: str, message: str) -> None:
        error = backend.TritonError(message, getattr(backend.TritonError, kind))
        self._sender.send(backend.InferenceResponse(error=error), flags=_flags(last=True))

    def has_left(self) -> bool:
        return bool(self._sender.is_cancelled())


def _check_arrays() -> None:
    """A server built for numpy 1 misreads the arrays of numpy 2, and would end at the first string.

    Raises:
        ConfigError: it does.
    """
    import torch

    sent = torch.arange(3, dtype=torch.int32)
    if backend.Tensor.from_dlpack("probe", sent).as_numpy().tolist() != sent.tolist():
        raise ConfigError(
            f"numpy {np.__version__}",
            "the Python backend of this server was built for numpy 1 and misreads its arrays",
            "install numpy<2 in the environment that the server uses, or take a newer server",
        )


def _flags(last: bool) -> int:
    return int(backend.TRITONSERVER_RESPONSE_COMPLETE_FINAL) if last else 0


def _prometheus(args: dict[str, str], usage: EngineUsage) -> Prometheus | None:
    from tllm_wmtp.serving.measures import Prometheus

    labels = {"model": args["model_name"], "version": args["model_version"]}
    try:
        prometheus = Prometheus(backend, labels)
    except backend.TritonModelException as error:  # a server built without them
        backend.Logger.log_warn(f"no metrics of {args['model_name']}: {error}")
        return None
    prometheus.show_usage(usage)
    return prometheus
