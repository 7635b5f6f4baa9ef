"""Turns on a rank's device between its updates and the samples that it makes as a replica. Updates come first.

An update waits for the denoising step at work, not for the whole batch: between two steps a batch lets updates pass.
Nothing that sampling reads is changed by an update, so a batch that waited makes the same bits.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

BEAT_EVERY_S: Final = 1.0


class Turns:
    """Thread-safe. One thread trains, another samples."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._training = False
        self._sampling = False
        self.before_training: Callable[[], None] = lambda: None
        """Called when nothing samples any more."""

    @contextmanager
    def training(self) -> Iterator[None]:
        """Around an update: waits until nothing samples, and nothing does inside."""
        with self._changed:
            self._training = True
            self._changed.wait_for(lambda: not self._sampling)
        try:
            self.before_training()
            yield
        finally:
            with self._changed:
                self._training = False
                self._changed.notify_all()

    @contextmanager
    def sampling(self, beat: Callable[[], None]) -> Iterator[None]:
        """Around a batch. `beat` is called while it waits."""
        self._take(beat)
        try:
            yield
        finally:
            self._give()

    def between_steps(self, beat: Callable[[], None]) -> None:
        """Lets an update pass that waits. Inside `sampling`."""
        if self._training:
            self._give()
            self._take(beat)

    def _take(self, beat: Callable[[], None]) -> None:
        with self._changed:
            while self._training:
                self._changed.wait(BEAT_EVERY_S)
                beat()
            self._sampling = True

    def _give(self) -> None:
        with self._changed:
            self._sampling = False
            self._changed.notify_all()
