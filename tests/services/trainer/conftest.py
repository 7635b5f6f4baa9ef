from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from flowfleet.data.blobs import FsspecBlobs, SyncBlobs, open_blobs_sync
from flowfleet.redis.client import connect_sync
from services.trainer.parallel.ranks import Ranks
from tests.services.trainer.processes import Launch, Process


@pytest.fixture
def launch(redis_url: str) -> Iterator[Launch]:
    """Starts trainers and replicas on the test's Redis and kills what is left of them in the end."""
    processes: list[Process] = []

    def start(kind: Any, *args: Any, **kwargs: Any) -> Any:
        processes.append(kind(*args, redis_url=redis_url, **kwargs))
        return processes[-1]

    yield start
    for process in processes:
        process.kill()


@pytest.fixture
def blobs(redis_url: str) -> SyncBlobs:
    """The store of the processes that `launch` starts."""
    return open_blobs_sync(connect_sync(redis_url))


@pytest.fixture
def files(tmp_path: Path) -> SyncBlobs:
    """A store for workers inside the test's process."""
    return FsspecBlobs(f"file://{tmp_path}/blobs")


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    """A world of one inside the test's process."""
    ranks = Ranks()
    yield ranks
    ranks.close()
