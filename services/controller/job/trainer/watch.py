"""Watches a job's trainer and ends one that hangs, so that the next one resumes.

Asks rank 0 for the progress of all ranks twice a second, which also keeps an unpaused trainer from ending by itself
because it heard nothing. services/controller/job/trainer/hangs.py judges.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Collection

import grpc

from flowfleet.proto import trainer_pb2
from services.controller.job.context import JobContext
from services.controller.job.machine import events as ev
from services.controller.job.machine.command import Command
from services.controller.job.machine.state import Status
from services.controller.job.machine.state_machine import Machine
from services.controller.job.recovery.retries import TRAINER_COMMANDS
from services.controller.job.trainer.hangs import HangJudge, Progress

log = logging.getLogger(__name__)

LOOK_S = 0.5
ANSWER_S = 2.0
"""Time for rank 0 to answer; while it computes, it sometimes holds the interpreter's lock."""


class TrainerWatch:
    """`running` gives the commands that are under way."""

    def __init__(self, job: JobContext, machine: Machine, running: Callable[[], Collection[Command]]) -> None:
        self._job, self._machine, self._running = job, machine, running
        self._judge = HangJudge(job.spec.timeouts.hang_s)
        self._watched = ""
        self.doubt = ""
        """Which ranks are silent now; empty where none is."""
        self._accused: dict[Command, str] = {}

    async def run(self) -> None:
        """Looks for ever."""
        while True:
            await asyncio.sleep(LOOK_S)
            if self._job.trainer.address and self._machine.state.status is not Status.PAUSED:
                reason = await self._look()
                self.doubt = self._judge.doubt if self._watched else ""
                if reason:
                    await self.replace(reason)
            else:
                self._watched = self.doubt = ""

    async def replace(self, reason: str) -> None:
        """Kills the trainer; the state machine wants the next one, which resumes from the newest checkpoint. Calls to
        the killed one end here: a late answer must not count as the next trainer's."""
        job = self._job
        log.warning("trainer hangs, replacing it: %s", reason, extra={"job": job.job_id})
        self._accuse(f"the trainer was replaced: {reason}")
        self._watched = self.doubt = ""
        await job.store.events.append(job.job_id, "trainer_hung", {"reason": reason})
        await job.trainer.drop()
        await job.trainer.stop(at_once=True)
        await job.emit(ev.TrainerLost())

    async def ended(self) -> None:
        """The trainer is gone. Reads its last words before the next one starts, which clears them, for calls that hear
        of its end later."""
        if words := await self._job.trainer.termination_message():
            self._accuse(f"the trainer ended: {words}")

    def accusation(self, command: Command) -> str | None:
        """Returns, only once, what ended the trainer under this command."""
        return self._accused.pop(command, None)

    def _accuse(self, reason: str) -> None:
        self._accused |= {command: reason for command in self._running() if isinstance(command, TRAINER_COMMANDS)}

    async def _look(self) -> str | None:
        if self._watched != self._job.trainer.address:
            self._watched, self._judge = self._job.trainer.address, HangJudge(self._job.spec.timeouts.hang_s)
        try:
            request = trainer_pb2.GetTrainerStatusRequest()
            heard = (await self._job.trainer.stub().GetStatus(request, timeout=ANSWER_S)).ranks
        except asyncio.CancelledError:
            if (task := asyncio.current_task()) is None or task.cancelling():
                raise
            return None  # its channel was closed: the trainer is being replaced
        except grpc.aio.AioRpcError:
            return self._judge.look(time.monotonic(), None)
        if not heard:  # a trainer that tells nothing of its ranks, as those before this watch
            self._watched = ""
            return None
        return self._judge.look(time.monotonic(), [told_by(one) for one in heard])


def told_by(one: trainer_pb2.RankProgress) -> Progress:
    return Progress(one.rank, one.phase, one.limit_s, one.count, one.signs, one.silence_s or one.limit_s)
