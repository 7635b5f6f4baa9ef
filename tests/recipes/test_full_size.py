"""The folder without weights has the real model's sizes, and the recipes' job reads it."""

from pathlib import Path

import torch
from diffusers import QwenImageTransformer2DModel
from transformers import AutoConfig, Qwen2_5_VLForConditionalGeneration, Qwen2Tokenizer

from flowfleet.models.registry import adapter_for
from flowfleet.models.settings import Size
from recipes.full_size.make_model import PROMPTS, write_checkpoint

TEMPLATE = (
    "<|im_start|>system\nDescribe the image by detailing the color, shape, size, texture, quantity, text, spatial "
    "relationships of the objects and background:<|im_end|>\n<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
)
DROPPED = 34


def test_it_has_the_published_numbers_of_parameters(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path)
    config = QwenImageTransformer2DModel.load_config(folder / "transformer")
    with torch.device("meta"):
        transformer = QwenImageTransformer2DModel.from_config(config)
        encoder = Qwen2_5_VLForConditionalGeneration(AutoConfig.from_pretrained(folder / "text_encoder"))
    assert sum(p.numel() for p in transformer.parameters()) == 20_430_401_088
    assert round(sum(p.numel() for p in encoder.parameters()) / 1e9, 1) == 8.3
    assert not list(folder.rglob("*.safetensors"))


def test_prompts_are_128_tokens_long_without_the_templates_head(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, tiny=True)
    tokenizer = Qwen2Tokenizer.from_pretrained(folder / "tokenizer")
    prompts = (folder / PROMPTS).read_text().splitlines()
    assert {len(tokenizer(TEMPLATE.format(prompt)).input_ids) - DROPPED for prompt in prompts} == {128}
    assert len(set(prompts)) > len(prompts) // 2


def test_its_schedule_and_latents_are_those_of_the_reference(tmp_path: Path) -> None:
    """Noise levels of 10 steps at 512² as published for the real model's scheduler."""
    folder = write_checkpoint(tmp_path, tiny=True)
    family = adapter_for(str(folder))
    assert family.pipeline_class.__name__ == "QwenImagePipeline"
    adapter = family.load(str(folder), dtype=torch.float32, components=())
    assert adapter.latent_shape(Size(512, 512)) == (1024, 64)
    expected = [1, 0.92897, 0.85148, 0.76662, 0.67328, 0.57012, 0.45550, 0.32740, 0.18330, 0.02, 0]
    torch.testing.assert_close(
        adapter.schedule(10, Size(512, 512)).sigmas.double(), torch.tensor(expected).double(), atol=6e-6, rtol=0
    )
