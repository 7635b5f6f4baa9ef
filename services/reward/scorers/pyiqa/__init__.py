"""`pyiqa`: a no-reference metric of pyiqa (IQA-PyTorch), such as `musiq` or `topiq_nr`. The prompt does not matter.

The score is the metric's own, negated where the library says that lower is better. Weights are the library's files in a
folder, in the layout of torch.hub: `pyiqa/` for its own and `checkpoints/` for torchvision's. Nothing is downloaded,
and torch reads pickles by its restricted unpickler alone, which runs no code. Of a video, the score is the mean over
at most 8 evenly spaced frames.
"""

import contextlib
import io
import os
import pickle
import tempfile
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from pydantic import Field

from flowfleet.hardware import devices
from services.reward.execution.groups import alike
from services.reward.networks.checkpoints import ALL, fingerprint
from services.reward.networks.libraries import library, of_samples
from services.reward.networks.torch_models import ModelScorer, pick_device
from services.reward.scorer import Outcome, Problem, Sample, Score, ScorerSettings


class PyiqaSettings(ScorerSettings):
    """`metric` decides the rest."""

    metric: str
    """Name in `pyiqa.list_models("NR")`."""
    weights: Path | None = None
    """Folder with `pyiqa/NAME` and `checkpoints/NAME`; unset for metrics without files, such as `piqe`."""
    device: Literal["auto", "cpu", "cuda", "npu"] = "auto"
    """"auto": the first accelerator, else the CPU."""
    batch_size: int = Field(default=16, ge=1)
    """Pictures per forward pass, of one size."""


class PyiqaScorer(ModelScorer[PyiqaSettings]):
    """Component `metric`: the metric's own value."""

    name = "pyiqa"
    components = ("metric",)

    def __init__(self, settings: PyiqaSettings, num_threads: int) -> None:
        known = library("pyiqa.default_model_configs", "pyiqa").DEFAULT_CONFIGS
        chosen = known.get(settings.metric, {})
        if chosen.get("metric_mode") != "NR":
            names = ", ".join(sorted(name for name, one in known.items() if one.get("metric_mode") == "NR"))
            raise ValueError(f"settings.metric = {settings.metric!r}: take a metric without reference: {names}")
        if settings.weights is not None and not settings.weights.is_dir():
            raise ValueError(f"settings.weights = {str(settings.weights)!r}: no such folder here")
        self._sign = -1.0 if chosen.get("lower_better") else 1.0
        files = f" {fingerprint(settings.weights, read=ALL)}" if settings.weights else ""
        self.version = f"1 (pyiqa {version('pyiqa')} {settings.metric}{files})"
        super().__init__(settings, num_threads)
        self._metric: Any = None
        self._device: torch.device

    def start(self) -> None:
        super().start()
        self._device = pick_device(self._settings.device)
        with _only_files_of(self._settings.weights), contextlib.redirect_stdout(io.StringIO()):
            try:
                self._metric = library("pyiqa", "pyiqa").create_metric(self._settings.metric, device=self._device)
            except (OSError, RuntimeError, KeyError, pickle.UnpicklingError) as error:
                reason = str(error).partition("\n")[0][:300]
                raise ValueError(f"settings.metric = {self._settings.metric!r} cannot be made: {reason}") from error
        self._metric.eval()

    def score(self, samples: Sequence[Sample], params: None) -> list[Outcome]:
        found = [sample.pictures() for sample in samples]
        pictures = [np.asarray(picture.convert("RGB")) for some in found for picture in some]
        return of_samples(self._scores(pictures), [len(some) for some in found])

    def _scores(self, pictures: Sequence[np.ndarray[Any, Any]]) -> list[Outcome]:
        """Scores pictures. Those of equal size share forward passes, and fail together."""
        found: dict[int, Outcome] = {}
        for part in alike(pictures, lambda pixels: pixels.shape, self._settings.batch_size):
            found |= zip(part, self._run([pictures[place] for place in part]), strict=True)
        return [found[place] for place in range(len(pictures))]

    @torch.inference_mode()
    def _run(self, pictures: Sequence[np.ndarray[Any, Any]]) -> list[Outcome]:
        pixels = torch.from_numpy(np.stack(pictures)).permute(0, 3, 1, 2).float() / 255
        try:
            with devices.bound(self._device):
                values = self._metric(pixels.to(self._device)).float().cpu().reshape(len(pictures)).tolist()
        except (RuntimeError, ValueError, AssertionError, IndexError) as error:
            height, width = pixels.shape[-2:]
            message = f"{self._settings.metric} cannot score {width}×{height} pixels: {error}"
            return [Problem("metric", message[:500])] * len(pictures)
        return [Score(self._sign * value, {"metric": value}) for value in values]


def make(name: str, settings: Mapping[str, Any], num_threads: int) -> PyiqaScorer:
    return PyiqaScorer(PyiqaSettings.read(settings), num_threads)


@contextlib.contextmanager
def _only_files_of(weights: Path | None) -> Any:
    """Inside, the library finds its files in `weights` and fetches none; torch unpickles tensors alone."""
    files, hub = library("pyiqa.utils.download_util", "pyiqa"), library("torch.hub", "pyiqa")
    aside = tempfile.TemporaryDirectory()  # the library makes the folder that it looks in
    folder = weights or Path(aside.name)

    def refuse(url: str, target: str, *_: Any, **__: Any) -> None:
        place = Path(target).parent.name + "/" + Path(target).name
        raise ValueError(f"settings.weights lacks {place}: download it from {url}, or name a folder that has it")

    before = files.DEFAULT_CACHE_DIR, files.download_url_to_file, hub.download_url_to_file, hub.get_dir()
    os.environ["TORCH_FORCE_WEIGHTS_ONLY_LOAD"] = "1"
    files.DEFAULT_CACHE_DIR = str(folder / "pyiqa")
    files.download_url_to_file = hub.download_url_to_file = refuse
    hub.set_dir(str(folder))
    try:
        yield
    finally:
        del os.environ["TORCH_FORCE_WEIGHTS_ONLY_LOAD"]
        files.DEFAULT_CACHE_DIR, files.download_url_to_file, hub.download_url_to_file, folder_before = before
        hub.set_dir(folder_before)
        aside.cleanup()
