"""A rubric and what fills its slots as the body of a chat completion request.

Pictures become base64 when a call is sent, and are joined into the JSON as bytes: what waits holds the files alone.
"""

from __future__ import annotations

import hashlib
import json
import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from services.reward.judge.media import Part, Picture
from services.reward.judge.rubrics import Rubric

_MARK: Final = f"<picture-{secrets.token_hex(8)}-"
"""Stands for a picture while the JSON is made; no text of a data set can hold it."""
_MARKS: Final = re.compile(re.escape(_MARK).encode() + rb"(\d+)>")


@dataclass(frozen=True, eq=False, slots=True)
class ChatRequest:
    """`pieces` of the body but for its last brace, ready to be joined; `key` is equal for requests of equal content."""

    pieces: tuple[bytes | Picture, ...]
    key: bytes
    top_logprobs: int | None = None
    """Likeliest tokens asked for in each place; None: no log-probabilities are."""

    @property
    def body(self) -> bytes:
        asked = "" if self.top_logprobs is None else f', "logprobs": true, "top_logprobs": {self.top_logprobs}'
        pieces = (piece.url if isinstance(piece, Picture) else piece for piece in self.pieces)
        return b"".join((*pieces, asked.encode(), b"}"))

    def without_logprobs(self) -> ChatRequest:
        return replace(self, top_logprobs=None)


def filled(rubric: Rubric, texts: Mapping[str, str], media: Mapping[str, Sequence[Part]]) -> list[Part]:
    """The question as parts, neighboring texts joined. texts: of the slots of text, with metadata as "metadata.NAME";
    media: of the others. ValueError for a slot that nothing fills."""
    parts: list[Part] = []
    for kind, name in rubric.pieces:
        if kind == "slot" and name not in media and name not in texts:
            raise ValueError(f"the rubric's question has {{{name}}}, but this sample's metadata has no such field")
        for part in [name] if kind == "text" else media[name] if name in media else [texts[name]]:
            last = parts[-1] if parts else None
            if isinstance(part, str) and isinstance(last, str):
                parts[-1] = last + part
            else:
                parts.append(part)
    return parts


def chat_request(
    model: str, system: str, parts: Sequence[Part], params: Mapping[str, Any], top_logprobs: int | None = None
) -> ChatRequest:
    """A request of one user's message with `parts` (str or Picture) after the system's text, unless that is empty."""
    pictures = [part for part in parts if isinstance(part, Picture)]
    numbers = iter(range(len(pictures)))
    content = [
        {"type": "text", "text": part}
        if isinstance(part, str)
        else {"type": "image_url", "image_url": {"url": f"{_MARK}{next(numbers)}>"}}
        for part in parts
    ]
    messages = [{"role": "system", "content": system}] if system else []
    payload = {"model": model, "messages": [*messages, {"role": "user", "content": content}], **params}
    texts = _MARKS.split(json.dumps(payload, ensure_ascii=False).removesuffix("}").encode("utf-8", "replace"))
    key = hashlib.sha256(str(top_logprobs).encode())
    pieces: list[bytes | Picture] = []
    for place, text in enumerate(texts):
        picture = pictures[int(text)] if place % 2 else None
        pieces.append(picture or text)
        key.update(picture.digest if picture else hashlib.sha256(text).digest())
    return ChatRequest(tuple(pieces), key.digest(), top_logprobs)
