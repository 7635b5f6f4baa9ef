"""Object detectors of transformers, of a fixed set of classes or of any, behind one call.

- Of a fixed set: what AutoModelForObjectDetection loads (RT-DETR, DETR, YOLOS, D-FINE, …). The names of the classes
  are the checkpoint's `id2label`.
- Of any class: OWL-ViT and OWLv2, which are asked for the classes of each picture by text.

Pictures of one size share a forward pass, so that none is padded and a score does not depend on its neighbors.
"""

from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, Final

import torch
import transformers
from PIL import Image
from transformers.models.auto.modeling_auto import MODEL_FOR_OBJECT_DETECTION_MAPPING_NAMES

from flowfleet.hardware import devices
from services.reward.execution.groups import alike
from services.reward.networks.torch_models import (
    ModelSettings,
    image_processor,
    load_model,
    load_tokenizer,
    pick_device,
)
from services.reward.scorers.geneval.rules import Box, Detection

OPEN_TYPES: Final = ("owlvit", "owlv2")
CLOSED_TYPES: Final = tuple(sorted(MODEL_FOR_OBJECT_DETECTION_MAPPING_NAMES))

SPELLINGS: Final[Mapping[str, tuple[str, ...]]] = {
    "airplane": ("aeroplane",),
    "computer keyboard": ("keyboard",),
    "computer mouse": ("mouse",),
    "couch": ("sofa",),
    "dining table": ("diningtable",),
    "hair drier": ("hair dryer",),
    "motorcycle": ("motorbike",),
    "potted plant": ("pottedplant",),
    "tv": ("tvmonitor",),
    "tv remote": ("remote",),
}
"""geneval's names of COCO's classes to those of checkpoints, where they differ."""

Found = dict[str, list[Detection]]


class Detector(ABC):
    """Detector for one thread at a time."""

    def __init__(self, settings: ModelSettings, kind: Any) -> None:
        self._device = pick_device(settings.device)
        self._dtype = getattr(torch, settings.dtype)
        self._batch_size = settings.batch_size
        self._model = load_model(kind, settings, settings.model, "model", self._device)
        self._processor = image_processor(settings.processor_folder, settings.processor_setting)

    def unknown(self, names: Sequence[str]) -> list[str]:
        """Classes that it cannot find."""
        return []

    @torch.inference_mode()
    def detect(self, pictures: Sequence[Image.Image], names: Sequence[Sequence[str]], threshold: float) -> list[Found]:
        """Finds objects of each picture's classes with certainties above the threshold. Clips boxes to the picture."""
        found: dict[int, Found] = {}
        for part in alike(pictures, lambda picture: picture.size, self._batch_size):
            with devices.bound(self._device):
                results = self._forward(
                    [pictures[place] for place in part], [names[place] for place in part], threshold
                )
            for place, result in zip(part, results, strict=True):
                found[place] = _by_name(result, self._names(names[place]), pictures[place].size)
        return [found[place] for place in range(len(pictures))]

    def _forward(
        self, pictures: Sequence[Image.Image], names: Sequence[Sequence[str]], threshold: float
    ) -> list[dict[str, torch.Tensor]]:
        """`scores`, `labels`, `boxes` of each of several pictures of one size."""
        inputs = {**self._processor(images=list(pictures), return_tensors="pt"), **self._queries(names)}
        inputs = {name: tensor.to(self._device) for name, tensor in inputs.items()}
        inputs["pixel_values"] = inputs["pixel_values"].to(self._dtype)
        outputs = self._model(**inputs)
        outputs.logits, outputs.pred_boxes = outputs.logits.float().cpu(), outputs.pred_boxes.float().cpu()
        sizes = [(picture.height, picture.width) for picture in pictures]
        results: list[dict[str, torch.Tensor]] = self._processor.post_process_object_detection(
            outputs, threshold=threshold, target_sizes=torch.tensor(sizes)
        )
        return results

    def _queries(self, names: Sequence[Sequence[str]]) -> dict[str, torch.Tensor]:
        """Inputs of the model besides pictures."""
        return {}

    @abstractmethod
    def _names(self, names: Sequence[str]) -> Mapping[int, str]:
        """Label to class, of a picture asked for `names`."""


class ClosedDetector(Detector):
    """Detector of the classes that the checkpoint was trained on."""

    def __init__(self, settings: ModelSettings) -> None:
        super().__init__(settings, transformers.AutoModelForObjectDetection)
        labels = {str(name).lower(): int(label) for label, name in self._model.config.id2label.items()}
        self._labels = labels | {
            name: labels[spelling]
            for name, spellings in SPELLINGS.items()
            for spelling in spellings
            if spelling in labels and name not in labels
        }

    def unknown(self, names: Sequence[str]) -> list[str]:
        return [name for name in names if name.lower() not in self._labels]

    def _names(self, names: Sequence[str]) -> Mapping[int, str]:
        return {self._labels[name.lower()]: name for name in names}


class OpenDetector(Detector):
    """Detector of any class, asked for "a photo of a …"."""

    def __init__(self, settings: ModelSettings, kind: Any, query: str) -> None:
        super().__init__(settings, kind)
        self._tokenizer = load_tokenizer(settings.processor_folder, settings.processor_setting)
        self._query = query
        self._length = int(self._model.config.text_config.max_position_embeddings)

    def _names(self, names: Sequence[str]) -> Mapping[int, str]:
        return dict(enumerate(names))

    def _queries(self, names: Sequence[Sequence[str]]) -> dict[str, torch.Tensor]:
        """(N × Q, L) token ids and masks. A picture of fewer classes gets queries of zeros, which the model leaves
        out; their first token is attended to, for attention to nothing is NaN."""
        most = max(len(part) for part in names)
        ids = torch.zeros(len(names), most, self._length, dtype=torch.int64)
        masks = torch.zeros_like(ids)
        masks[..., 0] = 1
        for place, part in enumerate(names):
            tokens = self._tokenizer(
                [self._query.format(name) for name in part],
                padding="max_length",
                truncation=True,
                max_length=self._length,
                return_tensors="pt",
            )
            ids[place, : len(part)], masks[place, : len(part)] = tokens.input_ids, tokens.attention_mask
        return {"input_ids": ids.flatten(0, 1), "attention_mask": masks.flatten(0, 1)}


def make_detector(settings: ModelSettings, model_type: str, query: str) -> Detector:
    """The detector at `settings.model`, whose configuration says `model_type`."""
    if model_type == "owlvit":
        return OpenDetector(settings, transformers.OwlViTForObjectDetection, query)
    if model_type == "owlv2":
        return OpenDetector(settings, transformers.Owlv2ForObjectDetection, query)
    return ClosedDetector(settings)


def _by_name(result: Mapping[str, torch.Tensor], names: Mapping[int, str], size: tuple[int, int]) -> Found:
    found: Found = defaultdict(list)
    rows = zip(result["scores"].tolist(), result["labels"].tolist(), result["boxes"].tolist(), strict=True)
    for score, label, box in rows:
        if label in names:
            found[names[label]].append(Detection(_clipped(box, size), score))
    return dict(found)


def _clipped(box: Sequence[float], size: tuple[int, int]) -> Box:
    left, top, right, bottom = (min(max(side, 0.0), float(size[axis % 2])) for axis, side in enumerate(box))
    return left, top, right, bottom
