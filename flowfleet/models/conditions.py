"""Condition images whose latents follow the sample's own tokens, as models that edit pictures take them.

The latents of the i-th image travel as the extra `image_<i>`, (B, rows, columns, channels of a token) float32: their
shape says the grid, so that prompts whose images have other grids cannot come into one batch, and no device is asked
for it.
"""

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from flowfleet.models.base import ModelAdapter
from flowfleet.models.embeds import PromptEmbeds, concat_embeds
from flowfleet.models.settings import Size

_NAME = "image_"


class ConditionedAdapter(ModelAdapter):
    """Base of families that take condition images."""

    max_images: ClassVar[int]
    min_images: ClassVar[int] = 0
    condition_pixels: int | None = None
    """Area of condition images that the job sets."""

    def resize_conditions(self, pixels: int | None) -> None:
        self.condition_pixels = pixels

    def _pixels_wanted(self) -> int:
        """Area of a condition image: the job's, else the family's."""
        return self.condition_pixels or self._usual_pixels()

    def _usual_pixels(self) -> int:
        return 1024**2

    @abstractmethod
    def _resize(self, picture: Image.Image) -> Image.Image:
        """The RGB picture at the size at which the VAE sees it."""

    @abstractmethod
    def _token_grid(self, size: Size) -> tuple[int, int]: ...

    def _rows_of_images(self, prompts: Sequence[str], images: Any) -> list[list[Image.Image]]:
        """The RGB pictures of each prompt. Raises ValueError for a number that the family does not take."""
        rows: Any = [[]] * len(prompts) if images is None and not self.min_images else images
        if rows is None or len(rows) != len(prompts):
            given = "none" if rows is None else len(rows)
            raise ValueError(f"{len(prompts)} prompts need as many sequences of condition images, but got {given}")
        for row in rows:
            if not self.min_images <= len(row) <= self.max_images:
                raise ValueError(
                    f"this model takes {self.min_images} to {self.max_images} condition images a prompt, but one has "
                    f"{len(row)}"
                )
            if row and self.vae is None:
                raise ValueError("encode needs the VAE for condition images: load the adapter with the component vae")
        return [[picture.convert("RGB") for picture in row] for row in rows]

    def _with_conditions(self, encoded: PromptEmbeds, rows: Sequence[Sequence[Image.Image]]) -> PromptEmbeds:
        """Adds the latents of each row's pictures."""
        if not any(rows):
            return encoded
        singles = [encoded.select([index]) for index in range(len(rows))]
        return concat_embeds(
            [
                replace(single, extras={**single.extras, **self._conditions(row)})
                for single, row in zip(singles, rows, strict=True)
            ]
        )

    def _conditions(self, pictures: Sequence[Image.Image]) -> dict[str, Tensor]:
        return {f"{_NAME}{number}": self._condition_latents(one) for number, one in enumerate(pictures, start=1)}

    def _condition_latents(self, picture: Image.Image) -> Tensor:
        """(1, rows, columns, channels) float32 on the adapter's device."""
        resized = self._resize(picture)
        size = Size(resized.height, resized.width)
        tokens = self._encode_media(torch.from_numpy(np.array(resized))[None, None], size)
        return tokens.reshape(1, *self._token_grid(size), -1).to(self.device)

    def _blank_conditions(self, blank: PromptEmbeds, multiple: int) -> PromptEmbeds:
        """Adds the latents of a square image to each blank prompt."""
        side = max(1, round(self._pixels_wanted() ** 0.5 / multiple)) * multiple
        channels = self.latent_shape(Size(side, side))[-1]
        latents = torch.zeros(len(blank), *self._token_grid(Size(side, side)), channels, device=self.device)
        return replace(blank, extras={**blank.extras, f"{_NAME}1": latents})


def conditions_of(prompts: PromptEmbeds, device: torch.device) -> list[Tensor]:
    """Latents (B, rows, columns, channels) of the condition images, in order."""
    names = (name for name in prompts.extras if name.startswith(_NAME))
    ordered = sorted(names, key=lambda name: int(name.removeprefix(_NAME)))
    return [prompts.extras[name].to(device) for name in ordered]


def too_narrow(picture: Image.Image, pixels: float) -> ValueError:
    """The error for a picture of which nothing is left at that area."""
    return ValueError(
        f"a condition image of {picture.width} x {picture.height} is too narrow for an area of {pixels:.0f} pixels: "
        "give a squarer one, or raise condition_pixels"
    )
