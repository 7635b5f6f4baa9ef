"""Base of the scorers around a torch model: settings, device, loading, and pictures as tensors.

A scorer checks its folders when it is made, so that a wrong one ends the service at once. It loads them in `start`, in
the process that scores.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from pathlib import Path
from typing import Any, Generic, Literal, TypeVar

import torch
import transformers
from PIL import Image
from pydantic import Field

# From its own module: without torchvision `transformers.AutoImageProcessor` of 5.13 and 5.14 only raises.
from transformers.models.auto.image_processing_auto import AutoImageProcessor

from flowfleet import hub
from flowfleet.hardware import devices
from flowfleet.proto.reward_pb2 import MODALITY_IMAGE, MODALITY_VIDEO, Modality
from services.reward.networks.checkpoints import Checkpoint, fingerprint
from services.reward.networks.pixels import differentiable
from services.reward.scorer import PlainScorer, ScorerSettings

Item = TypeVar("Item")
Settings = TypeVar("Settings", bound=ScorerSettings)


class ModelSettings(ScorerSettings):
    """Settings of every scorer around a torch model."""

    model: Checkpoint
    """Folder of a transformers checkpoint with safetensors, or its name on the Hub."""
    processor: Checkpoint | None = None
    """Folder or name of image processor and tokenizer; unset: `model`."""
    device: Literal["auto", "cpu", "cuda", "npu"] = "auto"
    """"auto": the first accelerator, else the CPU."""
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Data type of weights and forward pass."""
    batch_size: int = Field(default=64, ge=1)
    """Pictures per forward pass."""

    @property
    def processor_folder(self) -> Path:
        return self.processor or self.model

    @property
    def processor_setting(self) -> str:
        """Which setting names `processor_folder`."""
        return "processor" if self.processor else "model"

    @property
    def pinned(self) -> dict[str, Any]:
        """The settings with folders in place of names."""
        return self.model_dump(mode="json", exclude_unset=True)

    def version(self, number: int) -> str:
        """Such as "1 (PickScore_v1 0f3a5c719bd2, divide_by 1.0)": the number of the scorer's own code, the checkpoint's
        name, a fingerprint of all folders and files, and what else changes scores where it is not the default."""
        paths = [value for _, value in self if isinstance(value, Path)]
        said = self.model_dump(mode="json", exclude_defaults=True, exclude={"device", "batch_size"})
        changes = [f"{name} {said[name]}" for name, value in self if name in said and not isinstance(value, Path)]
        return f"{number} ({', '.join([f'{_shown(self.model)} {fingerprint(*paths)}', *changes])})"


class ModelScorer(PlainScorer, Generic[Settings]):
    """A scorer of pictures and videos around a torch model, whose forward pass takes a batch."""

    modalities: tuple[Modality.ValueType, ...] = (MODALITY_IMAGE, MODALITY_VIDEO)
    score_range = (-math.inf, math.inf)
    call_bytes = 0

    def __init__(self, settings: Settings, num_threads: int) -> None:
        self._settings, self._num_threads = settings, num_threads

    def start(self) -> None:
        prepare_torch(self._num_threads)


def _shown(folder: Path) -> str:
    """Returns the name of a checkpoint in a version: its name on the Hub, else that of its folder."""
    origin = hub.origin_of(folder)
    return origin.repo if origin else folder.resolve().name


def pick_device(kind: str) -> torch.device:
    """The device that `settings.device` asks for. ValueError where there is none."""
    device = torch.device("cpu") if kind == "cpu" else devices.pick_device()
    if kind not in ("auto", device.type):
        raise ValueError(f"settings.device = {kind!r}: torch {torch.__version__} finds no such device here")
    return device


def prepare_torch(num_threads: int) -> None:
    """Before a model is loaded: CPU threads, the same bits for the same batch, and no progress bars among the logs."""
    torch.set_num_threads(num_threads)
    torch.backends.cudnn.deterministic = True
    torch.backends.cudnn.allow_tf32 = False
    logs: Any = transformers.logging
    logs.set_verbosity_error()
    logs.disable_progress_bar()


def load_model(kind: Any, settings: ModelSettings, folder: Path, setting: str, device: torch.device) -> Any:
    """An eval-mode model of a transformers class (or Auto class) on the device.

    ValueError where weights are missing, of which transformers would make random ones, or of other shapes.
    """
    try:
        model, info = kind.from_pretrained(
            folder,
            dtype=getattr(torch, settings.dtype),
            local_files_only=True,
            use_safetensors=True,
            output_loading_info=True,
        )
    except (OSError, RuntimeError, ValueError, ImportError) as error:
        lines = [line for line in str(error).splitlines() if line.strip()]
        raise ValueError(f"settings.{setting} = {str(folder)!r} cannot be loaded: {' '.join(lines)[:500]}") from error
    if missing := sorted(info["missing_keys"]):
        raise ValueError(
            f"settings.{setting} = {str(folder)!r} lacks {len(missing)} weights of {type(model).__name__} "
            f"({', '.join(missing[:3])}, …): name a checkpoint of that class"
        )
    return model.eval().requires_grad_(False).to(device)


class PictureReader:
    """A checkpoint's own image processor, for processors that give all pictures one size.

    Its PIL back end is taken, the one that checkpoints were made with: that of torchvision, where it is installed,
    rounds in other places. Pictures are read one by one, on `num_threads` threads.
    """

    def __init__(self, folder: Path, setting: str, num_threads: int) -> None:
        self._processor = image_processor(folder, setting)
        self._place = setting
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix="picture")

    def __call__(self, pictures: Sequence[Image.Image]) -> torch.Tensor:
        """(N, 3, H, W) float32 on the CPU."""
        return torch.stack(list(self._threads.map(self._read, pictures)))

    @cached_property
    def differentiable(self) -> Callable[[torch.Tensor], torch.Tensor]:
        """The same for pixels (3, H, W) from 0 to 1, with gradient and without rounding to 8 bits. Raises ValueError
        where the processor's filter has none."""
        return differentiable(self._processor, self._place)

    def _read(self, picture: Image.Image) -> torch.Tensor:
        pixels: torch.Tensor = self._processor(images=picture, return_tensors="pt").pixel_values[0]
        return pixels


def image_processor(folder: Path, setting: str) -> Any:
    """Image processor of a checkpoint, using PIL. Raises ValueError if it cannot be made."""
    return from_folder(AutoImageProcessor, folder, setting, "image processor", backend="pil")


def load_tokenizer(folder: Path, setting: str) -> Any:
    """Tokenizer of a checkpoint. Raises ValueError if it cannot be made."""
    return from_folder(transformers.AutoTokenizer, folder, setting, "tokenizer")


def from_folder(kind: Any, folder: Path, setting: str, what: str, **options: Any) -> Any:
    try:
        return kind.from_pretrained(folder, local_files_only=True, **options)
    except (OSError, ValueError, ImportError) as error:
        raise ValueError(f"settings.{setting} = {str(folder)!r}: its {what} cannot be loaded: {error}") from error


def in_batches(run: Callable[[Sequence[Item]], torch.Tensor], items: Sequence[Item], batch_size: int) -> torch.Tensor:
    """The rows that `run` gives, batch by batch, on the CPU in float32."""
    return torch.cat([run(part).float().cpu() for part in batches(items, batch_size)])


def batches(items: Sequence[Item], batch_size: int) -> Iterator[Sequence[Item]]:
    """Runs of at most `batch_size`, in order."""
    return (items[start : start + batch_size] for start in range(0, len(items), batch_size))
