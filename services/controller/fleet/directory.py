"""Directory of rollout pools and rewards, with their addresses: from flags here, from the cluster on Kubernetes.

It changes while jobs run, so callers look up an address for each call.
"""

import logging
from collections.abc import Collection, Mapping
from typing import Protocol

log = logging.getLogger(__name__)


class Directory(Protocol):
    """Rewards, pools, and why some of them cannot be there."""

    @property
    def rewards(self) -> Mapping[str, tuple[str, ...]]:
        """Name → addresses (host:port) of the replicas that are ready; none while it has no replica."""

    @property
    def pools(self) -> Collection[str] | None:
        """Names of the rollout pools; None if they are unknown and any name is accepted."""

    def shortage(self, component: str, name: str) -> str:
        """Why pods of a pool ("rollout"), a reward ("reward") or a job ("trainer") cannot run; "" when all is well."""

    async def start(self) -> None:
        """Returns once it knows what there is."""

    async def stop(self) -> None: ...
