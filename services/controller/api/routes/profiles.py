"""REST: profiles of a job's training steps (services/trainer/step/profiler.py) and of the sampling for them."""

import asyncio
from pathlib import Path
from typing import Annotated

from fastapi import APIRouter, Response
from fastapi import Path as InPath
from fastapi.responses import FileResponse
from pydantic import ValidationError

from flowfleet.api.profiles import Profile
from flowfleet.errors import NotFound
from flowfleet.part import rule
from services.controller.api.dependencies import KnownJobId, Services, Use
from services.controller.api.routes.history import OTHER_MEDIA
from services.controller.api.routes.models import FILE

router = APIRouter(prefix="/v1/jobs/{job_id}/profiles", tags=["jobs"])

Name = Annotated[
    str,
    InPath(
        pattern=rule(
            r"^step-[0-9]{8}-(rank-[0-9]{1,5}|rollout)\.(trace\.json\.gz|memory\.pickle)$", "give a file of the list"
        ),
        description="A file of the list.",
    ),
]


@router.get("")
async def list_profiles(job_id: KnownJobId, use: Use) -> list[Profile]:
    """Oldest first, with the largest costs and the files of each."""
    return await asyncio.to_thread(_profiles, _folder(use, job_id))


@router.get("/{name}", response_class=Response, responses=FILE)
async def profile_file(job_id: KnownJobId, name: Name, use: Use) -> Response:
    """Downloads a trace, for Perfetto, or a memory snapshot, for pytorch.org/memory_viz."""
    path = _folder(use, job_id) / name
    if not await asyncio.to_thread(path.is_file):
        raise NotFound(f"job {job_id} has no profile {name}")
    return FileResponse(path, media_type=OTHER_MEDIA, headers={"X-Content-Type-Options": "nosniff"})


def _folder(use: Services, job_id: str) -> Path:
    return use.settings.state_dir.resolve() / "jobs" / job_id / "profiles"


def _profiles(folder: Path) -> list[Profile]:
    found = []
    for table in sorted(folder.glob("step-*.json")):
        try:
            profile = Profile.model_validate_json(table.read_bytes())
        except (OSError, ValidationError):  # it is being written
            continue
        kind = f"{table.stem}-rank-*" if profile.of == "trainer" else f"{table.stem}.trace.*"
        files = sorted(file.name for file in folder.glob(kind))
        found.append(profile.model_copy(update={"files": files}))
    return sorted(found, key=lambda profile: (profile.step, profile.of))
