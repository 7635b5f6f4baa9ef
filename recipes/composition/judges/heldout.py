"""The judge that training never sees: pretrained features, a class for every cell, learned colors, and RapidOCR.

Pictures are enlarged to 128×128. Features of EfficientNet-Lite0 at three strides are joined on 16×16 cells. Each cell
says which noun, which color and which style it is in the middle of, or none, and where the thing's box is, as in FCOS
(arXiv 1904.01355). Words are read by RapidOCR's recognizer, whose characters are reduced to A–Z.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from PIL import Image
from torch import nn

if TYPE_CHECKING:
    from services.reward.scorers.reading.recognition import LineReader

from recipes.composition.judges.files import Kind, write
from recipes.composition.judges.findings import SIGN, Findings, Thing
from recipes.composition.judges.networks.lite import WIDTHS, Lite
from services.reward.scorers.networks.geneval_rules import Box

CELLS = 16
"""Cells along an edge, of pictures of any size."""
EDGE = 128
"""Pictures are looked at in this size: of half of it, features see too little."""
WIDTH = 160
THRESHOLDS = {64: 0.85, 128: 0.3}
"""Certainty from which a thing counts. In the small world the judge then says yes as often as the labels; in the full
one, whose certainty is shared by 284 nouns, of 0.85, 0.5 and 0.3 this is right most often on renders, and the medium
one has the same."""
MAX_COVERED = 0.5
"""Boxes of two things share no more of the smaller one: what shares more is one thing, found twice."""
LINE_WIDTH = 120
INSET = 0.06
"""Share of a sign's box that is left out on each side before reading: its frame."""
ALIKE: Mapping[str, str] = {"0": "O", "1": "I", "|": "I", "l": "I", "5": "S", "8": "B", "2": "Z"}
"""Characters that are read for a capital which looks like them."""


class Head(nn.Module):
    """Features to answers of cells."""

    def __init__(self, num_nouns: int, num_styles: int, num_colors: int) -> None:
        super().__init__()
        self.fold = EDGE // 4 // CELLS
        inside = self.fold**2 * WIDTHS[0] + WIDTHS[1] + WIDTHS[2]
        self.join = nn.Sequential(nn.Conv2d(inside, WIDTH, 1, bias=False), nn.BatchNorm2d(WIDTH), nn.GELU())
        self.blocks = nn.ModuleList([Mixer(WIDTH) for _ in range(3)])
        self.sizes = (num_nouns + 2, 4, num_styles, num_colors)
        self.out = nn.Conv2d(WIDTH, sum(self.sizes), 1)

    def forward(self, features: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Answers of each cell: logits of nothing, the nouns and the sign; logs of the box's reach; logits of styles
        and of colors. Each is (N, channels, CELLS, CELLS)."""
        near, *others = features
        x = self.join(torch.cat([F.pixel_unshuffle(near, self.fold), *map(_spread, others)], 1))
        for block in self.blocks:
            x = block(x)
        return list(self.out(x).split(self.sizes, 1))


class Mixer(nn.Module):
    """Each channel over 7×7 cells, then each cell over its channels (ConvNeXt's block, arXiv 2201.03545)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.over_cells = nn.Conv2d(width, width, 7, padding=3, groups=width, bias=False)
        self.norm = nn.BatchNorm2d(width)
        self.wide, self.narrow = nn.Conv2d(width, 2 * width, 1), nn.Conv2d(2 * width, width, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = x + self.narrow(F.gelu(self.wide(self.norm(self.over_cells(x)))))
        return result


class HeldoutJudge:
    """Looks at pictures of one size. `look` is all that others need."""

    def __init__(self, kind: Kind, device: torch.device | str = "cpu") -> None:
        self.kind, self.device = kind, torch.device(device)
        self.reads = True  # words; without RapidOCR all else can be looked at
        self.features = Lite().to(device)
        self.head = Head(len(kind.nouns), len(kind.styles), len(kind.colors)).to(device)

    def cells(self, pictures: torch.Tensor) -> list[torch.Tensor]:
        """What `Head` says of pictures (N, 3, S, S) from 0 to 1."""
        if pictures.shape[-1] != EDGE:
            pictures = F.interpolate(pictures, (EDGE, EDGE), mode="bicubic", align_corners=False)
        said: list[torch.Tensor] = self.head(self.features(pictures))
        return said

    @torch.inference_mode()
    def look(
        self, pictures: torch.Tensor, threshold: float | None = None, asked: torch.Tensor | None = None
    ) -> list[Findings]:
        """Findings of pictures (N, 3, S, S) float32 from 0 to 1, on any device. `threshold`: in place of its size's.
        `asked` (N, nouns) bool, of each picture at least one: whatever may be a noun's is called by the likeliest of
        these, as certain as it is that any noun's is there. ValueError for other pictures."""
        self.kind.check(pictures)
        self.features.eval()
        self.head.eval()
        nouns, reach, styles, colors = self.cells(pictures.to(self.device))
        shares = nouns.softmax(1)
        certainty, kind = shares.max(1)
        if asked is not None:
            certainty = shares[:, 1:-1].sum(1)
            kind = 1 + (shares[:, 1:-1] * asked[:, :, None, None].to(shares)).argmax(1)
        least = THRESHOLDS[self.kind.size] if threshold is None else threshold
        owner, row, column = ((kind > 0) & (certainty > least)).nonzero(as_tuple=True)
        sides = reach[owner, :, row, column].exp()
        middle = (torch.stack([column, row], 1) + 0.5) / CELLS
        boxes = torch.cat([middle - sides[:, :2], middle + sides[:, 2:]], 1).clamp(0, 1) * self.kind.size
        found: list[list[tuple[Thing, int]]] = [[] for _ in pictures]
        columns = (
            owner,
            kind[owner, row, column],
            boxes,
            certainty[owner, row, column],
            colors[owner, :, row, column].argmax(1),
            styles[owner, :, row, column].argmax(1),
        )
        names = (*self.kind.nouns, SIGN)
        for place, number, box, sure, color, style in zip(*(each.tolist() for each in columns), strict=True):
            found[place].append((Thing(names[number - 1], tuple(box), sure, self.kind.colors[color]), style))
        kept = [_without_doubles(ones) for ones in found]
        words = self._read(pictures, kept) if self.reads else {}
        return [
            Findings([thing for thing, _ in ones], self._style(ones), words.get(place, ""))
            for place, ones in enumerate(kept)
        ]

    def _style(self, found: Sequence[tuple[Thing, int]]) -> str:
        """What most things are drawn in, "" without things."""
        said = [style for thing, style in found if thing.name != SIGN]
        return self.kind.styles[max(set(said), key=said.count)] if said else ""

    def _read(self, pictures: torch.Tensor, found: Sequence[Sequence[tuple[Thing, int]]]) -> dict[int, str]:
        """What the most certain sign of each picture says."""
        from services.reward.scorers.reading.recognition import WHOLE, as_line  # RapidOCR, which training does without

        places, lines = [], []
        for place, ones in enumerate(found):
            sign = next((thing for thing, _ in ones if thing.name == SIGN), None)
            if sign is not None:
                pixels = (pictures[place].permute(1, 2, 0) * 255).round().byte().cpu().numpy()
                places.append(place)
                lines.append(as_line(Image.fromarray(pixels).crop(_inner(sign.box)), WHOLE, LINE_WIDTH))
        if not lines:
            return {}
        reader, letters = self._reader
        return {places[index]: _spell(one.probabilities @ letters) for index, one in reader.read(lines)}

    @cached_property
    def _reader(self) -> tuple[LineReader, NDArray[np.float32]]:
        """RapidOCR's recognizer, and (its alphabet, 27): which character counts as which letter, 0 as none."""
        from services.reward.scorers.reading.recognition import LineReader

        reader = LineReader(1)
        counts = np.zeros((len(reader.alphabet), 27), np.float32)
        for column, character in enumerate(reader.alphabet):
            letter = ALIKE.get(character, character.upper())
            is_letter = column > 0 and len(letter) == 1 and "A" <= letter <= "Z"
            counts[column, ord(letter) - 64 if is_letter else 0] = 1
        return reader, counts

    def save(self, path: Path) -> None:
        """Write the judge."""
        write(path, self.kind, {"features": self.features.state_dict(), "head": self.head.state_dict()})

    def restore(self, parts: Mapping[str, Mapping[str, torch.Tensor]]) -> None:
        """Take the weights of a file."""
        self.features.load_state_dict(parts["features"])
        self.head.load_state_dict(parts["head"])
        self.features.to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # a third faster on CPUs


def _spread(features: torch.Tensor) -> torch.Tensor:
    """Features on `CELLS` cells along an edge."""
    factor = CELLS // features.shape[-1]
    return features.repeat_interleave(factor, 2).repeat_interleave(factor, 3)


def _without_doubles(found: Sequence[tuple[Thing, int]]) -> list[tuple[Thing, int]]:
    """The most certain first, without those whose box mostly lies in that of a more certain one, or around it."""
    kept: list[tuple[Thing, int]] = []
    for thing, style in sorted(found, key=lambda one: -one[0].certainty):
        if all(_covered(thing.box, other.box) < MAX_COVERED for other, _ in kept):
            kept.append((thing, style))
    return kept


def _covered(one: Box, other: Box) -> float:
    """The share of the smaller box that lies in the other."""
    across = min(one[2], other[2]) - max(one[0], other[0])
    down = min(one[3], other[3]) - max(one[1], other[1])
    if across <= 0 or down <= 0:
        return 0.0
    return across * down / min((box[2] - box[0]) * (box[3] - box[1]) for box in (one, other))


def _inner(box: Box) -> tuple[int, int, int, int]:
    left, top, right, bottom = box
    across, down = INSET * (right - left), INSET * (bottom - top)
    left, top = round(left + across), round(top + down)
    return left, top, max(round(right - across), left + 4), max(round(bottom - down), top + 4)


def _spell(frames: NDArray[np.float32]) -> str:
    """The best path through (frames, 27) probabilities, repeats joined and blanks left out."""
    best = frames.argmax(1)
    changed = np.concatenate([[True], best[1:] != best[:-1]])
    return "".join(chr(64 + letter) for letter in best[changed & (best > 0)])
