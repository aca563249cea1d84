"""The HTTP API: path -> handler. Errors become OpenAI's error object here, those of a running stream in streams.py."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection
from typing import Final

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from meshllm.api.body import read_request
from meshllm.api.completions import complete_chat, complete_text
from meshllm.api.hosts import HostCheck
from meshllm.api.openai import DetokenizeRequest, PullRequest, TokenizeRequest, error_object
from meshllm.api.streams import BROKEN, ClientGoneError, error_response, json_response
from meshllm.daemon.generation import Generator
from meshllm.errors import InvalidRequestError, MeshLLMError, NoModelError
from meshllm.log import Logger

Handler = Callable[[Request, Generator], Awaitable[Response]]
MAX_TOKENS_AT_ONCE: Final = 1 << 20


def make_app(generator: Generator, log: Logger, hosts: Collection[str] = ()) -> ASGIApp:
    """The ASGI application. hosts: names of this machine that a request over TCP may give, beside its addresses."""

    def route(path: str, method: str, handler: Handler) -> Route:
        async def handle(request: Request) -> Response:
            try:
                return await handler(request, generator)
            except MeshLLMError as error:
                return error_response(error)
            except ClientGoneError:
                return Response(status_code=499)  # nobody reads it
            except Exception as error:
                log.exception("request_broken", path=path, error=type(error).__name__)
                return json_response(BROKEN, 500)

        return Route(path, handle, methods=[method])

    app = Starlette(
        routes=[
            route("/v1/chat/completions", "POST", complete_chat),
            route("/v1/completions", "POST", complete_text),
            route("/v1/models", "GET", _models),
            route("/v1/models/{name:path}", "GET", _model),
            route("/models/reload", "POST", _reload),
            route("/models/pull", "POST", _pull),
            route("/tokenize", "POST", _tokenize),
            route("/detokenize", "POST", _detokenize),
            route("/status", "GET", _status),
            route("/health", "GET", _health),
        ],
        exception_handlers={HTTPException: _http_error},
    )
    return HostCheck(_LastResort(app, log), hosts)


class _LastResort:
    """Logs what fails while an answer is being sent: the client was told in the stream."""

    def __init__(self, app: ASGIApp, log: Logger) -> None:
        self._app = app
        self._log = log

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await self._app(scope, receive, send)
        except Exception as error:
            self._log.exception("answer_broken", path=scope.get("path"), error=type(error).__name__)


async def _http_error(request: Request, error: Exception) -> Response:
    status = error.status_code if isinstance(error, HTTPException) else 500
    words = {404: f"no such path: {request.url.path}", 405: f"{request.method} is not allowed on {request.url.path}"}
    code = {404: "not_found", 405: "method_not_allowed"}.get(status, "http_error")
    return json_response(error_object(words.get(status, str(error)), status, code, None), status)


def _card(generator: Generator) -> dict[str, object]:
    served = generator.model()
    try:
        created = int(served.file.path.stat().st_mtime)
    except OSError:  # removed while it is served
        created = 0
    return {
        "id": served.name,
        "object": "model",
        "created": created,
        "owned_by": "meshllm",
        "sha256": served.sha256,
        "context_length": generator.context_length(),
    }


async def _models(_: Request, generator: Generator) -> Response:
    try:
        cards = [_card(generator)]
    except NoModelError:
        cards = []  # a daemon without a model is in a normal state
    return json_response({"object": "list", "data": cards})


async def _model(request: Request, generator: Generator) -> Response:
    generator.model(request.path_params["name"])
    return json_response(_card(generator))


async def _reload(_: Request, generator: Generator) -> Response:
    generator.control.reload()
    return json_response({"status": "ok"})


async def _pull(request: Request, generator: Generator) -> Response:
    """Begins to get a whole file from other devices, or says how far it is; asked again and again until it is here."""
    asked = await read_request(request, PullRequest)
    status = generator.control.files.pull(asked.source, asked.name or asked.source, asked.state_dir)
    return Response(msgspec.json.encode(status), media_type="application/json")


async def _tokenize(request: Request, generator: Generator) -> Response:
    asked = await read_request(request, TokenizeRequest)
    ids = await generator.encode_text(asked.content, parse_special=asked.parse_special, add_bos=asked.add_special)
    return json_response({"tokens": ids})


async def _detokenize(request: Request, generator: Generator) -> Response:
    asked = await read_request(request, DetokenizeRequest)
    vocab_size = generator.tokenizer().vocab_size
    bad = next((token for token in asked.tokens if not 0 <= token < vocab_size), None)
    if bad is not None or len(asked.tokens) > MAX_TOKENS_AT_ONCE:
        raise InvalidRequestError(
            f"tokens holds {bad}, expected ids from 0 to {vocab_size - 1}, at most {MAX_TOKENS_AT_ONCE} of them",
            "tokens",
        )
    return json_response({"content": generator.tokenizer().decode(asked.tokens, keep_control=asked.keep_special)})


async def _status(_: Request, generator: Generator) -> Response:
    return Response(msgspec.json.encode(generator.status()), media_type="application/json")


async def _health(_: Request, generator: Generator) -> Response:
    """200 when a request would be served now, else 503 with the reason; either way the daemon lives."""
    status = generator.status()
    ready = status.state == "serving"
    return json_response({"status": "ok" if ready else status.state, "detail": status.detail}, 200 if ready else 503)
