"""Z-Image and Z-Image-Turbo, https://arxiv.org/abs/2511.22699, on the components of diffusers' `ZImagePipeline`.

Latents are spatial, (B, 16, H/8, W/8). A prompt is the chat template around it, thinking on, as Qwen3's last layer but
one sees it: up to 512 tokens, cut to its own length for the transformer, which takes lists and fills up each caption by
itself. Its time runs from noise to data, so the velocity here, dx/dsigma, is its output negated.

Our guidance scale s means n + s (p - n), as everywhere. The pipeline's `guidance_scale` g means p + g (p - n), the same
for s = g + 1: the pipeline's default of g = 5 is s = 6 here, and Turbo's g = 0 is s = 1, off. The pipeline's
`cfg_normalization` and `cfg_truncation` are off, as by its defaults.
"""

from typing import Any

import torch
from diffusers import ZImagePipeline
from numpy.typing import ArrayLike
from PIL import Image
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from flowfleet.models.base import without_images
from flowfleet.models.embeds import PromptEmbeds
from flowfleet.models.kl_vae import PictureAdapter
from flowfleet.models.packing import PATCH
from flowfleet.models.settings import Guidance, Size


class ZImageAdapter(PictureAdapter):
    """See `ModelAdapter`."""

    pipeline_class = ZImagePipeline
    text_width = "cap_feat_dim"
    lora_targets = ("to_q", "to_k", "to_v", "to_out.0", "feed_forward.w1", "feed_forward.w2", "feed_forward.w3")

    max_sequence_length: int = 512
    """Tokens of Qwen3; shorter prompts keep their own length."""

    def _encode(self, prompts: list[str], images: list[list[Image.Image]] | None) -> PromptEmbeds:
        without_images(images)
        captions, _ = self.pipeline.encode_prompt(
            prompts, device=self.device, do_classifier_free_guidance=False, max_sequence_length=self.max_sequence_length
        )
        lengths = torch.tensor([len(caption) for caption in captions])
        mask = torch.arange(int(lengths.max())) < lengths.unsqueeze(1)
        return PromptEmbeds(pad_sequence(captions, batch_first=True), mask.to(self.device))

    def _levels(self, num_steps: int) -> ArrayLike:
        """linspace(1, 1/N, N) in float32, as this pipeline makes it: other last bits than in float64."""
        return torch.linspace(1.0, 1 / num_steps, num_steps).numpy()

    def latent_shape(self, size: Size) -> tuple[int, ...]:
        rows, columns = self._token_grid(size)
        return self._vae.channels, rows * PATCH, columns * PATCH

    def _predict(
        self, expert: Any, latents: Tensor, timesteps: Tensor, prompts: PromptEmbeds, size: Size, guidance: Guidance
    ) -> Tensor:
        outputs: list[Tensor] = expert(
            list(latents.to(self.dtype).unsqueeze(2).unbind()),
            (1000 - timesteps) / 1000,
            _captions(prompts.to(latents.device, self.dtype)),
            return_dict=False,
        )[0]
        return -torch.stack(outputs).squeeze(2).float()


def _captions(prompts: PromptEmbeds) -> list[Tensor]:
    """(L_i, D) of each prompt, without its padding. Asks the device for the lengths if there is any."""
    rows = list(prompts.embeds.unbind())
    if not prompts.has_padding:
        return rows
    return [row[:length] for row, length in zip(rows, prompts.mask.sum(1).tolist(), strict=True)]
