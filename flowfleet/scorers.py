"""The scorers of the reward service, as the `scorer.toml` of each folder describes them. Imports no package.

`python -m flowfleet.scorers` prints the images of scorers with a library of their own, one a line, for `docker/build`,
`requirements/lock` and `tests/packages`.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Final, Literal

FOLDER: Final = Path(__file__).parents[1] / "services/reward/scorers"
SHARED_IMAGES: Final = ("reward", "reward-models")
"""Images of several scorers. `reward-models` adds torch."""


@dataclass(frozen=True)
class Scorer:
    """A table `[scorers.NAME]`."""

    settings: str = ""
    """Class of its settings, as CLASS of the folder's package or MODULE:CLASS; empty: it has none."""
    params: str = ""
    """Class of a job's parameters likewise; empty: it takes none, or describes them elsewhere."""


@dataclass(frozen=True)
class Library:
    """The table `[library]`: what an image of its own needs besides the extra of its name."""

    about: str
    """Names what the image adds, for its label."""
    license: str
    """License of the library's code."""
    imports: str
    """Modules that the build imports as a check."""
    base: Literal["reward", "reward-models"] = "reward-models"
    """The Dockerfile that builds it."""
    torchvision: str = ""
    """Requirement of torchvision, which is installed with the device's torch."""
    own_versions: bool = False
    """Pins versions that differ from those of the other images."""
    without: tuple[str, ...] = ()
    """Packages that the library names and the scorer does not import."""
    tested_with: tuple[str, ...] = ()
    """Pinned packages that its long test adds to the development environment."""


@dataclass(frozen=True)
class Folder:
    """Content of a `scorer.toml`: a scorer, or a family of scorers that share code."""

    name: str
    score: str
    """Meaning of the score, for the table of docs/scorers.md."""
    media: str
    image: str = SHARED_IMAGES[0]
    """Image without its prefix, and extra of pyproject.toml."""
    extra: str = ""
    """Extra that the scorer needs besides, which no image has."""
    network: Literal["", "url", "judges"] = ""
    """Calls servers: at a URL of its settings, or judges of the release."""
    page: str = ""
    """Link of the documentation."""
    scorers: Mapping[str, Scorer] = field(default_factory=dict)
    library: Library | None = None

    @classmethod
    def read(cls, path: Path) -> Folder:
        """Raises ValueError naming the file that does not hold together."""
        table = tomllib.loads(path.read_text(encoding="utf-8"))
        try:
            scorers = {name: Scorer(**one) for name, one in table.pop("scorers").items()}
            library = Library(**table.pop("library")) if "library" in table else None
            folder = cls(path.parent.name, scorers=scorers, library=library, **table)
        except (KeyError, TypeError) as error:
            raise ValueError(f"{path}: {error}") from error
        own = f"reward-{folder.name.replace('_', '-')}"
        if folder.image not in (SHARED_IMAGES if library is None else (own,)):
            raise ValueError(f"{path}: image must be {own} with a table [library], else {' or '.join(SHARED_IMAGES)}")
        return folder


@cache
def folders() -> tuple[Folder, ...]:
    """The folders by name; none where the reward service is not installed."""
    return tuple(map(Folder.read, sorted(FOLDER.glob("*/scorer.toml"))))


@cache
def known() -> Mapping[str, Folder]:
    """Name of a scorer to its folder."""
    return {name: folder for folder in folders() for name in folder.scorers}


def without_settings() -> tuple[str, ...]:
    """Names of the scorers that have no settings."""
    return tuple(name for name, folder in known().items() if not folder.scorers[name].settings)


def _line(folder: Folder, library: Library) -> str:
    versions = "own" if library.own_versions else "shared"
    lists = (" ".join(library.without), " ".join(library.tested_with))
    columns = (folder.image, folder.name, library.base, library.torchvision, versions, *lists)
    return "|".join((*columns, library.imports, library.about))


if __name__ == "__main__":
    for one in folders():
        if one.library:
            print(_line(one, one.library))
