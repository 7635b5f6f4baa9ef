"""REST: ranks that somebody else starts announce themselves, and users ask how to start them."""

from fastapi import APIRouter

from flowfleet.api.attach import TOKEN, Announcement, AttachCommand, Attached
from flowfleet.errors import Conflict, Unavailable
from services.controller.api.dependencies import KnownJobId, Services, Use, job_id_of
from services.controller.platforms.attach.launcher import attach_token, job_of

router = APIRouter(tags=["jobs"])


@router.post("/v1/attach")
async def announce_rank(rank: Announcement, use: Use) -> Attached:
    """Takes a rank's sign of life, with the token of its job in place of an API key. 503: ask again."""
    if not use.runner.leads:
        raise Unavailable("this controller does not lead; ask again")
    job_id = job_id_of(job_of(rank.token))
    if not use.launcher.expects(job_id):
        await _world_size(use, job_id)
    return await use.launcher.announce(rank)


@router.post("/v1/jobs/{job_id}/attach")
async def attach_command(job_id: KnownJobId, use: Use) -> AttachCommand:
    """How to start the ranks of a job with `trainer.launcher = "attach"`, with the token that they need."""
    ranks = await _world_size(use, job_id)
    torchrun = f"torchrun --standalone --nproc-per-node={ranks}" if ranks > 1 else "python"
    token = attach_token(job_id)
    return AttachCommand(token=token, command=f"{TOKEN}={token} {torchrun} -m services.trainer --controller")


async def _world_size(use: Services, job_id: str) -> int:
    """Ranks of the job. Raises Conflict for one that takes none."""
    record = await use.store.jobs.get(job_id)
    if record.status.terminal:
        raise Conflict(f"job {job_id} has ended: {record.status}")
    trainer = record.job_spec().trainer
    if trainer.launcher != "attach":
        raise Conflict(
            f'the controller starts the trainer of job {job_id}: set trainer.launcher = "attach" in its file'
        )
    return trainer.world_size
