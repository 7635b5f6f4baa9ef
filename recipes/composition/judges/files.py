"""The file of a judge: its weights in half precision, what it is, and its names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from recipes.composition.scenes import World


@dataclass(frozen=True)
class Kind:
    """What a judge is made for: pictures of `size` pixels, and what it calls what it finds."""

    name: str
    """"reward" or "heldout"."""
    size: int
    nouns: tuple[str, ...]
    styles: tuple[str, ...]
    colors: tuple[str, ...]

    @classmethod
    def of(cls, name: str, world: World) -> Kind:
        """The kind for a world's pictures."""
        return cls(name, world.size, world.nouns, world.styles, world.colors)

    def check(self, pictures: torch.Tensor) -> None:
        """Raises ValueError for pictures that are not (N, 3, size, size)."""
        height, width = pictures.shape[2:]
        if (height, width) != (self.size, self.size):
            raise ValueError(
                f"this judge looks at pictures of {self.size}×{self.size} pixels, these have {width}×{height}: "
                "take a judge of a world of such pictures"
            )


def write(path: Path, kind: Kind, parts: Mapping[str, Mapping[str, torch.Tensor]]) -> None:
    """Write the state of each part, by the part's name."""
    state = {f"{part}.{name}": value for part, values in parts.items() for name, value in values.items()}
    kept = {name: value.half() if value.is_floating_point() else value for name, value in state.items()}
    names = {name: "\n".join(getattr(kind, name)) for name in ("nouns", "styles", "colors")}
    path.parent.mkdir(parents=True, exist_ok=True)
    contiguous = {name: value.detach().cpu().contiguous() for name, value in kept.items()}
    save_file(contiguous, path, {"name": kind.name, "size": str(kind.size), **names})


def read(path: Path) -> tuple[Kind, dict[str, dict[str, torch.Tensor]]]:
    """The kind and the parts, in float32. Raises ValueError for a file that is not a judge's."""
    if not path.is_file():
        raise ValueError(f"{path} is not a file: train a judge, or name the file of one")
    parts: dict[str, dict[str, torch.Tensor]] = {}
    with safe_open(path, "pt") as opened:
        said = opened.metadata() or {}
        if missing := {"name", "size", "nouns", "styles", "colors"} - set(said):
            raise ValueError(f"{path} is not a judge: its metadata lack {', '.join(sorted(missing))}")
        for key in opened.keys():  # noqa: SIM118 - not a mapping
            part, _, name = key.partition(".")
            value = opened.get_tensor(key)
            parts.setdefault(part, {})[name] = value.float() if value.is_floating_point() else value
    nouns, styles, colors = (tuple(said[name].split("\n")) for name in ("nouns", "styles", "colors"))
    return Kind(said["name"], int(said["size"]), nouns, styles, colors), parts
