"""The atlas: one picture of every noun in every style, and of every letter in every font, as arrays.

The pictures come from three packages of npm, which `build` fetches into a cache folder; none of them is in this
repository. `python -m recipes.composition.atlas` prints the folder of the atlas and builds it where it is missing. The
folder holds `sprites.png`, `glyphs.png` and `atlas.json`; it may be copied to a machine without network.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image

from recipes.composition.nouns import Noun, read_nouns

Bytes = NDArray[np.uint8]

FOLDER = "FLOWFLEET_COMPOSITION_ATLAS"
"""Environment variable that names the folder of the atlas."""
STYLES = ("cartoon", "glossy", "flat")
"""Words of the styles in captions."""
LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
NUM_DIRECTIONS = 72
"""Directions in which the extent of a sprite is known."""
OPAQUE = 64
"""Alpha, of 255, from which a pixel belongs to the thing."""
COLUMNS = 32
"""Sprites in a row of sprites.png."""


@dataclass(frozen=True, eq=False)
class Atlas:
    """Sprites of `nouns` × `styles` and glyphs of fonts × `LETTERS`."""

    nouns: tuple[Noun, ...]
    styles: tuple[str, ...]
    sprites: Bytes
    """(nouns × styles, E, E, 4) uint8: RGB multiplied by alpha, and alpha; style by style within a noun. Trimmed: the
    longer side of what is drawn fills the edge but for a pixel on both sides."""
    glyphs: Bytes
    """(fonts, 26, G, G) uint8: how much of a pixel a letter covers. Capitals fill the height; each is centered."""
    advances: NDArray[np.float32]
    """(fonts, 26) float32: widths of the letters, as shares of G."""

    @property
    def edge(self) -> int:
        """Pixels along a sprite's side."""
        return int(self.sprites.shape[1])

    def of(self, nouns: Sequence[str], styles: Sequence[str], edge: int) -> Atlas:
        """The part with these nouns and styles, sprites averaged down to `edge` pixels.

        Raises ValueError for a noun or style that is not here, and for an edge that does not divide this atlas's.
        """
        own = [noun.name for noun in self.nouns]
        if unknown := [name for name in (*nouns, *styles) if name not in (*own, *self.styles)]:
            raise ValueError(f"the atlas has no {', '.join(unknown)}: take of its nouns and styles, or build another")
        if self.edge % edge:
            raise ValueError(f"sprites of {self.edge} pixels cannot be averaged to {edge}: take a divisor")
        picked = [own.index(noun) * len(self.styles) + self.styles.index(style) for noun in nouns for style in styles]
        factor = self.edge // edge
        blocks = self.sprites[picked].reshape(-1, edge, factor, edge, factor, 4)
        sprites = blocks.mean(axis=(2, 4)).round().astype(np.uint8)
        kept = tuple(self.nouns[own.index(noun)] for noun in nouns)
        return Atlas(kept, tuple(styles), sprites, self.glyphs, self.advances)

    @cached_property
    def extents(self) -> torch.Tensor:
        """(sprites, NUM_DIRECTIONS) float32: how far a thing reaches from its sprite's center in each direction, in
        edges; direction i is at the angle 2πi / NUM_DIRECTIONS from right towards down."""
        alpha = torch.from_numpy(self.sprites[..., 3] >= OPAQUE).flatten(1)
        at = (torch.arange(self.edge, dtype=torch.float32) + 0.5) / self.edge - 0.5
        y, x = torch.meshgrid(at, at, indexing="ij")
        angles = torch.arange(NUM_DIRECTIONS) * (2 * torch.pi / NUM_DIRECTIONS)
        reach = [torch.where(alpha, (x * angle.cos() + y * angle.sin()).flatten(), -1.0).amax(1) for angle in angles]
        half_pixel = 0.5 / self.edge * (angles.cos().abs() + angles.sin().abs())
        return torch.stack(reach, 1) + half_pixel

    @cached_property
    def brightness(self) -> torch.Tensor:
        """(sprites, 3) float32: 5th percentile, median and 95th percentile of a thing's luminance, of 0 … 1."""
        bounds = []
        for sprite in self.sprites.astype(np.float32) / 255:
            inside = sprite[..., 3] >= 0.5
            luminance = (sprite[inside][:, :3] / sprite[inside][:, 3:]) @ np.array([0.299, 0.587, 0.114], np.float32)
            bounds.append(np.percentile(luminance, (5, 50, 95)))
        return torch.from_numpy(np.array(bounds, np.float32))


def save(atlas: Atlas, folder: Path) -> None:
    """Write sprites.png, glyphs.png and atlas.json; the index last, so that a folder with it is complete."""
    folder.mkdir(parents=True, exist_ok=True)
    Image.fromarray(_sheet(atlas.sprites)).save(folder / "sprites.png", optimize=True)
    fonts, letters, height, width = atlas.glyphs.shape
    Image.fromarray(_sheet(atlas.glyphs.reshape(fonts * letters, height, width))).save(folder / "glyphs.png")
    index = {
        "nouns": [[noun.name, noun.icon, noun.plural] for noun in atlas.nouns],
        "styles": atlas.styles,
        "edge": atlas.edge,
        "glyph_edge": height,
        "advances": atlas.advances.round(4).tolist(),
    }
    (folder / "atlas.json").write_text(json.dumps(index, ensure_ascii=False) + "\n")


def read(folder: Path) -> Atlas:
    """The atlas that `save` wrote. Raises ValueError where there is none."""
    if not (folder / "atlas.json").is_file():
        raise ValueError(
            f"{folder} holds no atlas: run `python -m recipes.composition.atlas`, or name its folder by ${FOLDER}"
        )
    index = json.loads((folder / "atlas.json").read_text())
    nouns = tuple(Noun(*row) for row in index["nouns"])
    advances = np.array(index["advances"], np.float32)
    num_sprites = len(nouns) * len(index["styles"])
    sprites = _cut(folder / "sprites.png", num_sprites, index["edge"])
    glyphs = _cut(folder / "glyphs.png", advances.size, index["glyph_edge"])
    return Atlas(nouns, tuple(index["styles"]), sprites, glyphs.reshape(*advances.shape, *glyphs.shape[1:]), advances)


def blank() -> Atlas:
    """An atlas of all nouns and styles without pictures, for what depends on names alone."""
    nouns = read_nouns()
    sprites = np.zeros((len(nouns) * len(STYLES), 64, 64, 4), np.uint8)
    return Atlas(nouns, STYLES, sprites, np.zeros((1, 26, 1, 1), np.uint8), np.ones((1, 26), np.float32))


def default_folder() -> Path:
    """Where `load` looks: $FLOWFLEET_COMPOSITION_ATLAS, else a folder in the user's cache."""
    if FOLDER in os.environ:
        return Path(os.environ[FOLDER])
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "flowfleet" / "composition" / "atlas"


def load() -> Atlas:
    """The atlas in `default_folder`, built first where it is missing, or made from another list of nouns. One that
    the environment names is taken as it is."""
    folder = default_folder()
    if FOLDER in os.environ:
        return read(folder)
    if (folder / "atlas.json").is_file() and (kept := read(folder)).nouns == read_nouns():
        return kept
    from recipes.composition.sprites import build  # needs node and a renderer, which a copied atlas does not

    save(build(folder.parent / "packages"), folder)
    return read(folder)


def _sheet(tiles: Bytes) -> Bytes:
    """(T, E, E, …) as one picture, `COLUMNS` tiles a row."""
    rows = -(-len(tiles) // COLUMNS)
    padded = np.concatenate([tiles, np.zeros((rows * COLUMNS - len(tiles), *tiles.shape[1:]), np.uint8)])
    grid = padded.reshape(rows, COLUMNS, *tiles.shape[1:]).swapaxes(1, 2)
    return grid.reshape(rows * tiles.shape[1], COLUMNS * tiles.shape[2], *tiles.shape[3:])


def _cut(path: Path, count: int, edge: int) -> Bytes:
    """The first `count` tiles of a sheet."""
    sheet = np.asarray(Image.open(path))
    grid = sheet.reshape(sheet.shape[0] // edge, edge, COLUMNS, edge, *sheet.shape[2:]).swapaxes(1, 2)
    return grid.reshape(-1, edge, edge, *sheet.shape[2:])[:count]


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    load()
    print(default_folder())
