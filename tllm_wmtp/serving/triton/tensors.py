"""Names, types and shapes of what a client sends and gets: the one list behind config.pbtxt, the
reading of requests, the making of responses, and the manual.

Names are those of TensorRT-LLM's Triton models where it has the same thing.
"""

from __future__ import annotations

from dataclasses import dataclass

#: As many values as the client likes.
ANY = -1


@dataclass(frozen=True)
class Tensor:
    """One input or output; clients add a leading dimension of 1, the batch of one prompt.

    Args:
        size: how many values it has, or :data:`ANY`.
        option: the field of :class:`tllm_wmtp.SamplingParams` that it sets.
    """

    name: str
    data_type: str
    meaning: str
    size: int = 1
    option: str | None = None


INPUTS = (
    Tensor("text_input", "TYPE_STRING", "the prompt, UTF-8; the only one that must be there"),
    Tensor("max_tokens", "TYPE_INT32", "most output tokens (32)", option="max_tokens"),
    Tensor("stop_words", "TYPE_STRING", "strings that end the output; empty ones count as none",
           ANY, "stop"),
    Tensor("stop_token_ids", "TYPE_INT32", "token ids that end the output", ANY, "stop_token_ids"),
    Tensor("ignore_eos", "TYPE_BOOL", "go on after an end-of-sequence id", option="ignore_eos"),
    Tensor("temperature", "TYPE_FP32", "divides the logits; 0 is greedy, as is leaving all out",
           option="temperature"),
    Tensor("top_k", "TYPE_INT32", "draw from the most likely `top_k` tokens", option="top_k"),
    Tensor("top_p", "TYPE_FP32", "draw from the fewest likely tokens that reach it",
           option="top_p"),
    Tensor("min_p", "TYPE_FP32", "draw from tokens at least so many times as likely as the first",
           option="min_p"),
    Tensor("repetition_penalty", "TYPE_FP32", "of tokens in prompt and output (1)",
           option="repetition_penalty"),
    Tensor("presence_penalty", "TYPE_FP32", "of tokens in the output, -2 to 2 (0)",
           option="presence_penalty"),
    Tensor("frequency_penalty", "TYPE_FP32", "the same, once per occurrence (0)",
           option="frequency_penalty"),
    Tensor("seed", "TYPE_UINT64", "of the request's random numbers", option="seed"),
    Tensor("random_seed", "TYPE_UINT64", "another name of `seed`", option="seed"),
    Tensor("stream", "TYPE_BOOL", "one response per step instead of one in all (false)"),
    Tensor("return_log_probs", "TYPE_BOOL", "ask for the log-probabilities (false)"),
    Tensor("return_metrics", "TYPE_BOOL", "ask for the measurements (false)"),
    Tensor("speculation", "TYPE_STRING", "`dense`, `native` or `windowed`; must be the instance's"),
    Tensor("depth", "TYPE_INT32", "must be the instance's"),
    Tensor("window", "TYPE_INT32", "must be the instance's"),
    Tensor("n_sink", "TYPE_INT32", "must be the instance's"),
)  # fmt: skip

OUTPUTS = (
    Tensor("text_output", "TYPE_STRING", "text that is new since the previous response"),
    Tensor("token_ids", "TYPE_INT32", "likewise the token ids", ANY),
    Tensor("finish_reason", "TYPE_STRING", "`stop` or `length`; last response only"),
    Tensor("output_log_probs", "TYPE_FP32", "one per new token, if `return_log_probs`", ANY),
    Tensor("cum_log_probs", "TYPE_FP32", "their sum since the first token, if `return_log_probs`"),
    Tensor("prompt_tokens", "TYPE_INT32", "tokens of the prompt"),
    Tensor("output_tokens", "TYPE_INT32", "tokens made"),
    Tensor("accepted_histogram", "TYPE_INT64",
           "steps by the number of drafts they accepted, 0 to depth - 1", ANY),
    Tensor("acceptance_length", "TYPE_FP32", "tokens per step"),
    Tensor("ttft_ms", "TYPE_FP32", "time to the first token, waiting included"),
    Tensor("tpot_ms", "TYPE_FP32", "median step time over acceptance length"),
)  # fmt: skip

#: Outputs of the last response to a request with ``return_metrics``; those without a value (a
#: request of one token has made no step) are left out.
MEASUREMENTS = (
    "prompt_tokens",
    "output_tokens",
    "accepted_histogram",
    "acceptance_length",
    "ttft_ms",
    "tpot_ms",
)
