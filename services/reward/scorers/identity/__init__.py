"""`identity`, `lpips`: how much of the picture before an edit is left.

The metadata field `source` of the prompt's line has that picture: a data URL, or a path below `settings.media_root`.

- `identity`: cos(e(source), e(sample)), with e the pooled output of a DINOv2, DINOv3, CLIP or SigLIP image model.
- `lpips`: minus the perceptual distance of Zhang et al. (arXiv 1801.03924), with the weights of their library `lpips`
  (BSD-2-Clause): d = sum over layers of the mean over places of w · (x̂ - ŷ)², with x̂ and ŷ the layer's outputs by their
  length over the channels. The source is brought to the sample's size.

Reward an edit by these and by the rubric `edit`, or the cheapest edit is none. Of a video the score is the mean over at
most 8 evenly spaced frames.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import Field
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional
from transformers import AutoModel

from flowfleet.hardware import devices
from services.reward.networks.checkpoints import check_checkpoint, check_processor, fingerprint
from services.reward.networks.encoders import PictureEncoder
from services.reward.networks.sources import levels, sized, source_of
from services.reward.networks.torch_models import ModelScorer, ModelSettings, pick_device, prepare_torch
from services.reward.scorer import Outcome, PlainScorer, Problem, Sample, Score, ScorerSettings
from services.reward.scorers.feature_diversity import TYPES

_LAYERS = ((4, 2, False), (1, 2, True), (1, 1, True), (1, 1, False), (1, 1, False))
"""Stride and padding of AlexNet's layers, and whether pooling comes before."""
_NUMBERS = (0, 3, 6, 8, 10)
"""Their numbers in the library."""
MIN_SIDE = 32
_SHIFT, _SCALE = (-0.030, -0.088, -0.188), (0.458, 0.448, 0.450)


class SourceSettings(ModelSettings):
    """Settings of `identity`."""

    media_root: Path | None = None
    """Folder of the files that the metadata field `source` names."""


class Identity(ModelScorer[SourceSettings]):
    """See the module."""

    name = "identity"
    score_range = (-1.0, 1.0)
    components = ("cosine",)

    def __init__(self, settings: SourceSettings, num_threads: int) -> None:
        check_checkpoint(settings.model, "model", TYPES)
        check_processor(settings.processor_folder, settings.processor_setting, tokenizer=False)
        self.version, self.pinned = settings.version(1), settings.pinned
        super().__init__(settings, num_threads)
        self._encoder: PictureEncoder

    def start(self) -> None:
        super().start()
        self._encoder = PictureEncoder(AutoModel, self._settings, self._settings.model, "model", self._num_threads)

    def score(self, samples: Sequence[Sample], params: None) -> list[Outcome]:
        sources = [source_of(sample, self._settings.media_root) for sample in samples]
        return [
            source if isinstance(source, Problem) else self._compared(source, sample)
            for source, sample in zip(sources, samples, strict=True)
        ]

    def _compared(self, source: Any, sample: Sample) -> Score:
        before, *after = self._encoder.pictures([source, *sample.pictures()])
        cosine = float((torch.stack(after) @ before).mean().clamp(-1, 1))
        return Score(cosine, {"cosine": cosine})


class LpipsSettings(ScorerSettings):
    """Settings of `lpips`."""

    model: Path
    """Weights of `lpips.LPIPS(net="alex")`, its state_dict saved as safetensors."""
    media_root: Path | None = None
    """Folder of the files that the metadata field `source` names."""
    device: Literal["auto", "cpu", "cuda", "npu"] = "auto"
    """"auto": the first accelerator, else the CPU."""
    max_side: int = Field(default=512, ge=64)
    """Larger pictures are brought to this longer side."""


class Lpips(PlainScorer):
    """No components."""

    name = "lpips"
    score_range = (-math.inf, 0.0)
    modalities = ModelScorer.modalities
    call_bytes = 0

    def __init__(self, settings: LpipsSettings, num_threads: int) -> None:
        self._settings, self._num_threads = settings, num_threads
        self._weights = read_weights(settings.model)
        self.version = f"1 ({settings.model.stem} {fingerprint(settings.model)}, max_side {settings.max_side})"
        self._device = torch.device("cpu")

    def start(self) -> None:
        prepare_torch(self._num_threads)
        self._device = pick_device(self._settings.device)
        self._weights = {name: tensor.to(self._device) for name, tensor in self._weights.items()}

    def score(self, samples: Sequence[Sample], params: None) -> list[Outcome]:
        return [self._of(sample) for sample in samples]

    @torch.inference_mode()
    def _of(self, sample: Sample) -> Outcome:
        source = source_of(sample, self._settings.media_root)
        if isinstance(source, Problem):
            return source
        after = sample.pictures()
        shrunk = after[0].copy()
        shrunk.thumbnail((self._settings.max_side,) * 2)
        if min(shrunk.size) < MIN_SIDE:
            return Problem("too_small", f"LPIPS needs pictures of at least {MIN_SIDE} pixels a side")
        before, *rest = (torch.from_numpy(levels(one)) for one in sized([source, *after], shrunk))
        pair = before.to(self._device).expand(len(rest), -1, -1, -1), torch.stack(rest).to(self._device)
        with devices.bound(self._device):
            return Score(-float(distance(*pair, self._weights).mean()))


def read_weights(path: Path) -> dict[str, Tensor]:
    """The tensors of AlexNet and of the five layers' weights. ValueError where some are missing."""
    try:
        stored = load_file(path)
    except (OSError, SafetensorError) as error:
        raise ValueError(f"settings.model = {str(path)!r} cannot be read: {error}") from error
    convolutions = [f"net.slice{n}.{m}.{kind}" for n, m in enumerate(_NUMBERS, 1) for kind in ("weight", "bias")]
    wanted = [*convolutions, *(f"lin{layer}.model.1.weight" for layer in range(len(_NUMBERS)))]
    if missing := [name for name in wanted if name not in stored]:
        raise ValueError(
            f'settings.model = {str(path)!r} has no {missing[0]}: save the state_dict of lpips.LPIPS(net="alex") there'
        )
    return {name: stored[name].float() for name in wanted}


def distance(first: Tensor, second: Tensor, weights: Mapping[str, Tensor]) -> Tensor:
    """(B,) of pictures (B, 3, H, W) from -1 to 1."""
    total = first.new_zeros(len(first))
    for layer, (one, other) in enumerate(zip(_outputs(first, weights), _outputs(second, weights), strict=True)):
        squared = (_unit(one) - _unit(other)).square()
        total = total + functional.conv2d(squared, weights[f"lin{layer}.model.1.weight"]).mean(dim=(1, 2, 3))
    return total


def _outputs(pixels: Tensor, weights: Mapping[str, Tensor]) -> Iterator[Tensor]:
    shift, scale = (torch.tensor(one, device=pixels.device).reshape(1, 3, 1, 1) for one in (_SHIFT, _SCALE))
    planes = (pixels - shift) / scale
    for number, (place, (stride, padding, pools)) in enumerate(zip(_NUMBERS, _LAYERS, strict=True), 1):
        if pools:
            planes = functional.max_pool2d(planes, 3, 2)
        name = f"net.slice{number}.{place}"
        planes = functional.conv2d(planes, weights[f"{name}.weight"], weights[f"{name}.bias"], stride, padding).relu()
        yield planes


def _unit(planes: Tensor) -> Tensor:
    return planes / (planes.square().sum(dim=1, keepdim=True).sqrt() + 1e-10)


def make(name: str, settings: Mapping[str, Any], num_threads: int) -> PlainScorer:
    if name == Lpips.name:
        return Lpips(LpipsSettings.read(settings), num_threads)
    return Identity(SourceSettings.read(settings), num_threads)
