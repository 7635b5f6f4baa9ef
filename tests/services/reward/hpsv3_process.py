"""Scores by the scorer `hpsv3` and by the library's inferencer, as JSON: run where the library is."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml
from safetensors.torch import save_file

from services.reward.scorer import Sample, Score
from tests.services.reward.library_process import declare_operators, pictures, refusal, scores, started

PROMPTS = ["a red cat on a mat", "a much longer prompt, of which more tokens than of the others are read", "{}"]
MARKS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>"]
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{% for part in message['content'] %}"
    "{% if part['type'] == 'text' %}{{ part['text'] }}{% else %}<|vision_start|><|image_pad|><|vision_end|>{% endif %}"
    "{% endfor %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
WIDTH = 32


def write_model(folder: Path) -> None:
    """A Qwen2-VL of its own classes with random weights: one block each for picture and text, bytes as tokens."""
    from tokenizers import pre_tokenizers
    from transformers import Qwen2TokenizerFast, Qwen2VLConfig, Qwen2VLForConditionalGeneration, Qwen2VLImageProcessor

    folder.mkdir()
    alphabet = {byte: number for number, byte in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    (folder / "vocab.json").write_text(json.dumps(alphabet))
    (folder / "merges.txt").write_text("#version: 0.2\n")
    tokenizer = Qwen2TokenizerFast(str(folder / "vocab.json"), str(folder / "merges.txt"))
    tokenizer.add_special_tokens({"additional_special_tokens": MARKS})
    tokenizer.save_pretrained(folder)
    Qwen2VLImageProcessor().save_pretrained(folder)
    (folder / "chat_template.json").write_text(json.dumps({"chat_template": TEMPLATE}))
    start, end, image = tokenizer.convert_tokens_to_ids(MARKS[3:])
    config = Qwen2VLConfig(
        vocab_size=len(tokenizer) + 8,
        hidden_size=WIDTH,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        rope_scaling={"type": "mrope", "mrope_section": [1, 1, 2]},
        vision_config={"depth": 1, "embed_dim": 32, "hidden_size": WIDTH, "num_heads": 2},
        vision_start_token_id=start,
        vision_end_token_id=end,
        image_token_id=image,
        video_token_id=len(tokenizer) + 1,
    )
    Qwen2VLForConditionalGeneration(config).save_pretrained(folder)


def write_weights(folder: Path, file: Path) -> None:
    """A checkpoint of the library's model with large random weights, so that every part of the input moves it."""
    from hpsv3.model.qwen2vl_trainer import Qwen2VLRewardModelBT
    from transformers import AutoTokenizer

    torch.manual_seed(1)
    model = Qwen2VLRewardModelBT.from_pretrained(folder, output_dim=2, rm_head_type="ranknet")
    model.resize_token_embeddings(len(AutoTokenizer.from_pretrained(folder)) + 1)  # with <|Reward|>
    for weight in model.parameters():
        if weight.ndim == 2:
            torch.nn.init.normal_(weight, std=1.5 / weight.shape[1] ** 0.5)
    save_file(dict(model.state_dict()), file)


def inferencer(folder: Path, file: Path, config: Path) -> Any:
    """The library's, by its own configuration; bfloat16 and GPUs alone are changed."""
    import hpsv3.inference as library

    options = yaml.safe_load(Path(library.__file__).with_name("config").joinpath("HPSv3_7B.yaml").read_text())
    options |= {"model_name_or_path": str(folder), "bf16": False, "torch_dtype": "float32", "use_cpu": True}
    config.write_text(yaml.safe_dump(options))
    return library.HPSv3RewardInferencer(str(config), str(file), device="cpu")


def main(folder: Path) -> dict[str, Any]:
    declare_operators()
    model, file = folder / "model", folder / "HPSv3.safetensors"
    write_model(model)
    write_weights(model, file)
    images = pictures()
    scorer = started("hpsv3", model=str(model), weights=str(file), batch_size=2)
    pairs = [(image, prompt) for image in images for prompt in PROMPTS]
    found = scores(scorer, [Sample.of_picture(*pair) for pair in pairs])
    theirs = inferencer(model, file, folder / "config.yaml")
    told: dict[str, Any] = {"version": scorer.version}
    told["scores"] = [[one.value, one.components["log_sigma"]] for one in found]
    with torch.no_grad():
        told["library"] = [theirs.reward([image], [prompt])[0].tolist() for image, prompt in pairs]
    film = Sample(np.stack([np.asarray(images[0]), np.asarray(images[2])]), PROMPTS[0])
    told["film"] = scores(scorer, [film])[0].value

    marked = Sample.of_picture(images[0], "a cat <|Reward|>")
    thin = Sample.of_picture(images[0].resize((201, 1)), "")
    outcomes = scorer.score([marked, Sample.of_picture(images[0], PROMPTS[0]), thin], None)
    told["marked"] = [one.value if isinstance(one, Score) else one.message for one in outcomes]

    other = folder / "other.safetensors"
    save_file({"x": torch.zeros(1)}, other)
    told["wrong"] = refusal("hpsv3", model=str(model), weights=str(other))
    return told


if __name__ == "__main__":
    print("\n" + json.dumps(main(Path(sys.argv[1]))))
