"""Training step of any algorithm and model, as the controller drives it.

    command            wanted when                                       does                         ends with
    EnsureTrainer      no trainer is known                               finds or starts the trainer  TrainerReady
    Generate           a group lacks samples and a fit version serves    samples them on one replica  Sampled
    Score              a complete group lacks scores                     asks the rewards             Scored, Dropped
    ComputeAdvantages  every sample of a step is scored or dropped       stores the request to train  AdvantagesReady
    TrainStep          the next step has its request, or a trainer lags  updates, or replays          Trained
    Publish            a replica lacks the newest version                brings it to every replica   Published
    Checkpoint         `save_every` or the last step asks for it         saves the trainer            Checkpointed
    Validate           `validate_every` or the last step asks for it     scores held-out prompts      Validated
    Export             the last version is published and saved           writes the model             Exported

Algorithms differ only in their requests (requests.py), in each sample's advantage or place in a pair (credit.py) and in
data given instead of sampled (prompts/inputs.py, in services/controller).

Each function of commands/ does one command of the state machine (machine/), which decides when, and emits its event.
The driver (driver.py) emits Sampled as samples arrive, and retries failed commands. Every command is idempotent: it may
run again after a crash.
"""

import asyncio
from typing import assert_never

from services.controller.job.commands.advantages import advantages
from services.controller.job.commands.checkpoint import checkpoint
from services.controller.job.commands.ensure_trainer import ensure_trainer
from services.controller.job.commands.export import export
from services.controller.job.commands.generate import generate
from services.controller.job.commands.previews import Previews
from services.controller.job.commands.publish import publish
from services.controller.job.commands.score import score
from services.controller.job.commands.train import train
from services.controller.job.commands.validate import validate
from services.controller.job.commands.validation import Validation
from services.controller.job.context import JobContext
from services.controller.job.machine.command import (
    Checkpoint,
    Command,
    ComputeAdvantages,
    EnsureTrainer,
    Export,
    Generate,
    Publish,
    Score,
    TrainStep,
    Validate,
)
from services.controller.rewards.failures import RewardPause


class TrainingStep:
    def __init__(self, job: JobContext) -> None:
        self.job = job
        self._validation, self._previews = Validation(job), Previews(job)
        self._updating = asyncio.Lock()
        """Held while the trainer updates, and while its own ranks lack a version that rollouts have."""

    async def run(self, command: Command) -> None:
        """Runs one command to its event. Remote errors pass through."""
        try:
            await self._run(command)
        except RewardPause as pause:
            await self.job.pause(str(pause), pause.until)

    async def _run(self, command: Command) -> None:
        match command:
            case EnsureTrainer():
                await ensure_trainer(self.job)
            case Generate(step, groups):
                await generate(self.job, self._previews, step, groups)
            case Score(step, group):
                await score(self.job, step, group)
            case ComputeAdvantages(step):
                await advantages(self.job, step)
            case TrainStep(step):
                async with self._updating:
                    await train(self.job, step)
            case Publish(version, evaluated):
                await publish(self.job, self._updating, version, evaluated)
            case Checkpoint(version):
                await checkpoint(self.job, version)
            case Validate(version):
                await validate(self.job, self._validation, version)
            case Export():
                await export(self.job)
            case _:
                assert_never(command)
