"""Everything that Redis remembers about jobs, by part. The REST API writes wishes here, the scheduler what happened.

    jobs       records and their status           lists      jobs in a row each, without their specs
    events     what happened, as people see it    notices    which jobs changed, for those who watch
    history    metrics, checkpoints, validations  samples    pictures with their scores
    credits    what samples counted for           votes      people's votes on pairs
    rewards    revisions of a job's rewards       shadows    scores of rewards that are tried
    removal    how ended jobs leave Redis

Each change is one MULTI under WATCH: it is applied once, even where the connection dies between request and answer, and
a status and its event never part. The job's event stream ends with the event of its last status: record results first.
"""

from __future__ import annotations

from collections.abc import Callable

from redis.asyncio import Redis

from services.controller.store.credits import Credits
from services.controller.store.events import Events, Notices
from services.controller.store.history import History
from services.controller.store.jobs import Jobs
from services.controller.store.leadership import Lease
from services.controller.store.link import Link
from services.controller.store.lists import Lists
from services.controller.store.removal import Removal
from services.controller.store.rewards import Rewards
from services.controller.store.samples import Samples
from services.controller.store.shadows import Shadows
from services.controller.store.votes import Votes


class Store:
    """`redis` decodes no responses; `clock` gives seconds since the epoch in place of Redis's."""

    def __init__(self, redis: Redis, clock: Callable[[], float] | None = None, lease: Lease | None = None) -> None:
        self.link = link = Link(redis, clock, lease)
        self.jobs = Jobs(link)
        self.lists = Lists(link)
        self.events = Events(link)
        self.notices = Notices(link)
        self.history = History(link)
        self.samples = Samples(link)
        self.credits = Credits(link)
        self.rewards = Rewards(link)
        self.shadows = Shadows(link)
        self.votes = Votes(link)
        self.removal = Removal(link)

    def fenced_by(self, lease: Lease) -> Store:
        """The same store, whose changes of status raise LeaseLost once another controller leads."""
        return Store(self.link.redis, self.link.clock, lease)

    async def confirm(self) -> None:
        """Asks Redis whether this controller still leads. Raises LeaseLost if it does not."""
        if self.link.lease is not None:
            await self.link.lease.confirm()
