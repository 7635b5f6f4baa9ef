"""A trainer whose every first compilation takes long and holds the interpreter's lock, so that no other thread runs."""

import ctypes
import os
import sys
from functools import partial
from typing import Any

from torch._dynamo.callback import callback_handler

from services.trainer import __main__ as trainer
from services.trainer import beats
from services.trainer.model import engine
from services.trainer.parallel.blocks import compile_blocks

SECONDS = int(os.environ["SLOW_COMPILE_S"])
_watch = beats.Beats.watch_compilations


def watch_compilations(self: beats.Beats) -> None:
    _watch(self)
    slept: list[Any] = []

    def sleep(_: Any) -> None:
        if not slept:
            slept.append(ctypes.PyDLL(None).sleep(SECONDS))

    callback_handler.register_start_callback(sleep)


if __name__ == "__main__":
    beats.Beats.watch_compilations = watch_compilations  # type: ignore[method-assign]
    engine.compile_blocks = partial(compile_blocks, backend="eager")  # type: ignore[attr-defined]
    sys.exit(trainer.main())
