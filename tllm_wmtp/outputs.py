"""What a request gives back."""

from __future__ import annotations

from dataclasses import dataclass, field

from tllm_wmtp.errors import WmtpError
from tllm_wmtp.metrics import RequestMetrics
from tllm_wmtp.sampling import Logprobs


@dataclass
class CompletionOutput:
    """The tokens made so far.

    ``finish_reason`` is None while the request runs, then ``stop`` (an end-of-sequence id, a stop
    id or a stop string), ``length``, ``abort`` or ``error``. ``text`` is empty without a tokenizer.
    ``token_ids_diff`` and ``text_diff`` are what is new since the previous streamed output.
    ``logprobs`` has one entry per token, by token id, if ``SamplingParams.logprobs`` asked for it.
    """

    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    finish_reason: str | None = None
    token_ids_diff: list[int] = field(default_factory=list)
    text_diff: str = ""
    logprobs: Logprobs | None = None
    logprobs_diff: Logprobs | None = None


@dataclass
class RequestOutput:
    """A request's prompt, its one completion, and what was measured.

    ``error`` is set, and ``outputs[0].finish_reason`` is ``error``, when this request could not be
    served; other requests of the same call are not affected.
    """

    request_id: int
    prompt_token_ids: list[int]
    prompt: str | None
    outputs: list[CompletionOutput]
    metrics: RequestMetrics | None = None
    error: WmtpError | None = None

    @property
    def finished(self) -> bool:
        return self.outputs[0].finish_reason is not None
