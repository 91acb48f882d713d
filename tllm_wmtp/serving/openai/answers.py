"""From pieces of completions to OpenAI's objects, whole or in chunks."""

from __future__ import annotations

import codecs
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from tllm_wmtp.sampling import Logprob, Logprobs
from tllm_wmtp.serving.openai.calls import Call
from tllm_wmtp.serving.openai.service import Batch, Piece
from tllm_wmtp.serving.openai.tokens import TokenNames

#: JSON has no infinity: what stands for the logarithm of 0.
LOWEST_LOGPROB = -9999.0


@dataclass
class _Gathered:
    """One completion, as far as it has come."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: dict[str, Any] | None = None
    finish_reason: str | None = None


class Answer:
    """One HTTP request's answer. ``n`` completions of each prompt follow one another."""

    prefix: str
    kind: str
    chunk_kind: str

    def __init__(self, call: Call, batch: Batch, model: str, tokens: TokenNames):
        self._call, self._batch, self._tokens = call, batch, tokens
        self._identity = {
            "id": f"{self.prefix}-{uuid.uuid4().hex}",
            "created": int(time.time()),
            "model": model,
        }
        self._gathered: dict[int, _Gathered] = {}

    def chunks(self, piece: Piece) -> list[dict[str, Any]]:
        """What a stream sends for a piece; nothing if it shows nothing new."""
        first = piece.index not in self._gathered
        self._gathered.setdefault(piece.index, _Gathered())
        choices = self._opening(piece.index) if first else []
        if piece.text or piece.logprobs or piece.last or self._call.return_token_ids:
            choices.append(
                self._delta(piece)
                | {
                    "logprobs": self._logprobs(piece),
                    "finish_reason": piece.finish_reason,
                    **self._ids(piece.token_ids),
                }
            )
        usage = {"usage": None} if self._call.include_usage else {}
        return [
            {**self._identity, "object": self.chunk_kind, "choices": [choice], **usage}
            for choice in choices
        ]

    def usage_chunk(self) -> dict[str, Any]:
        """The last chunk of a stream that is to report its usage."""
        return {
            **self._identity, "object": self.chunk_kind, "choices": [], "usage": self.usage(),
        }  # fmt: skip

    def gather(self, piece: Piece) -> None:
        """Takes up a piece for :meth:`whole`."""
        gathered = self._gathered.setdefault(piece.index, _Gathered())
        gathered.text += piece.text
        gathered.token_ids += piece.token_ids
        gathered.finish_reason = piece.finish_reason
        report = self._logprobs(piece)
        if report is None:
            return
        if gathered.logprobs is None:
            gathered.logprobs = report
            return
        for name, column in report.items():
            if column is not None:
                gathered.logprobs[name] += column

    def whole(self) -> dict[str, Any]:
        """The answer in one object, after all pieces."""
        choices = [self._choice(index, self._gathered[index]) for index in sorted(self._gathered)]
        return {
            **self._identity, "object": self.kind, "choices": choices, "usage": self.usage(),
        }  # fmt: skip

    def usage(self) -> dict[str, Any]:
        """Tokens of each prompt once, and of all completions."""
        batch = self._batch
        prompts, made = sum(batch.prompt_tokens[:: self._call.n]), sum(batch.output_tokens)
        cached = sum(batch.cached_tokens[:: self._call.n])
        return {
            "prompt_tokens": prompts,
            "completion_tokens": made,
            "total_tokens": prompts + made,
            "prompt_tokens_details": {"cached_tokens": cached},
        }

    def _choice(self, index: int, gathered: _Gathered) -> dict[str, Any]:
        return {
            "index": index,
            **self._content(gathered.text),
            "logprobs": gathered.logprobs,
            "finish_reason": gathered.finish_reason,
            **self._ids(gathered.token_ids),
        }

    def _ids(self, token_ids: Sequence[int]) -> dict[str, Any]:
        return {"token_ids": list(token_ids)} if self._call.return_token_ids else {}

    def _logprobs(self, piece: Piece) -> dict[str, Any] | None:
        if piece.logprobs is None:
            return None
        return self._report(piece.index, piece.token_ids, piece.logprobs)

    def _opening(self, index: int) -> list[dict[str, Any]]:
        """Choices that a stream sends before a completion's first text."""
        raise NotImplementedError

    def _delta(self, piece: Piece) -> dict[str, Any]:
        raise NotImplementedError

    def _content(self, text: str) -> dict[str, Any]:
        raise NotImplementedError

    def _report(self, index: int, ids: Sequence[int], logprobs: Logprobs) -> dict[str, Any]:
        raise NotImplementedError


class CompletionAnswer(Answer):
    prefix, kind, chunk_kind = "cmpl", "text_completion", "text_completion"

    def __init__(self, call: Call, batch: Batch, model: str, tokens: TokenNames):
        super().__init__(call, batch, model, tokens)
        self._offsets: dict[int, _Offset] = {}

    def _opening(self, index: int) -> list[dict[str, Any]]:
        return []

    def _delta(self, piece: Piece) -> dict[str, Any]:
        return {"index": piece.index, "text": piece.text}

    def _content(self, text: str) -> dict[str, Any]:
        return {"text": text}

    def _report(self, index: int, ids: Sequence[int], logprobs: Logprobs) -> dict[str, Any]:
        offset = self._offsets.setdefault(index, _Offset())
        name = self._tokens.name
        return {
            "tokens": [name(token) for token in ids],
            "token_logprobs": [
                _finite(entry[token]) for token, entry in zip(ids, logprobs, strict=True)
            ],
            "top_logprobs": [
                {name(token): _finite(logprob) for token, logprob in entry.items()}
                for entry in logprobs
            ],
            "text_offset": [offset.advance(self._tokens.raw(token)) for token in ids],
        }


class ChatAnswer(Answer):
    prefix, kind, chunk_kind = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def _opening(self, index: int) -> list[dict[str, Any]]:
        delta = {"role": "assistant", "content": ""}
        return [{"index": index, "delta": delta, "logprobs": None, "finish_reason": None}]

    def _delta(self, piece: Piece) -> dict[str, Any]:
        return {"index": piece.index, "delta": {"content": piece.text} if piece.text else {}}

    def _content(self, text: str) -> dict[str, Any]:
        return {"message": {"role": "assistant", "content": text, "refusal": None}}

    def _report(self, index: int, ids: Sequence[int], logprobs: Logprobs) -> dict[str, Any]:
        most = self._call.params.logprobs or 0
        content = []
        for token, entry in zip(ids, logprobs, strict=True):
            likeliest = sorted(entry.items(), key=lambda item: item[1].rank)[:most]
            top = [self._token(*item) for item in likeliest]
            content.append(self._token(token, entry[token]) | {"top_logprobs": top})
        return {"content": content, "refusal": None}

    def _token(self, token_id: int, logprob: Logprob) -> dict[str, Any]:
        raw = self._tokens.raw(token_id)
        return {
            "token": self._tokens.name(token_id),
            "logprob": _finite(logprob),
            "bytes": None if raw is None else list(raw),
        }


class _Offset:
    """Characters of the text before each token; a part of a character begins where that does."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._characters = 0

    def advance(self, raw: bytes | None) -> int:
        before = self._characters
        self._characters += len(self._decoder.decode(raw or b""))
        return before


def _finite(logprob: Logprob) -> float:
    return max(logprob.logprob, LOWEST_LOGPROB)
