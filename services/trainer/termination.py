"""The termination message of a trainer: its own error, in the file `FLOWFLEET_TERMINATION_MESSAGE`.

The first rank that fails by itself writes; ranks that fail because another one is gone write nothing. On Kubernetes
each pod has a file of its own, and the controller tells such a message from a log's end by how it begins.
"""

import contextlib
import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist

from flowfleet.process.service import TERMINATION_MESSAGE

MAX_BYTES = 2000
"""Kubelets keep 4096 of a termination message."""
_CONSEQUENCES = ("by peer", "Connection refused", "timed out")


@contextmanager
def recorded() -> Iterator[None]:
    """Records the error that leaves the block, and raises it again."""
    try:
        yield
    except Exception as error:
        record(error)
        raise


def record(error: BaseException) -> None:
    """Writes the error, unless it is a consequence of another or another rank has written its own."""
    message = f"rank {os.environ.get('RANK', '0')}: {type(error).__name__}: {error}"
    lost_others = isinstance(error, dist.DistBackendError | dist.DistNetworkError | ConnectionError)
    path = os.environ.get(TERMINATION_MESSAGE)
    if (
        path is None
        or lost_others
        or (isinstance(error, RuntimeError) and any(sign in message for sign in _CONSEQUENCES))
    ):
        return
    with contextlib.suppress(OSError), open(path, "ab") as file:
        if file.tell() == 0:
            file.write(message.encode()[:MAX_BYTES])
