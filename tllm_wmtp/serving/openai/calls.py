"""From a request's JSON to what the engine is asked.

Options that would change the answer and that this server does not have are refused by name; unknown
fields are ignored, as clients send many that concern other servers.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from tllm_wmtp.errors import RequestError
from tllm_wmtp.llm import Prompt
from tllm_wmtp.sampling import SamplingParams
from tllm_wmtp.serving.openai.errors import HttpError, refusal

log = logging.getLogger(__name__)

Message = dict[str, Any]

#: OpenAI's default of ``/v1/completions``; a chat goes on to the model's end or limit.
COMPLETION_TOKENS = 16
MOST_LOGPROBS = 20
#: Every step of a request looks for all of its stop strings.
MOST_STOPS, LONGEST_STOP = 64, 1024
#: What :class:`tllm_wmtp.SamplingParams` checks and is handed as it comes.
SAMPLING = (
    "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty",
    "frequency_penalty", "seed", "stop", "stop_token_ids", "ignore_eos",
)  # fmt: skip
#: Options that are not there, with the values that ask for nothing; null never does.
ABSENT: dict[str, tuple[Any, ...]] = {
    "echo": (False,),
    "suffix": ("",),
    "best_of": (1,),
    "use_beam_search": (False,),
    "length_penalty": (1,),
    "logit_bias": ({},),
    "allowed_token_ids": (),
    "bad_words": ([],),
    "min_tokens": (0,),
    "prompt_logprobs": (),
    "truncate_prompt_tokens": (),
    "add_special_tokens": (),
    "skip_special_tokens": (True,),
    "include_stop_str_in_output": (False,),
    "response_format": ({"type": "text"},),
    "structured_outputs": (),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "audio": (),
    "chat_template": (),
    "continue_final_message": (False,),
    "documents": ([],),
}
OTHERS = {
    "model", "prompt", "messages", "n", "max_tokens", "max_completion_tokens", "stream",
    "stream_options", "logprobs", "top_logprobs", "return_token_ids", "add_generation_prompt",
    "chat_template_kwargs",
}  # fmt: skip


@dataclass(frozen=True)
class Call:
    """What both kinds of requests ask for.

    ``limited`` says whether the client limits the output; if not, ``params.max_tokens`` means
    nothing. ``n`` completions are made of each prompt.
    """

    params: SamplingParams
    limited: bool
    n: int
    stream: bool
    include_usage: bool
    return_token_ids: bool

    def copies(self, params: SamplingParams) -> list[SamplingParams]:
        """One for each of the ``n`` completions: with a seed, consecutive ones."""
        if params.seed is None:
            return [params] * self.n
        return [replace(params, seed=(params.seed + copy) % (1 << 64)) for copy in range(self.n)]


@dataclass(frozen=True)
class CompletionCall(Call):
    prompts: Sequence[Prompt]

    @property
    def completions(self) -> int:
        return self.n * len(self.prompts)


@dataclass(frozen=True)
class ChatCall(Call):
    messages: Sequence[Message]
    template_options: Mapping[str, Any]

    @property
    def completions(self) -> int:
        return self.n


def read_object(body: bytes) -> dict[str, Any]:
    """The JSON object that a body holds.

    Raises:
        HttpError: it holds none.
    """
    try:
        content = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise refusal(f"the body ({error})", "it must be JSON", "correct it") from None
    if not isinstance(content, dict):
        raise refusal(
            f"a body that is {_kind(content)}", "it must be a JSON object", 'send {"model": ...}'
        )
    return content


def read_completion(body: Mapping[str, Any]) -> CompletionCall:
    """The call of ``/v1/completions``.

    Raises:
        HttpError: it cannot be served.
    """
    logprobs = _integer(body, "logprobs", 0, MOST_LOGPROBS)
    return CompletionCall(**_common(body, logprobs, COMPLETION_TOKENS), prompts=_prompts(body))


def read_chat(body: Mapping[str, Any]) -> ChatCall:
    """The call of ``/v1/chat/completions``.

    Raises:
        HttpError: it cannot be served.
    """
    top = _integer(body, "top_logprobs", 0, MOST_LOGPROBS)
    wanted = _boolean(body, "logprobs")
    if top is not None and not wanted:
        raise refusal(
            f"top_logprobs {top}",
            "it needs logprobs",
            "add logprobs: true, or leave it out",
            "top_logprobs",
        )
    options = body.get("chat_template_kwargs")
    if not isinstance(options, (dict, type(None))):
        raise _wrong_kind("chat_template_kwargs", options, "an object")
    add_prompt = _boolean(body, "add_generation_prompt", default=True)
    return ChatCall(
        **_common(body, (top or 0) if wanted else None, None),
        messages=_messages(body),
        template_options={"add_generation_prompt": add_prompt, **(options or {})},
    )


def _common(
    body: Mapping[str, Any], logprobs: int | None, default_tokens: int | None
) -> dict[str, Any]:
    _refuse_absent(body)
    stream = _boolean(body, "stream")
    names = ("max_completion_tokens", "max_tokens")
    given = [body[name] for name in names if body.get(name) is not None]
    max_tokens = given[0] if given else default_tokens
    return {
        "params": _sampling(body, max_tokens, logprobs),
        "limited": max_tokens is not None,
        "n": _integer(body, "n", 1) or 1,
        "stream": stream,
        "include_usage": _include_usage(body, stream),
        "return_token_ids": _boolean(body, "return_token_ids"),
    }


def _sampling(
    body: Mapping[str, Any], max_tokens: int | None, logprobs: int | None
) -> SamplingParams:
    options = {name: body[name] for name in SAMPLING if body.get(name) is not None}
    options.setdefault("temperature", 1.0)
    options["ignore_eos"] = _boolean(body, "ignore_eos")
    seed = options.get("seed")
    if isinstance(seed, int) and -(1 << 63) <= seed < 0:  # a signed number of 64 bits
        options["seed"] = seed + (1 << 64)
    stops = options.get("stop")
    if isinstance(stops, list) and len(stops) > MOST_STOPS:
        raise refusal(f"{len(stops)} stops", f"at most {MOST_STOPS} may be given", "send fewer")
    try:
        params = SamplingParams(
            max_tokens=1 if max_tokens is None else max_tokens, logprobs=logprobs, **options
        )
    except RequestError as error:
        raise HttpError(400, error, param=_field_of(error)) from None
    if any(len(stop) > LONGEST_STOP for stop in params.stop):
        raise refusal(
            f"stop of {max(map(len, params.stop))} characters",
            f"a stop string has at most {LONGEST_STOP}",
            "shorten it",
            "stop",
        )
    return params


def _field_of(error: RequestError) -> str | None:
    """The field that an error of :class:`tllm_wmtp.SamplingParams` begins with."""
    name = error.value.split(" ", 1)[0]
    return name if name in SAMPLING or name == "max_tokens" else None


def _refuse_absent(body: Mapping[str, Any]) -> None:
    for name, harmless in ABSENT.items():
        if body.get(name) is not None and body[name] not in harmless:
            raise refusal(
                f"{name} {_shown(body[name])}",
                "this server has no such option, and the answer would not be what it asks for",
                f"leave {name} out",
                name,
            )
    unknown = body.keys() - ABSENT.keys() - OTHERS - set(SAMPLING)
    if unknown:
        log.info("fields that are ignored: %s", ", ".join(sorted(unknown)))


def _include_usage(body: Mapping[str, Any], stream: bool) -> bool:
    options = body.get("stream_options")
    if options is None:
        return False
    if not isinstance(options, dict):
        raise _wrong_kind("stream_options", options, "an object")
    if not stream:
        raise refusal(
            "stream_options without stream",
            "they belong to a stream",
            "add stream: true, or leave them out",
            "stream_options",
        )
    return _boolean(options, "include_usage")


def _prompts(body: Mapping[str, Any]) -> Sequence[Prompt]:
    prompt = body.get("prompt")
    if isinstance(prompt, str):
        return [prompt]
    if isinstance(prompt, list) and prompt:
        if all(isinstance(one, str) for one in prompt):
            return prompt
        if _are_ids(prompt):
            return [prompt]
        if all(isinstance(one, list) and _are_ids(one) for one in prompt):
            return prompt
    raise _wrong_kind("prompt", prompt, "text, a list of texts, token ids, or a list of these")


def _are_ids(values: list[Any]) -> bool:
    return all(isinstance(i, int) and not isinstance(i, bool) for i in values)


def _messages(body: Mapping[str, Any]) -> list[Message]:
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise _wrong_kind("messages", messages, "a list of one message or more")
    return [_message(message, f"messages[{at}]") for at, message in enumerate(messages)]


def _message(message: Any, place: str) -> Message:
    if not isinstance(message, dict):
        raise _wrong_kind(place, message, "an object")
    if not isinstance(message.get("role"), str):
        raise _wrong_kind(f"{place}.role", message.get("role"), "text")
    for name in ("tool_calls", "function_call", "audio"):
        if message.get(name):
            raise refusal(
                f"{place}.{name} {_shown(message[name])}",
                "this server reads text only",
                f"leave {name} out",
                "messages",
            )
    return {**message, "content": _content(message.get("content"), f"{place}.content")}


def _content(content: Any, place: str) -> str:
    """The text of a message; parts are separate lines."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list) or not content:
        raise _wrong_kind(place, content, "text, or a list of text parts")
    return "\n".join(_part(part, f"{place}[{at}]") for at, part in enumerate(content))


def _part(part: Any, place: str) -> str:
    if not isinstance(part, dict):
        raise _wrong_kind(place, part, "an object")
    if part.get("type") != "text":
        raise refusal(
            f"{place}.type {_shown(part.get('type'))}",
            "this server reads text only",
            "send parts of type 'text'",
            "messages",
        )
    if not isinstance(part.get("text"), str):
        raise _wrong_kind(f"{place}.text", part.get("text"), "text")
    return str(part["text"])


def _integer(body: Mapping[str, Any], name: str, least: int, most: int | None = None) -> int | None:
    value = body.get(name)
    if value is None:
        return None
    span = f"{least} or more" if most is None else f"{least} to {most}"
    if isinstance(value, bool) or not isinstance(value, int):
        raise _wrong_kind(name, value, f"an integer, {span}")
    if value < least or (most is not None and value > most):
        raise refusal(f"{name} {_shown(value)}", f"it must be {span}", "correct it", name)
    return value


def _boolean(body: Mapping[str, Any], name: str, default: bool = False) -> bool:
    value = body.get(name)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise _wrong_kind(name, value, "true or false")
    return value


def _wrong_kind(name: str, value: Any, wanted: str) -> HttpError:
    field = name.split("[", 1)[0]
    if value is None:
        return refusal(f"no {name}", f"it must be {wanted}", "add it", field)
    return refusal(f"{name} {_shown(value)}", f"it must be {wanted}", "correct it", field)


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:60]}..."


def _kind(value: Any) -> str:
    names = {list: "a list", str: "text", bool: "a boolean", type(None): "null"}
    return names.get(type(value), "a number")
