"""An OpenAI-compatible server around a `TinyVlm`: chat completions with pictures as data URLs, and log-probabilities.

    python -m recipes.tiny_vlm.server --model runs/tiny_vlm --port 8000

Answers as vLLM does: `logprobs` and `top_logprobs` (20 at most) of the answer's tokens, `usage`, errors as JSON with
`error.message`, 404 for another model's name. One request is computed at a time. For tests and recipes: a real model
is served with vLLM.
"""

import argparse
import base64
import binascii
import io
import itertools
import os
import socket
import threading
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse
from PIL import Image
from pydantic import BaseModel, Field

from flowfleet.process.service import write_port_file
from recipes.tiny_vlm.model import TinyVlm

MAX_TOP_LOGPROBS = 20


class ChatRequest(BaseModel):
    """The part of an OpenAI chat completion request that is read; other fields are ignored, as vLLM does."""

    model: str
    messages: list[dict[str, Any]] = Field(min_length=1)
    max_tokens: Annotated[int, Field(ge=1, le=512)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1, le=512)] | None = None
    temperature: Annotated[float, Field(ge=0.0)] = 1.0
    seed: int | None = None
    logprobs: bool = False
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] = 0


@dataclass(frozen=True)
class Answer:
    """The model's answer. `log_probs` (tokens, vocabulary) fp32: what each token was drawn from."""

    token_ids: list[int]
    log_probs: torch.Tensor
    num_prompt_tokens: int
    finished: bool
    """It ended by itself, not by the limit of tokens."""


def make_app(vlm: TinyVlm, name: str = "tiny-vlm", api_key: str | None = None, busy_every: int = 0) -> FastAPI:
    """The server's routes. With `api_key`, calls without that bearer token get 401; of `busy_every` questions one is
    turned away with 503, as by a server with too many (0: none)."""
    app = FastAPI()
    lock = threading.Lock()
    questions = itertools.count(1)

    @app.middleware("http")
    async def authenticate(request: Request, call_next: Any) -> Any:
        if api_key and request.url.path != "/health" and request.headers.get("authorization") != f"Bearer {api_key}":
            return _problem(401, "Unauthorized")
        return await call_next(request)

    @app.get("/health")
    def health() -> dict[str, str]:
        return {}

    @app.get("/v1/models")
    def models() -> dict[str, Any]:
        return {"object": "list", "data": [{"id": name, "object": "model", "owned_by": "flowfleet"}]}

    @app.post("/v1/chat/completions")
    def chat(request: ChatRequest) -> Any:
        if busy_every and next(questions) % busy_every == 0:
            return _problem(503, "The server is busy.")
        if request.model != name:
            return _problem(404, f"The model `{request.model}` does not exist.")
        try:
            pictures = [picture for message in request.messages for picture in _pictures(message)]
            with lock:
                answer = answer_of(vlm, request, pictures)
        except ValueError as error:
            return _problem(400, str(error))
        return _completion(vlm.tokenizer, request, answer)

    return app


@torch.inference_mode()
def answer_of(vlm: TinyVlm, request: ChatRequest, pictures: Sequence[Image.Image]) -> Answer:
    """Decodes greedily at temperature 0, else draws, by `seed` if it is given."""
    inputs = vlm.encode(request.messages, pictures)
    generator = torch.Generator().manual_seed(request.seed) if request.seed is not None else None
    limit = request.max_completion_tokens or request.max_tokens or 16
    tokens: list[int] = []
    rows: list[torch.Tensor] = []
    end = vlm.tokenizer.eos_token_id
    output = vlm.model(**inputs, use_cache=True, logits_to_keep=1)
    start = inputs["input_ids"].shape[1]
    while True:
        logits = output.logits[0, -1].float()
        rows.append(torch.log_softmax(logits, -1))
        tokens.append(_draw(logits, request.temperature, generator))
        if tokens[-1] == end or len(tokens) == limit:
            return Answer(tokens, torch.stack(rows), start, tokens[-1] == end)
        output = _continue(vlm, output, tokens[-1], start + len(tokens))


def _continue(vlm: TinyVlm, output: Any, token: int, length: int) -> Any:
    """The forward of one more token, of a conversation that has `length` with it."""
    place = torch.full((3, 1, 1), length - 1) + vlm.model.model.rope_deltas.view(1, -1, 1)
    return vlm.model(
        input_ids=torch.tensor([[token]]),
        attention_mask=torch.ones(1, length, dtype=torch.long),
        position_ids=place,
        past_key_values=output.past_key_values,
        use_cache=True,
    )


def _draw(logits: torch.Tensor, temperature: float, generator: torch.Generator | None) -> int:
    if temperature == 0.0:
        return int(logits.argmax())
    return int(torch.multinomial(torch.softmax(logits / temperature, -1), 1, generator=generator))


def _pictures(message: dict[str, Any]) -> list[Image.Image]:
    content = message.get("content")
    parts = content if isinstance(content, list) else []
    return [_picture(part.get("image_url", {}).get("url", "")) for part in parts if part.get("type") != "text"]


def _picture(url: str) -> Image.Image:
    head, _, data = url.partition(",")
    if not head.startswith("data:image/") or not head.endswith(";base64"):
        raise ValueError("only data URLs of pictures are read here: data:image/png;base64,…")
    try:
        return Image.open(io.BytesIO(base64.b64decode(data, validate=True))).convert("RGB")
    except (binascii.Error, OSError) as error:
        raise ValueError(f"cannot read the picture: {error}") from error


def _completion(tokenizer: Any, request: ChatRequest, answer: Answer) -> dict[str, Any]:
    said = answer.token_ids[:-1] if answer.finished else answer.token_ids
    choice = {
        "index": 0,
        "message": {"role": "assistant", "content": tokenizer.decode(said)},
        "finish_reason": "stop" if answer.finished else "length",
        "logprobs": {"content": _log_probs(tokenizer, request, answer)} if request.logprobs else None,
    }
    num_tokens = len(answer.token_ids)
    return {
        "id": f"chatcmpl-{uuid.uuid4().hex}",
        "object": "chat.completion",
        "created": int(time.time()),
        "model": request.model,
        "choices": [choice],
        "usage": {
            "prompt_tokens": answer.num_prompt_tokens,
            "completion_tokens": num_tokens,
            "total_tokens": answer.num_prompt_tokens + num_tokens,
        },
    }


def _log_probs(tokenizer: Any, request: ChatRequest, answer: Answer) -> list[dict[str, Any]]:
    content = []
    for token, row in zip(answer.token_ids, answer.log_probs, strict=True):
        top = row.topk(request.top_logprobs)
        pairs = zip(top.indices.tolist(), top.values.tolist(), strict=True)
        listed = [_log_prob(tokenizer, other, value) for other, value in pairs]
        content.append({**_log_prob(tokenizer, token, float(row[token])), "top_logprobs": listed})
    return content


def _log_prob(tokenizer: Any, token: int, value: float) -> dict[str, Any]:
    text = tokenizer.decode([token])
    return {"token": text, "logprob": value, "bytes": list(text.encode())}


def _problem(status: int, message: str) -> JSONResponse:
    kinds = {400: "BadRequestError", 401: "AuthenticationError", 404: "NotFoundError", 503: "ServiceUnavailableError"}
    kind = kinds[status]
    return JSONResponse({"error": {"message": message, "type": kind, "code": status}}, status)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="folder of the checkpoint")
    parser.add_argument("--served-model-name", default="tiny-vlm")
    parser.add_argument("--port", type=int, default=0, help="on loopback; 0 takes a free one")
    parser.add_argument("--port-file", type=Path, help="gets host:port once the server listens")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument(
        "--busy-every", type=int, default=0, help="turn one of so many questions away with 503 (0: none)"
    )
    parser.add_argument("--api-key-env", help="environment variable with the key that callers must send")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    key = os.environ[options.api_key_env] if options.api_key_env else None
    app = make_app(TinyVlm.load(options.model), options.served_model_name, key, options.busy_every)
    listening = socket.create_server(("127.0.0.1", options.port))
    write_port_file(options.port_file, f"127.0.0.1:{listening.getsockname()[1]}")
    uvicorn.Server(uvicorn.Config(app, log_level="warning")).run(sockets=[listening])


if __name__ == "__main__":
    main()
