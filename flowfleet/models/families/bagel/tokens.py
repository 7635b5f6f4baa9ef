"""The tokens of BAGEL's tokenizer that frame texts and pictures."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

_FRAMES: Final = ("<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>")


@dataclass(frozen=True)
class SpecialTokens:
    """Their ids."""

    start: int
    end: int
    picture: tuple[int, int]
    """Tokens that begin and end a picture."""
    patch: int
    """Stands for a patch of a picture that is looked at; never an input of the transformer."""

    @classmethod
    def of(cls, path: str | Path) -> SpecialTokens:
        """Reads the tokenizer's files, so that a trainer needs no tokenizer. Raises ValueError where a token is not
        there."""
        ids = _added(Path(path))
        if missing := [token for token in _FRAMES if token not in ids]:
            raise ValueError(f"the tokenizer of {path} has no {missing[0]}: give the folder of a whole BAGEL")
        start, end, begin, close, patch = (ids[token] for token in _FRAMES)
        return cls(start, end, (begin, close), patch)

    def wrapped(self, tokenizer: Any, text: str) -> list[int]:
        """A text as the model was trained on it."""
        return [self.start, *tokenizer(text, add_special_tokens=False)["input_ids"], self.end]


def _added(folder: Path) -> Mapping[str, int]:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        try:
            content = json.loads((folder / name).read_text(encoding="utf-8"))
        except OSError:
            continue
        except ValueError as error:
            raise ValueError(f"{folder / name} cannot be read: {error}") from error
        if name == "tokenizer.json":
            return {token["content"]: int(token["id"]) for token in content.get("added_tokens", [])}
        known = content.get("added_tokens_decoder", {})
        return {token["content"]: int(number) for number, token in known.items()}
    raise ValueError(f"{folder} has no tokenizer: give the folder of a whole BAGEL")
