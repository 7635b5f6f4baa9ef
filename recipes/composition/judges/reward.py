"""The reward: detector, votes of pixels and reader, as one judge that is kept in one file."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
import torch.nn.functional as F

from recipes.composition.judges.detector import CELLS, Detector, Reader, cut_lines, spell_out
from recipes.composition.judges.files import Kind, write
from recipes.composition.judges.findings import SIGN, Findings, Thing
from recipes.composition.judges.pixels import BINS, shade_of, vote

WIDTHS = {64: 48, 128: 160}
"""Width of the detector by the picture's edge."""
THRESHOLD = 0.35
MAX_THINGS = 12


class RewardJudge:
    """Looks at pictures of one size. `look` is all that others need."""

    def __init__(self, kind: Kind, device: torch.device | str = "cpu") -> None:
        self.kind, self.device = kind, torch.device(device)
        self.detector = Detector(kind.size, len(kind.nouns), len(kind.styles), WIDTHS[kind.size]).to(device)
        self.reader = Reader().to(device)
        self.gains = torch.zeros(len(kind.colors), BINS**3, device=device)
        self.reads = True  # words

    @torch.inference_mode()
    def look(self, pictures: torch.Tensor) -> list[Findings]:
        """Findings of pictures (N, 3, S, S) float32 from 0 to 1, on any device. ValueError for others."""
        self.kind.check(pictures)
        self.detector.eval()
        self.reader.eval()
        pictures = pictures.to(self.device)
        heat, reach, style = self.detector(pictures)
        heat = heat.sigmoid()
        peaks = torch.where(heat == F.max_pool2d(heat, 3, 1, 1), heat, 0.0)
        owner, noun, row, column = (peaks > THRESHOLD).nonzero(as_tuple=True)
        certainty = peaks[owner, noun, row, column]
        sides = reach[owner, :, row, column].exp()
        middle = (torch.stack([column, row], 1) + 0.5) / CELLS
        boxes = torch.cat([middle - sides[:, :2], middle + sides[:, 2:]], 1).clamp(0, 1)
        shades = shade_of(pictures)
        color = vote(self.gains, shades[owner], boxes * self.kind.size) if len(owner) else owner
        words = self._read(pictures, boxes, owner, noun, certainty) if self.reads else {}
        things: list[list[Thing]] = [[] for _ in pictures]
        found = zip(*(t.tolist() for t in (owner, noun, boxes * self.kind.size, certainty, color)), strict=True)
        for place, kind, box, sure, tint in found:
            name = SIGN if kind == len(self.kind.nouns) else self.kind.nouns[kind]
            things[place].append(Thing(name, tuple(box), sure, self.kind.colors[tint] if tint >= 0 else ""))
        styles = style.argmax(1).tolist()
        return [
            Findings(_surest(ones), self.kind.styles[styles[place]], words.get(place, ""))
            for place, ones in enumerate(things)
        ]

    def _read(
        self,
        pictures: torch.Tensor,
        boxes: torch.Tensor,
        owner: torch.Tensor,
        noun: torch.Tensor,
        certainty: torch.Tensor,
    ) -> dict[int, str]:
        """What the most certain sign of each picture says."""
        signs = torch.nonzero(noun == len(self.kind.nouns)).squeeze(1)
        if not len(signs):
            return {}
        signs = signs[certainty[signs].argsort()]
        said = spell_out(self.reader(cut_lines(pictures[owner[signs]], boxes[signs])))
        return dict(zip(owner[signs].tolist(), said, strict=True))

    def save(self, path: Path) -> None:
        """Write the judge."""
        states = {"detector": self.detector.state_dict(), "reader": self.reader.state_dict()}
        write(path, self.kind, {**states, "pixels": {"gains": self.gains}})

    def restore(self, parts: Mapping[str, Mapping[str, torch.Tensor]]) -> None:
        """Take the weights of a file."""
        self.detector.load_state_dict(parts["detector"])
        self.reader.load_state_dict(parts["reader"])
        self.gains = parts["pixels"]["gains"].to(self.device)


def _surest(things: list[Thing]) -> list[Thing]:
    return sorted(things, key=lambda one: -one.certainty)[:MAX_THINGS]
