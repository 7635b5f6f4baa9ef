"""Wan 2.2 A14B image to video, on the components of diffusers' `WanImageToVideoPipeline`.

It is Wan with two experts, whose transformers see more channels than the latents': a video that holds the prompt's
image as its first frame, a second image as its last if there is one, and zeros elsewhere, and a mask of what is given.
All of a sample's latents are free. The extra `condition` is (B, 4 + Z, f, h, w).
"""

from dataclasses import replace
from functools import partial
from typing import Any

import torch
from diffusers import WanImageToVideoPipeline, WanPipeline
from PIL import Image
from torch import Tensor

from flowfleet.models.embeds import PromptEmbeds
from flowfleet.models.families.wan import WanAdapter
from flowfleet.models.settings import Guidance, Size


class WanImageAdapter(WanAdapter):
    """See `ModelAdapter`."""

    pipeline_class = WanImageToVideoPipeline

    def __init__(self, pipeline: Any, vae_config: dict[str, Any], *, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(pipeline, vae_config, dtype=dtype, device=device)
        self.complete(pipeline)
        if self.clean_frames:
            raise ValueError(
                "this checkpoint has a timestep per token: set _class_name in its model_index.json to WanPipeline, and "
                "rollout.from_image in the job"
            )
        for expert in self.experts.values():
            if expert.config.image_dim is not None:  # type: ignore[union-attr]
                raise ValueError("this checkpoint also reads its image by CLIP (Wan2.1): use Wan2.2 A14B")

    def complete(self, pipeline: Any) -> None:
        """Gives the pipeline `WanPipeline`'s encoder of prompts, which does not need ftfy."""
        pipeline._get_t5_prompt_embeds = partial(WanPipeline._get_t5_prompt_embeds, pipeline)

    def _encode(self, prompts: list[str], images: list[list[Image.Image]] | None) -> PromptEmbeds:
        if images is None or not all(1 <= len(row) <= 2 for row in images):
            raise ValueError("this model takes 1 to 2 condition images a prompt, the first frame and the last")
        conditions = [self._condition(row) for row in images]
        return replace(self._encode_text(prompts), extras={"condition": torch.cat(conditions)})

    def _condition(self, pictures: list[Image.Image]) -> Tensor:
        pixels = [self._pixels_of(picture) for picture in pictures]
        size = self._condition_size
        assert size is not None
        video = torch.zeros(1, 3, size.num_frames, size.height, size.width)
        given = torch.zeros(1, 1, size.num_frames, 1, 1)
        for place, frame in zip((0, -1), pixels, strict=False):
            video[:, :, place], given[:, :, place] = frame, 1
        latents = self._normalized(video)
        first = given[:, :, :1].expand(-1, -1, self._temporal_scale, -1, -1)  # as often as a latent frame has frames
        mask = torch.cat([first, given[:, :, 1:]], dim=2).reshape(1, -1, self._temporal_scale, 1, 1).transpose(1, 2)
        return torch.cat([mask.expand(-1, -1, *latents.shape[2:]).to(latents), latents], dim=1)

    def blank_conditions(self, count: int, size: Size) -> dict[str, Tensor]:
        channels, *shape = self.latent_shape(size)
        return {"condition": torch.zeros(count, self._temporal_scale + channels, *shape, device=self.device)}

    def _predict(
        self, expert: Any, latents: Tensor, timesteps: Tensor, prompts: PromptEmbeds, size: Size, guidance: Guidance
    ) -> Tensor:
        joined = torch.cat([latents, prompts.extras["condition"].to(latents.device)], dim=1)
        return self._transform(expert, joined, timesteps, prompts)
