"""The endpoints."""

from __future__ import annotations

import asyncio
import hmac
import json
import logging
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from fastapi import APIRouter, Depends, FastAPI, Request
from fastapi.responses import JSONResponse, Response
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send

from tllm_wmtp.errors import RequestError
from tllm_wmtp.llm import LLM, Prompt
from tllm_wmtp.sampling import SamplingParams
from tllm_wmtp.serving.openai.answers import Answer, ChatAnswer, CompletionAnswer
from tllm_wmtp.serving.openai.calls import (
    Call,
    ChatCall,
    CompletionCall,
    read_chat,
    read_completion,
    read_object,
)
from tllm_wmtp.serving.openai.chat_template import ChatTemplate
from tllm_wmtp.serving.openai.errors import HttpError, refusal
from tllm_wmtp.serving.openai.service import Batch, Piece, Service
from tllm_wmtp.serving.openai.settings import ServerSettings
from tllm_wmtp.serving.openai.tokens import TokenNames

log = logging.getLogger(__name__)

Result = TypeVar("Result")
AnyCall = TypeVar("AnyCall", CompletionCall, ChatCall)
Work = Sequence[tuple[Prompt, SamplingParams]]

#: A client that takes longer to send its request loses the place that waits for it.
BODY_TIMEOUT_S = 60.0


@dataclass(frozen=True)
class Front:
    """What the endpoints share.

    Args:
        template: None where the checkpoint has none: then there is no chat.
    """

    llm: LLM
    service: Service
    settings: ServerSettings
    template: ChatTemplate | None
    tokens: TokenNames
    started: int

    @property
    def max_seq_len(self) -> int:
        limit = self.llm.config.max_seq_len
        if limit is None:
            raise RuntimeError("the engine config has not been resolved")
        return limit

    def card(self) -> dict[str, Any]:
        return {
            "id": self.settings.served_name,
            "object": "model",
            "created": self.started,
            "owned_by": "tllm-wmtp",
            "max_model_len": self.max_seq_len,
        }

    async def reply(
        self,
        request: Request,
        read: Callable[[Mapping[str, Any]], AnyCall],
        work_of: Callable[[AnyCall], Coroutine[Any, Any, Work]],
        answer: type[Answer],
    ) -> Response:
        """Reads a request, begins its completions, and returns what sends them."""
        # A place is taken before the body is read: bodies take memory as well.
        places = 1
        self.service.take(places)
        try:
            body = read_object(await self._body(request))
            self._check_model(body.get("model"))
            call = read(body)
            self.service.take(call.completions - places, call.completions)
            places = call.completions
            batch = self.service.start(await work_of(call))
            places = 0
        finally:
            self.service.free(places)
        made = answer(call, batch, self.settings.served_name, self.tokens)
        return Reply(self.service, batch, made, call)

    async def completion_work(self, call: CompletionCall) -> Work:
        copies = call.copies(call.params)
        return [(prompt, params) for prompt in call.prompts for params in copies]

    async def chat_work(self, call: ChatCall) -> Work:
        ids = await asyncio.to_thread(self._chat_ids, call)
        params = call.params
        if not call.limited:
            params = replace(params, max_tokens=max(1, self._longest() - len(ids)))
        return [(ids, copy) for copy in call.copies(params)]

    def _chat_ids(self, call: ChatCall) -> list[int]:
        if self.template is None or self.llm.tokenizer is None:
            missing = "tokenizer.json" if self.llm.tokenizer is None else "chat template"
            raise refusal(
                "a chat",
                f"the checkpoint has no {missing}, so messages cannot be written as a prompt",
                "use /v1/completions, or add the missing file (chat_template.jinja, "
                "tokenizer.json) to its directory",
                "messages",
            )
        try:
            text = self.template.render(call.messages, call.template_options)
        except RequestError as error:
            raise HttpError(400, error, param="messages") from None
        try:
            # The template has written the special tokens itself.
            return list(self.llm.tokenizer.encode(text, add_special_tokens=False).ids)
        except Exception as error:  # half of a surrogate pair, for one
            raise refusal(
                f"messages ({error})", "the tokenizer must be able to encode them",
                "send valid Unicode text", "messages",
            ) from None  # fmt: skip

    def _longest(self) -> int:
        """Most tokens of one request, prompt and output, that an idle engine can hold."""
        usage, speculation = self.llm.usage(), self.llm.config.speculation
        rows = 1 if speculation is None else speculation.rows
        return min(self.max_seq_len, usage.kv_pages * usage.tokens_per_page - rows)

    def _check_model(self, name: Any) -> None:
        if name is None or name == self.settings.served_name:
            return
        raise HttpError(
            404,
            RequestError(
                f"model {str(name)[:100]!r}",
                f"this server has {self.settings.served_name!r}",
                "ask for that one",
            ),
            code="model_not_found",
            param="model",
        )

    async def _body(self, request: Request) -> bytes:
        kind = request.headers.get("content-type", "").split(";")[0].strip().lower()
        if kind != "application/json":
            # Also keeps web pages out: a browser asks before it sends this type to another site.
            raise refusal(
                f"content type {kind!r}",
                "the body is JSON",
                "send the header Content-Type: application/json",
                status=415,
            )
        limit = self.settings.request_bytes(self.max_seq_len)
        try:
            return await asyncio.wait_for(_read(request, limit), BODY_TIMEOUT_S)
        except asyncio.TimeoutError:
            raise refusal(
                f"a body that took more than {BODY_TIMEOUT_S:.0f} s",
                "it must arrive sooner",
                "send it again",
                status=408,
            ) from None


def make_app(front: Front) -> FastAPI:
    """The application around an LLM, without a server."""
    app = FastAPI(title="tllm-wmtp", openapi_url=None)
    v1 = APIRouter(prefix="/v1", dependencies=[Depends(_authorise(front.settings.api_key))])

    @v1.post("/completions")
    async def completions(request: Request) -> Response:
        return await front.reply(request, read_completion, front.completion_work, CompletionAnswer)

    @v1.post("/chat/completions")
    async def chat_completions(request: Request) -> Response:
        return await front.reply(request, read_chat, front.chat_work, ChatAnswer)

    @v1.get("/models")
    async def models() -> Response:
        return JSONResponse({"object": "list", "data": [front.card()]})

    @v1.get("/models/{name:path}")
    async def model(name: str) -> Response:
        front._check_model(name)
        return JSONResponse(front.card())

    @app.get("/health")
    async def health() -> Response:
        stopping = front.service.draining
        return JSONResponse(
            {"status": "stopping" if stopping else "ok"}, status_code=503 if stopping else 200
        )

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(await front.service.exposition(), media_type=CONTENT_TYPE_LATEST)

    app.include_router(v1)
    app.add_exception_handler(HttpError, _show)
    app.add_exception_handler(HTTPException, _show)
    app.add_exception_handler(ClientDisconnect, _nobody_reads_it)
    app.add_exception_handler(Exception, _show)
    return app


def make_front(
    llm: LLM, service: Service, settings: ServerSettings, template: ChatTemplate | None
) -> Front:
    return Front(llm, service, settings, template, TokenNames(llm.tokenizer), int(time.time()))


class Reply(Response):
    """Sends an answer, whole or as server-sent events, and ends its completions if the client
    leaves or anything fails."""

    def __init__(self, service: Service, batch: Batch, answer: Answer, call: Call):
        super().__init__()
        self._service, self._batch, self._answer, self._call = service, batch, answer, call

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await _until_left(receive, self._send(scope, receive, send))
        except ClientDisconnect:
            log.info("a client has left; its completions end")
        finally:
            self._service.forget(self._batch)

    async def _send(self, scope: Scope, receive: Receive, send: Send) -> None:
        pieces = aiter(self._batch)
        if self._call.stream:
            await self._stream(pieces, send)
            return
        async for piece in pieces:
            if piece.error is not None:
                raise piece.error
            self._answer.gather(piece)
        await JSONResponse(self._answer.whole())(scope, receive, send)

    async def _stream(self, pieces: AsyncIterator[Piece], send: Send) -> None:
        # The status tells whether the engine has taken the request, so it waits for a first piece.
        piece: Piece | None = await anext(pieces)
        if piece is not None and piece.error is not None:
            raise piece.error
        headers = [
            (b"content-type", b"text/event-stream; charset=utf-8"),
            (b"cache-control", b"no-cache"),
            (b"x-accel-buffering", b"no"),
        ]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        while piece is not None:
            if piece.error is not None:
                await _send_event(send, json.dumps(piece.error.body()))
                break
            for chunk in self._answer.chunks(piece):
                await _send_event(send, json.dumps(chunk, ensure_ascii=False))
            piece = await anext(pieces, None)
        else:
            if self._call.include_usage:
                await _send_event(send, json.dumps(self._answer.usage_chunk()))
        await _send_event(send, "[DONE]")
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _send_event(send: Send, data: str) -> None:
    body = f"data: {data}\n\n".encode()
    await send({"type": "http.response.body", "body": body, "more_body": True})


async def _until_left(receive: Receive, work: Coroutine[Any, Any, Result]) -> Result:
    """The result of ``work``, which is cancelled when the client leaves.

    Raises:
        ClientDisconnect: it has left.
    """
    working, leaving = asyncio.ensure_future(work), asyncio.ensure_future(_left(receive))
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise ClientDisconnect
    finally:
        working.cancel()
        leaving.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)


async def _left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _read(request: Request, limit: int) -> bytes:
    """The body. One that is too long is read to its end, but not kept: a client that is still
    sending would not see the answer."""
    parts, size = [], 0
    async for part in request.stream():
        size += len(part)
        if size <= limit:
            parts.append(part)
        else:
            parts.clear()
    if size > limit:
        raise HttpError(
            413,
            RequestError(
                f"a body of {size} bytes",
                f"this server reads at most {limit}",
                "shorten it, or raise --max-request-bytes",
            ),
            code="request_too_large",
        )
    return b"".join(parts)


def _authorise(api_key: str | None) -> Callable[[Request], Coroutine[Any, Any, None]]:
    async def authorise(request: Request) -> None:
        if api_key is None:
            return
        scheme, _, given = request.headers.get("authorization", "").partition(" ")
        # Compared as bytes in a time that does not tell how much of it is right.
        same = hmac.compare_digest(given.strip().encode(), api_key.encode())
        if scheme.lower() != "bearer" or not same:
            raise HttpError(
                401,
                RequestError(
                    "an API key that is missing or wrong",
                    "this server asks for its own",
                    "send the header Authorization: Bearer KEY",
                ),
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )

    return authorise


async def _show(request: Request, error: Exception) -> Response:
    if isinstance(error, HTTPException):
        remedy = "see docs/openai.md for the endpoints"
        error = HttpError(
            error.status_code,
            RequestError(f"{request.method} {request.url.path}", error.detail, remedy),
            headers=error.headers,
        )
    elif not isinstance(error, HttpError):  # logged by the server
        error = HttpError(500, f"{type(error).__name__}: a defect of this server; see its log")
    return JSONResponse(error.body(), status_code=error.status, headers=error.headers)


async def _nobody_reads_it(request: Request, error: Exception) -> Response:
    return Response(status_code=400)
