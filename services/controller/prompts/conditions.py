"""Checks at submit that the condition images of a job's data fit into one batch, by the headers of the files.

Requests and micro-batches mix prompts, and a family puts the latents of a condition image on a grid that follows the
image's aspect ratio. So each line of a job's data, training or validation, must have as many images as the first line,
each at the aspect ratio of the first line's image at that place. This is stricter than necessary, because nearly equal
ratios share a grid. But the rule needs no model, and users can make data that keep it.
"""

from functools import cache
from math import gcd

from flowfleet.media.files import MediaLimits
from flowfleet.prompts.prompt import Prompt, media_type
from services.controller.prompts.sources import Sources
from services.controller.reading.places import is_remote


class ConditionShapes:
    """Shapes of one job's conditions: compares each line with the first of its size."""

    def __init__(self, sources: Sources) -> None:
        self._sources = sources
        self._firsts: dict[tuple[int, int] | None, Prompt] = {}
        """First line of each size."""
        self._size = cache(self._read_size)

    def problem(self, prompt: Prompt) -> str:
        """Says what is wrong with a line's images and what to do; empty if all is well.

        Another check names missing files; files that lie elsewhere are read when they are needed.
        """
        first = self._firsts.setdefault(prompt.size, prompt)
        if len(prompt.images) != len(first.images):
            return (
                f"has {len(prompt.images)} condition images, but {first.source} has {len(first.images)}: give every "
                "line of the job's data as many"
            )
        problems = (self._of_image(first, prompt, place) for place in range(len(prompt.images)))
        return next(filter(None, problems), "")

    def _of_image(self, first: Prompt, prompt: Prompt, place: int) -> str:
        try:
            size = self._size(prompt.images[place])
        except ValueError as error:
            return str(error)
        try:
            expected = self._size(first.images[place])
        except ValueError:  # named with the first line
            return ""
        if size is None or expected is None or size[0] * expected[1] == size[1] * expected[0]:
            return ""
        return (
            f"{prompt.images[place]} is {_shape(size)}, but image {place + 1} of {first.source} is {_shape(expected)}: "
            "crop or pad the condition images of the job's data to one aspect ratio"
        )

    def _read_size(self, url: str) -> tuple[int, int] | None:
        """Width and height of a picture on this machine. Raises ValueError if it cannot be read."""
        if is_remote(url) or not self._sources.places.is_file(url):
            return None
        size = self._sources.picture_size(url, media_type(url))
        if excess := MediaLimits().excess(*size, 1):
            raise ValueError(f"the column 'images' names {url}, a picture of {excess}; give a smaller one")
        return size


def _shape(size: tuple[int, int]) -> str:
    width, height = size
    divisor = gcd(width, height)
    return f"{width} x {height} ({width // divisor}:{height // divisor})"
