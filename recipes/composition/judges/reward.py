"""The reward: detector, votes of pixels and reader, as one judge that is kept in one file.

`look` finds things, of which `findings.answer` makes the score that is reported. `smooth` is that score without its
thresholds, for losses that follow a gradient: the mean of the same criteria, each from 0 to 1. With the certainties
c₁ ≥ c₂ ≥ … of a noun's peaks, moved so that they are 1/2 at the threshold:

- count of n: mean(c₁ … cₙ) · (1 − cₙ₊₁): the wanted ones are there, and not one more
- color: its probability by the mean vote of a thing's pixels, for the n surest, times their certainties
- position: (1 + cos a) / 2 times the counts of both nouns, with the angle a between the way from the one's middle to
  the other's and the way that is asked for. A noun's middle is the mean of the cells under the softmax of its map
- excluded from n on: 1 − cₙ
- style: its probability

Votes are read between the shades of their table; boxes have no gradient. Words have no such score.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
import torch.nn.functional as F

from recipes.composition.judges.files import Kind, write
from recipes.composition.judges.findings import SIGN, Findings, Thing
from recipes.composition.judges.networks.detector import CELLS, Detector, Reader, cut_lines, spell_out
from recipes.composition.judges.pixels import BINS, shade_of, vote
from services.reward.scorers.networks.geneval_rules import read_request

WIDTHS = {64: 48, 128: 160}
"""Width of the detector by the picture's edge."""
THRESHOLD = 0.35
MAX_THINGS = 12
FILLED = 0.5
"""Share of a box's pixels that are the thing's."""
WAYS = {"left of": (-1.0, 0.0), "right of": (1.0, 0.0), "above": (0.0, -1.0), "below": (0.0, 1.0)}
"""To the right and down."""


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

    def smooth(self, pictures: torch.Tensor, metadata: Sequence[Mapping[str, str]]) -> torch.Tensor:
        """(N,) scores from 0 to 1 for what the metadata ask, differentiable by pictures (N, 3, S, S) from 0 to 1.
        ValueError for metadata without a request, with a word, or with what the judge does not know."""
        self.kind.check(pictures)
        self.detector.eval()
        pictures = pictures.to(self.device)
        heat, reach, style = self.detector(pictures)
        table = self.gains.to(pictures.dtype).view(1, -1, BINS, BINS, BINS)
        places = (2 * pictures - 1).flip(1).permute(0, 2, 3, 1).unsqueeze(1)  # the last axis of the table is blue
        votes = F.grid_sample(table.expand(len(pictures), -1, -1, -1, -1), places, "bilinear", "border", False)
        parts = (heat, reach.detach().exp(), style.softmax(1), votes.squeeze(2))
        # A picture takes hundreds of small operations, which CPUs do faster than an accelerator starts them.
        seen = zip(*(part.cpu() for part in parts), metadata, strict=True)
        return torch.stack([self._smooth(*one) for one in seen])

    def _smooth(
        self,
        heat: torch.Tensor,
        reach: torch.Tensor,
        style: torch.Tensor,
        votes: torch.Tensor,
        metadata: Mapping[str, str],
    ) -> torch.Tensor:
        """The score of one picture."""
        request = read_request(metadata)
        if metadata.get("word"):
            raise ValueError("words have no smooth score: leave out the prompts whose metadata has a word")
        for known, names in (
            (self.kind.nouns, request.names),
            (self.kind.colors, [wanted.color for wanted in request.include if wanted.color is not None]),
            (self.kind.styles, [metadata["style"]] if metadata.get("style") else []),
        ):
            if unknown := [name for name in names if name not in known]:
                raise ValueError(f"the metadata ask for {unknown[0]}, and this judge knows {', '.join(known)}")
        peaks = torch.where(heat == F.max_pool2d(heat, 3, 1, 1), (heat - _logit(THRESHOLD)).sigmoid(), 0.0)
        sure, cells = peaks.flatten(1).sort(dim=1, descending=True)
        counts: list[torch.Tensor] = []
        others: list[torch.Tensor] = []
        for wanted in request.include:
            noun = self.kind.nouns.index(wanted.name)
            ones = sure[noun, : wanted.count]
            counts.append(ones.mean() * (1 - sure[noun, wanted.count]))
            if wanted.color is not None:
                tint = self.kind.colors.index(wanted.color)
                tints = torch.stack([self._tints(votes, reach, int(at)) for at in cells[noun, : wanted.count]])
                others.append((ones * tints[:, tint]).mean())
            if wanted.position is not None:
                relation, target = wanted.position
                way = _middle(heat[noun]) - _middle(heat[self.kind.nouns.index(request.include[target].name)])
                cosine = (way @ way.new_tensor(WAYS[relation])) / (way.square().sum() + 1e-6).sqrt()
                others.append((1 + cosine) / 2 * counts[-1] * counts[target])
        others += [1 - sure[self.kind.nouns.index(one.name), one.count - 1] for one in request.unspoken()]
        if metadata.get("style"):
            others.append(style[self.kind.styles.index(metadata["style"])])
        return torch.stack(counts + others).mean()

    def _tints(self, votes: torch.Tensor, reach: torch.Tensor, cell: int) -> torch.Tensor:
        """(colors,) probabilities of the thing at a cell."""
        row, column = divmod(cell, CELLS)
        left, up, right, down = (reach[:, row, column] * self.kind.size).tolist()
        x, y = ((place + 0.5) * self.kind.size / CELLS for place in (column, row))
        rows = slice(max(0, math.floor(y - up)), math.ceil(y + down))
        columns = slice(max(0, math.floor(x - left)), math.ceil(x + right))
        return (votes[:, rows, columns].mean((1, 2)) / FILLED).softmax(0)

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


def _middle(heat: torch.Tensor) -> torch.Tensor:
    """(2,) mean column and row of a map (C, C), in edges."""
    shares = heat.flatten().softmax(0).view_as(heat)
    at = (torch.arange(CELLS, device=heat.device) + 0.5) / CELLS
    return torch.stack([(shares.sum(0) * at).sum(), (shares.sum(1) * at).sum()])


def _logit(share: float) -> float:
    return math.log(share / (1 - share))
