"""`frame_consistency`: how steady what a video shows is, by a CLIP model, -1 … 1.

VBench's background consistency (Huang et al., arXiv 2311.17982): the mean over the frames after the first of
(cos(e_t, e_1) + cos(e_t, e_{t-1})) / 2, with e the projected image embedding of a frame. A still film has 1, so reward
`motion` or the prompt's fit as well. Of a long video at most `settings.num_frames` evenly spaced frames count.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import Field

from flowfleet.proto.reward_pb2 import MODALITY_VIDEO
from services.reward.networks.checkpoints import check_checkpoint, check_processor
from services.reward.networks.encoders import ClipEncoder
from services.reward.networks.torch_models import ModelScorer, ModelSettings
from services.reward.scorer import Outcome, Problem, Sample, Score


class FrameConsistencySettings(ModelSettings):
    """Settings of `frame_consistency`."""

    num_frames: int = Field(default=16, ge=2)
    """Frames of a video that are compared, at most."""


class FrameConsistency(ModelScorer[FrameConsistencySettings]):
    """Components: `to_first`, `to_previous`, the means of both cosines."""

    name = "frame_consistency"
    modalities = (MODALITY_VIDEO,)
    score_range = (-1.0, 1.0)
    components = ("to_first", "to_previous")

    def __init__(self, settings: FrameConsistencySettings, num_threads: int) -> None:
        check_checkpoint(settings.model, "model", ("clip",))
        check_processor(settings.processor_folder, settings.processor_setting, tokenizer=True)
        self.version, self.pinned = settings.version(1), settings.pinned
        super().__init__(settings, num_threads)
        self._encoder: ClipEncoder

    def start(self) -> None:
        super().start()
        self._encoder = ClipEncoder(self._settings, self._settings.model, "model", self._num_threads)

    def score(self, samples: Sequence[Sample], params: None) -> list[Outcome]:
        return [self._of(sample) for sample in samples]

    def _of(self, sample: Sample) -> Outcome:
        if len(sample.frames) < 2:
            return Problem("one_frame", "a video of one frame has nothing to be steady against: send more")
        frames = self._encoder.pictures(sample.pictures(self._settings.num_frames))
        to_first = float((frames[1:] @ frames[0]).clamp(-1, 1).mean())
        to_previous = float((frames[1:] * frames[:-1]).sum(dim=1).clamp(-1, 1).mean())
        return Score((to_first + to_previous) / 2, {"to_first": to_first, "to_previous": to_previous})


def make(name: str, settings: Mapping[str, Any], num_threads: int) -> FrameConsistency:
    return FrameConsistency(FrameConsistencySettings.read(settings), num_threads)
