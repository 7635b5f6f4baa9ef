"""HunyuanImage-3.0's sequence before a picture: token ids of the prompt, and which tokens tell the size.

    pretrain   <bos> [system prompt] PROMPT <boi> <img_size_S> <img_ratio_R>
    instruct   <bos> [system prompt, blank line] "User: " PROMPT [blank line] "Assistant: " <answer> <boi> …

`generation_config.json` says which template a checkpoint takes and which system prompt. The text of the latter is read
from the checkpoint's `system_prompt.py`, whose string literals are parsed and never executed. A picture without
guidance is drawn after the same sequence with `<cfg>` in the place of every token of PROMPT.
"""

from __future__ import annotations

import ast
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from flowfleet.models.settings import Size

RATIOS: Final = 37
"""Most tokens of a ratio; the base model has 33."""
_SYSTEM_FILE: Final = "system_prompt.py"
_UNIFIED: Final = "unified_system_prompt_en"
_BY_TASK: Final = "t2i_system_prompts"
_EXTRA_RATIOS: Final = ((1024, 768), (1280, 720), (768, 1024), (720, 1280))
"""Height and width behind the last four tokens of a ratio."""


@dataclass(frozen=True)
class Template:
    """Text around a prompt."""

    before: str
    after: str
    system: str

    @classmethod
    def of(cls, path: str | Path, generation: Mapping[str, Any]) -> Template:
        """The template of a checkpoint. Raises ValueError for one that is unknown, or a system prompt it lacks."""
        name = generation.get("sequence_template", "pretrain")
        if name not in ("pretrain", "instruct"):
            raise ValueError(f"{path}: generation_config.json has the unknown sequence_template {name!r}")
        system = system_prompt(Path(path), str(generation.get("use_system_prompt") or "None"))
        if name == "pretrain":
            return cls("", "", system)
        return cls("User: ", "\n\nAssistant: <answer>", f"{system}\n\n" if system else "")

    def ids(self, tokenizer: Any, prompt: str) -> tuple[list[int], slice]:
        """Token ids up to and with `<boi>`, and where the prompt's own are: none of a blank prompt. The parts are
        encoded one by one."""

        def encode(text: str) -> list[int]:
            ids: list[int] = tokenizer.encode(text, add_special_tokens=False) if text else []
            return ids

        start = [tokenizer.bos_token_id, *encode(self.system), *encode(self.before)]
        prompt_ids = encode(prompt) if prompt.strip() else []
        after = ["\n\n", "Assistant: ", "<answer>"] if self.after else []  # one by one, as the published code does
        end = [token for part in after for token in encode(part)]
        boi: int = tokenizer.convert_tokens_to_ids("<boi>")
        return [*start, *prompt_ids, *end, boi], slice(len(start), len(start) + len(prompt_ids))


def system_prompt(folder: Path, name: str) -> str:
    """The text that `use_system_prompt` of generation_config.json means, read from the checkpoint; "" for "None"."""
    if name == "None":
        return ""
    texts = _literals(folder / _SYSTEM_FILE)
    if name == "dynamic":  # by the task, which is to draw
        name = "en_vanilla"
    text = texts.get(_UNIFIED) if name == "en_unified" else dict(texts.get(_BY_TASK) or {}).get(name)
    if isinstance(text, list | tuple):
        text = text[0]
    if not isinstance(text, str):
        raise ValueError(
            f"model {folder} has no system prompt {name!r} in its {_SYSTEM_FILE}: copy that file from where the "
            'checkpoint was published, or set use_system_prompt to "None" in its generation_config.json'
        )
    return text.strip()


def _literals(file: Path) -> dict[str, Any]:
    """Values of the assignments in a Python file that are literals, or lists and dictionaries of such and of names
    that were assigned before."""
    try:
        tree = ast.parse(file.read_text(encoding="utf-8"))
    except (OSError, SyntaxError, ValueError):
        return {}
    literals: dict[str, Any] = {}
    for node in tree.body:
        if isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name):
            literals[node.targets[0].id] = _value(node.value, literals)
    return literals


def _value(node: ast.expr, known: Mapping[str, Any]) -> Any:
    """None for what is no literal."""
    if isinstance(node, ast.Constant):
        return node.value
    if isinstance(node, ast.Name):
        return known.get(node.id)
    if isinstance(node, ast.List | ast.Tuple):
        return [_value(part, known) for part in node.elts]
    if isinstance(node, ast.Dict):
        keys = [None if key is None else _value(key, known) for key in node.keys]
        return {key: _value(part, known) for key, part in zip(keys, node.values, strict=True)}
    return None


def ratios(base: int) -> list[float]:
    """Height over width behind each `<img_ratio_i>`: 33 between 1 : 4 and 4 : 1 at an area near `base` squared, whose
    sides change in steps of base / 16 until they are half or twice of it, and four more."""
    step = base // 16
    sides = [(min(base + n * step, 2 * base), max(base - n * step, base // 2)) for n in range(1, 17)]
    usual = sorted([*(h / w for h, w in sides), 1.0, *(w / h for h, w in sides)])
    return usual + [height / width for height, width in _EXTRA_RATIOS]


def ratio_token(size: Size, base: int, count: int) -> int:
    """Number of the token whose ratio is the nearest to a size's, of the first `count`."""
    wanted = size.height / size.width
    known = ratios(base)[:count]
    return min(range(len(known)), key=lambda number: (math.fabs(known[number] - wanted), number))
