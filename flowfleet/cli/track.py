"""`flowfleet track`: copies a job to an experiment tracker, from wherever it runs (docs/tracking.md)."""

from __future__ import annotations

import importlib
import logging
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from flowfleet.cli.options import Ca, JobId, Json, Url, err, out, tell
from flowfleet.client import Client

if TYPE_CHECKING:
    from flowfleet.tracking.tracker import Tracker

FOLDER: Final = Path("runs/track")
PICTURES: Final = 16


def track(
    job_id: JobId,
    wandb: Annotated[bool, typer.Option("--wandb", help="To W&B; WANDB_MODE=offline writes files.")] = False,
    tensorboard: Annotated[
        Path | None, typer.Option(metavar="DIR", help="To event files of TensorBoard, below DIR.")
    ] = None,
    mlflow: Annotated[bool, typer.Option("--mlflow", help="To MLflow, at MLFLOW_TRACKING_URI.")] = False,
    trackio: Annotated[bool, typer.Option("--trackio", help="To Trackio.")] = False,
    project: Annotated[str, typer.Option(help="Project, or experiment of MLflow.")] = "flowfleet",
    pictures: Annotated[int, typer.Option(min=0, help="Held-out prompts that are shown of each version.")] = PICTURES,
    state_dir: Annotated[
        Path, typer.Option(help="Stores how far each job was copied; keep it to resume without duplicates.")
    ] = FOLDER,
    url: Url = None,
    ca: Ca = None,
    json_: Json = False,
) -> None:
    """Copy a job's curves and pictures to a tracker until the job ends; start it again at any time."""
    from flowfleet.tracking.follower import follow
    from flowfleet.tracking.place import Place

    asked = {"wandb": wandb, "tensorboard": tensorboard is not None, "mlflow": mlflow, "trackio": trackio}
    chosen = [name for name, is_asked in asked.items() if is_asked]
    if len(chosen) != 1:
        raise ValueError("give one of --wandb, --tensorboard DIR, --mlflow and --trackio; run one command for each")
    (name,) = chosen
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    tracker = _tracker(name, project, tensorboard, state_dir)
    folder = state_dir / name if tensorboard is None else tensorboard / ".flowfleet"
    with Client(url, ca=ca) as client:
        job = client.find(job_id)
        place = Place(folder, job.id)
        console = err if json_ else out
        ended = follow(client, job.id, tracker, place, pictures, lambda run: console.print(f"{name}: {run}"))
    tell(ended, json_, lambda: out.print(f"the job {ended.status}; all of it is copied", highlight=False))


def _tracker(name: str, project: str, tensorboard: Path | None, state_dir: Path) -> Tracker:
    """Imports the one that is asked for, and no other."""
    kind, given = {
        "wandb": ("WandbTracker", (project, state_dir / name)),
        "mlflow": ("MlflowTracker", (project,)),
        "trackio": ("TrackioTracker", (project,)),
        "tensorboard": ("TensorBoardTracker", (tensorboard,)),
    }[name]
    tracker: Tracker = getattr(importlib.import_module(f"flowfleet.tracking.{name}_tracker"), kind)(*given)
    return tracker
