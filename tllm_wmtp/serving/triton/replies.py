"""From the LLM's outputs to the tensors of a response."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from tllm_wmtp.metrics import RequestMetrics
from tllm_wmtp.outputs import RequestOutput
from tllm_wmtp.sampling import Logprobs
from tllm_wmtp.serving.triton.call import Call
from tllm_wmtp.serving.triton.tensors import MEASUREMENTS, OUTPUTS

NUMPY = {
    "TYPE_STRING": np.object_,
    "TYPE_INT32": np.int32,
    "TYPE_INT64": np.int64,
    "TYPE_FP32": np.float32,
}


class Reply:
    """The responses to one call, one after the other; ``text``, ``token_ids`` and log-probabilities
    gather until they are taken."""

    def __init__(self, call: Call):
        self._call = call
        self._text, self._token_ids = "", list[int]()
        self._log_probs, self._cum_log_probs = list[float](), 0.0

    def add(self, output: RequestOutput) -> None:
        """Takes up what is new in a streamed output."""
        completion = output.outputs[0]
        self._text += completion.text_diff
        self._token_ids += completion.token_ids_diff
        if completion.logprobs_diff is not None:
            self._log_probs += _of_tokens(completion.token_ids_diff, completion.logprobs_diff)

    def take(self, output: RequestOutput) -> dict[str, np.ndarray]:
        """The next response's tensors, shaped ``[1, n]``; the last one's if ``output`` is
        finished."""
        self._cum_log_probs += sum(self._log_probs)
        values: dict[str, Any] = {"text_output": self._text, "token_ids": self._token_ids}
        if self._call.return_log_probs:
            values["output_log_probs"] = self._log_probs
            values["cum_log_probs"] = self._cum_log_probs
        if output.finished:
            values["finish_reason"] = output.outputs[0].finish_reason
            if self._call.return_metrics and output.metrics is not None:
                values |= measurements(output.metrics)
        self._text, self._token_ids, self._log_probs = "", [], []
        return as_tensors(values)


def measurements(metrics: RequestMetrics) -> dict[str, Any]:
    """The values of :data:`MEASUREMENTS` of a finished request; None where there is none."""
    tpot_s, ttft_s = metrics.tpot_s, metrics.ttft_s
    values = {
        "prompt_tokens": metrics.prompt_tokens,
        "output_tokens": metrics.output_tokens,
        "accepted_histogram": metrics.accepted_histogram,
        "acceptance_length": metrics.acceptance_length,
        "ttft_ms": None if ttft_s is None else ttft_s * 1e3,
        "tpot_ms": None if tpot_s is None else tpot_s * 1e3,
    }
    return {name: values[name] for name in MEASUREMENTS}


def as_tensors(values: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """In the order and with the types of :data:`OUTPUTS`; None values are left out."""
    return {
        tensor.name: _array(values[tensor.name], NUMPY[tensor.data_type])
        for tensor in OUTPUTS
        if values.get(tensor.name) is not None
    }


def _array(value: Any, kind: Any) -> np.ndarray:
    several = value if isinstance(value, list) else [value]
    return np.array([[v.encode() if isinstance(v, str) else v for v in several]], dtype=kind)


def _of_tokens(token_ids: list[int], report: Logprobs) -> list[float]:
    return [entry[token].logprob for token, entry in zip(token_ids, report, strict=True)]
