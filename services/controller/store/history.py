"""History that a job leaves as it runs, for people: metrics by step, checkpoints, validations."""

from collections.abc import Collection, Mapping

from flowfleet.api.jobs import Checkpoint, MetricsRow
from flowfleet.redis import keys
from services.controller.store.link import Linked
from services.controller.store.reading import rows_of
from services.controller.store.records import Validation

MAX_VALIDATIONS = 10_000
"""Maximum number of a job's validations; beyond it the oldest are deleted, except the first."""


class History(Linked):
    async def put_metrics(self, job_id: str, step: int, values: Mapping[str, float]) -> None:
        """Adds to the row of a step, last writer wins: doing it again changes nothing."""
        async with self._redis.pipeline(transaction=True) as pipe:
            if values:
                pipe.hset(keys.metrics(job_id, step), mapping={name: repr(float(v)) for name, v in values.items()})
            pipe.zadd(keys.metrics_steps(job_id), {str(step): step})
            await pipe.execute()

    async def metrics(self, job_id: str, after_step: int | None = None, limit: int = 1000) -> list[MetricsRow]:
        """Rows of the next steps after one (None: from the first), ascending."""
        low = "-inf" if after_step is None else f"({after_step}"
        steps = [int(s) for s in await self._redis.zrangebyscore(keys.metrics_steps(job_id), low, "+inf", 0, limit)]
        rows = await self._link.each(steps, lambda pipe, step: pipe.hgetall(keys.metrics(job_id, step)))
        return [
            MetricsRow(step=step, values={name.decode(): float(value) for name, value in row.items()})
            for step, row in zip(steps, rows, strict=True)
        ]

    async def add_checkpoint(
        self, job_id: str, checkpoint: Checkpoint, *, keep_last: int | None = None, keep: Collection[int] = ()
    ) -> None:
        """Adds a step's checkpoint; adding it again replaces it. Keeps only the `keep_last` newest (None: all) and
        those of the steps `keep`."""
        await self._redis.hset(keys.checkpoints(job_id), str(checkpoint.step), checkpoint.model_dump_json())
        steps = sorted(int(name) for name in await self._redis.hkeys(keys.checkpoints(job_id)))
        gone = [step for step in steps[:-keep_last] if step not in keep] if keep_last is not None else []
        if gone:
            await self._redis.hdel(keys.checkpoints(job_id), *(str(step) for step in gone))

    async def forget_checkpoints(self, job_id: str, *, above: int) -> None:
        """Forgets lost checkpoints of later steps."""
        steps = [name for name in await self._redis.hkeys(keys.checkpoints(job_id)) if int(name) > above]
        if steps:
            await self._redis.hdel(keys.checkpoints(job_id), *steps)

    async def checkpoints(self, job_id: str) -> list[Checkpoint]:
        """Checkpoints by step, ascending."""
        rows = await self._redis.hvals(keys.checkpoints(job_id))
        return sorted(rows_of(Checkpoint, rows), key=lambda checkpoint: checkpoint.step)

    async def add_validation(self, job_id: str, validation: Validation) -> None:
        """Adds a version's validation; adding it again replaces it."""
        name = keys.validations(job_id)
        await self._redis.hset(name, str(validation.version), validation.model_dump_json())
        versions = sorted(int(field) for field in await self._redis.hkeys(name))
        if gone := versions[1 : max(1, 1 + len(versions) - MAX_VALIDATIONS)]:
            await self._redis.hdel(name, *map(str, gone))

    async def validations(self, job_id: str) -> list[Validation]:
        """Validations by version, ascending."""
        rows = await self._redis.hvals(keys.validations(job_id))
        return sorted(rows_of(Validation, rows), key=lambda one: one.version)
