"""Profiles of training steps, on request: what PyTorch's profiler saw, in the job's folder.

profiles/step-00000012-rank-0.trace.json.gz   for Perfetto (ui.perfetto.dev)
profiles/step-00000012-rank-0.memory.pickle   of CUDA, for pytorch.org/memory_viz
profiles/step-00000012.json                   the ten largest costs of rank 0, written last
"""

import logging
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from flowfleet.api.profiles import Profile
from flowfleet.hardware import devices
from flowfleet.hardware.profiling import costs_of, profiled
from services.trainer.beats import Phase
from services.trainer.parallel.ranks import Ranks

log = logging.getLogger(__name__)


@contextmanager
def recorded(folder: Path, step: int, ranks: Ranks) -> Iterator[None]:
    """Profiles what runs inside. A file that cannot be written is a warning: the step was applied."""
    name = f"step-{step:08d}"
    with TemporaryDirectory(prefix="profile-") as place:
        own = Path(place, f"{name}-rank-{ranks.rank}")
        with (
            devices.memory_history(ranks.device, own.with_suffix(".memory.pickle")),
            profiled(ranks.device) as seen,
        ):
            yield
        with ranks.beats.phase(Phase.OUTSIDE):  # many events take seconds to write
            seen.export_chrome_trace(f"{own}.trace.json.gz")
            if ranks.rank == 0:
                on_device = devices.is_accelerator(ranks.device)
                table = Profile(step=step, on_device=on_device, costs=costs_of(seen, ranks.device))
                Path(place, f"{name}.json").write_text(table.model_dump_json(), encoding="utf-8")
        try:
            folder.mkdir(exist_ok=True)
            for file in sorted(Path(place).iterdir(), key=lambda file: file.suffix == ".json"):
                shutil.copyfile(file, folder / file.name)
        except OSError as error:
            log.warning("profile of step %d not kept: %s", step, error)
