"""Why a trainer ends, for whoever started it: in the file `FLOWFLEET_LAST_WORDS`, a pod's termination message.

The first rank that fails by itself writes; ranks that fail because another one is gone have nothing to say. On
Kubernetes each pod has a file of its own, and the controller knows such words from a log's end by how they begin.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist

from flowfleet.process.service import LAST_WORDS

MAX_BYTES = 2000
"""Kubelets keep 4096 of a termination message."""
_CONSEQUENCES = ("by peer", "Connection refused", "timed out")


@contextmanager
def said() -> Iterator[None]:
    """Around all that a rank does."""
    try:
        yield
    except Exception as error:
        say(error)
        raise


def say(error: BaseException) -> None:
    """Writes the error, unless it is a consequence of another or another rank has said its own."""
    told = f"rank {os.environ.get('RANK', '0')}: {type(error).__name__}: {error}"
    lost_others = isinstance(error, dist.DistBackendError | dist.DistNetworkError | ConnectionError)
    path = os.environ.get(LAST_WORDS)
    if path is None or lost_others or (isinstance(error, RuntimeError) and any(sign in told for sign in _CONSEQUENCES)):
        return
    with contextlib.suppress(OSError), open(path, "ab") as file:
        if file.tell() == 0:
            file.write(told.encode()[:MAX_BYTES])
