"""From a request's tensors to what the LLM is asked."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from tllm_wmtp.errors import RequestError
from tllm_wmtp.sampling import SamplingParams
from tllm_wmtp.serving.triton.settings import InstanceSettings
from tllm_wmtp.serving.triton.tensors import ANY, INPUTS, Tensor


@dataclass(frozen=True)
class Call:
    """One request as its client asked for it."""

    prompt: str
    params: SamplingParams
    stream: bool
    return_log_probs: bool
    return_metrics: bool


def read_call(
    tensors: Mapping[str, np.ndarray],
    parameters: str,
    settings: InstanceSettings,
    prompt_bytes: int,
) -> Call:
    """The call that a request makes.

    Args:
        tensors: those of :data:`INPUTS` that the request has; strings as UTF-8 bytes.
        parameters: the request's parameters, a JSON object.
        prompt_bytes: longest prompt.

    Raises:
        RequestError: it cannot be served.
    """
    _refuse_parameters(parameters)
    given = {
        tensor.name: _read(tensor, tensors[tensor.name], prompt_bytes)
        for tensor in INPUTS
        if tensor.name in tensors
    }
    _refuse_other_speculation(given, settings)
    if {"seed", "random_seed"} <= given.keys():
        raise RequestError(
            f"seed {given['seed']} and random_seed {given['random_seed']}",
            "they are two names of one thing",
            "leave random_seed out",
        )
    options = {t.option: given[t.name] for t in INPUTS if t.option and t.name in given}
    if "stop" in options:
        # TensorRT-LLM's clients say "no stop words" with an empty one.
        options["stop"] = tuple(word for word in options["stop"] if word)
    with_log_probs = given.get("return_log_probs", False)
    return Call(
        prompt=given.get("text_input", ""),
        params=SamplingParams(**options, logprobs=0 if with_log_probs else None),
        stream=given.get("stream", False),
        return_log_probs=with_log_probs,
        return_metrics=given.get("return_metrics", False),
    )


def _read(tensor: Tensor, values: np.ndarray, prompt_bytes: int) -> Any:
    """The tensor's value, or a tuple of values where it may have several."""
    values = values.reshape(-1)
    if tensor.size != ANY and values.size != tensor.size:
        raise RequestError(
            f"{tensor.name} with {values.size} values",
            "a request is one prompt and each of its options one value",
            "send a tensor of shape [1, 1], and several prompts as several requests",
        )
    if tensor.name == "text_input" and len(values[0]) > prompt_bytes:
        raise RequestError(
            f"text_input of {len(values[0])} bytes",
            f"a prompt of this instance has at most {prompt_bytes}",
            "shorten it, or raise the parameter max_prompt_bytes in config.pbtxt",
        )
    read = tuple(_scalar(tensor, value) for value in values)
    return read if tensor.size == ANY else read[0]


def _scalar(tensor: Tensor, value: Any) -> Any:
    if tensor.data_type == "TYPE_FP32":
        return float(str(value))  # 0.1 as the client wrote it, not the nearest float32's digits
    if tensor.data_type != "TYPE_STRING":
        return value.item()
    try:
        return bytes(value).decode("utf-8")
    except UnicodeDecodeError as error:
        raise RequestError(
            f"{tensor.name} {bytes(value)[:32]!r}",
            f"it must be UTF-8 text ({error.reason} at byte {error.start})",
            "encode it as UTF-8",
        ) from None


def _refuse_parameters(parameters: str) -> None:
    """An option with a slip in its name arrives as a parameter, where it would do nothing."""
    names = list(json.loads(parameters)) if parameters else []
    if names:
        raise RequestError(
            f"request parameter {', '.join(map(repr, names))}",
            "options are inputs, and there is no input of that name",
            f"use {', '.join(tensor.name for tensor in INPUTS)}, or leave it out",
        )


def _refuse_other_speculation(given: Mapping[str, Any], settings: InstanceSettings) -> None:
    for name, served in settings.served.items():
        if name in given and given[name] != served:
            has = f"is {served}" if served is not None else f"does not exist ({settings.arm} arm)"
            flag = {"speculation": "--arm", "n_sink": "--sink"}.get(name, f"--{name}")
            raise RequestError(
                f"{name} {given[name]!r}",
                f"it belongs to the instance, where it {has}",
                f"leave it out, or serve a second model made with wmtp triton-repo {flag}",
            )
