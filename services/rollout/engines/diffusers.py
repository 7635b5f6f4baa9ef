"""The diffusers engine: the adapter of a flow on one device."""

from collections.abc import Sequence
from typing import ClassVar

from flowfleet.hardware import devices
from flowfleet.hardware.graphs import Graphs
from flowfleet.models.base import ModelAdapter
from flowfleet.models.level_tables import LevelLayers, table_of
from flowfleet.models.registry import ModelFamily
from flowfleet.proto.rollout_pb2 import LoraSpec, ModelSpec
from services.rollout.engines import acceleration
from services.rollout.engines.base import GenerationRequest
from services.rollout.engines.loading import load_by_blocks, load_plain
from services.rollout.engines.prompts import Encoded
from services.rollout.engines.sampler import Row, Sampler, batches
from services.rollout.engines.slots import SlotEngine


class DiffusersEngine(SlotEngine):
    """See `SlotEngine`."""

    name = "diffusers"
    writes_tokens = False
    takes_tables: ClassVar[bool] = True
    """True if a float8 base has tables in place of layers that read the noise level alone, as the trainer's has."""
    _targets: Sequence[str] = ()
    """Target modules of the adapter that comes next."""
    _graphs: Sequence[Graphs] = ()

    def _prepare(self, model: ModelSpec, lora: LoraSpec | None) -> None:
        self._targets = () if lora is None else tuple(lora.target_modules)
        if self._adapter is not None and self._model == model and model.quantization == "fp8_base":
            wanted = self._tabled(self._adapter) is not None
            if any((table_of(expert) is not None) != wanted for expert in self._adapter.experts.values()):
                self._model, self._adapter = None, None
        super()._prepare(model, lora)

    def _tabled(self, adapter: ModelAdapter) -> LevelLayers | None:
        """The layers that a float8 base has a table of, with an adapter of these targets."""
        layers = adapter.level_layers if self.takes_tables else None
        fits = layers is not None and all(layers.fit(expert, self._targets) for expert in adapter.experts.values())
        return layers if fits else None

    def _adapter_of(self, model: ModelSpec, family: ModelFamily) -> ModelAdapter:
        if model.quantization != "fp8_base":
            return load_plain(family.load(), model, self.device)
        return load_by_blocks(family.load(), model, self.device, self.pulse.beat, self._tabled)

    def _set_up(self, adapter: ModelAdapter, model: ModelSpec) -> None:
        adapter.limit_tokens(model.max_sequence_length or None)
        acceleration.accelerate(adapter.experts, compile=model.compile, quantization=model.quantization)
        if model.compile:
            adapter.compile_decoding()
            acceleration.watch_compilation(self.pulse)
        is_captured = model.compile and self.num_devices == 1 and devices.has_graphs(self.device)
        self._graphs = acceleration.capture(adapter.experts) if is_captured else []
        self._sampler = Sampler(adapter)

    def _install(self, lora: LoraSpec | None) -> None:
        super()._install(lora)
        for graphs in self._graphs:
            graphs.clear()

    def _check(self, request: GenerationRequest) -> None:
        assert self._family is not None
        check_request(request, self._family, self._lora)

    def _cut(self, request: GenerationRequest, encoded: Encoded) -> list[Sequence[Row]]:
        return [*batches(request, self._max_batch)]

    def _load_of(self, request: GenerationRequest, num_rows: int) -> tuple[str, float]:
        return load_of(request, num_rows)


def load_of(request: GenerationRequest, num_rows: int) -> tuple[str, float]:
    """Kind and weight of a batch for a `Pulse`: what happens between two denoising steps grows with its pixels."""
    is_given = any(group.media for group in request.groups)
    size = request.sampling.size
    return "media" if is_given else "sample", float(num_rows * size.height * size.width * size.num_frames)


def check_request(request: GenerationRequest, family: ModelFamily, lora: LoraSpec | None) -> None:
    """Raises ValueError for what the family would not heed, or needs and was not given, and for a KL to the policy
    without adapter where there is none."""
    if request.reference_kl and lora is None:
        raise ValueError(
            "reference_kl: full weights have no adapter to switch off: set trainer.mode to lora or algorithm.kl_reward "
            "to 0"
        )
    has_images = any(group.images for group in request.groups)
    if has_images and not family.takes_images:
        raise ValueError(f"{family.title} takes no condition images: remove `images` from the prompts")
    if family.takes_images and not (has_images or family.images_optional):
        raise ValueError(f"{family.title} needs condition images: give `images` to every prompt")
    if request.sampling.guidance.embedded is not None and not family.embedded_guidance:
        raise ValueError(f"{family.title} takes no embedded guidance: remove rollout.embedded_guidance")
    if not family.branch_guidance and (request.sampling.guidance.image_scale > 1 or request.sampling.guidance.renorm):
        raise ValueError(
            f"{family.title} has one branch of guidance: remove rollout.image_guidance_scale and "
            "rollout.guidance_renorm"
        )
