"""Scores by the scorer `image_reward` and by the library's own model, as JSON: run where the library is."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch

from services.reward.scorer import Sample
from tests.services.reward.library_process import Harm, declare_operators, pictures, refusal, scores, started

PROMPTS = ["a red cat on a mat", "a blue dog", "a red cat " * 20]
WORDS = ["a", "red", "blue", "green", "cat", "dog", "on", "under", "mat", "sky"]
BERT = {
    "hidden_size": 768,
    "num_hidden_layers": 2,
    "num_attention_heads": 12,
    "intermediate_size": 512,
    "vocab_size": 64,
    "encoder_width": 768,
    "add_cross_attention": True,
    "pad_token_id": 0,
}


def write_release(folder: Path) -> None:
    """The files of a release without the weights: tokenizer and configuration."""
    (folder / "bert-base-uncased").mkdir(parents=True)
    vocabulary = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS]
    (folder / "bert-base-uncased/vocab.txt").write_text("\n".join(vocabulary) + "\n")
    (folder / "med_config.json").write_text(json.dumps(BERT))


def random_model(scorer: Any, folder: Path) -> Any:
    """The library's model with large random weights, so that every part of the input moves the score."""
    torch.manual_seed(0)
    with scorer.tokenizer_from(folder / "bert-base-uncased"):
        model = scorer.model_code().ImageReward(med_config=str(folder / "med_config.json"), device="cpu")
    for name, weight in model.named_parameters():
        if weight.ndim == 2 and "visual_encoder" not in name:
            torch.nn.init.normal_(weight, std=1.5 / weight.shape[1] ** 0.5)
    return model.eval()


def main(folder: Path) -> dict[str, Any]:
    declare_operators()
    from services.reward.scorers import image_reward

    image_reward.model_code()
    vit = sys.modules["ImageReward.models.BLIP.vit"].VisionTransformer
    pretrain: Any = sys.modules["ImageReward.models.BLIP.blip_pretrain"]
    # Two of the 24 blocks of the picture's encoder, which both sides then have.
    pretrain.create_vit = lambda kind, size, *_: (vit(img_size=size, embed_dim=1024, depth=2, num_heads=16), 1024)

    told: dict[str, Any] = {"missing": refusal("image_reward", weights=str(folder))}
    write_release(folder)
    torch.save({"x": Harm(folder / "harmed")}, folder / "ImageReward.pt")
    told["pickle"] = refusal("image_reward", weights=str(folder))
    told["harmed"] = (folder / "harmed").exists()
    model = random_model(image_reward, folder)
    weights = model.state_dict()
    torch.save(
        {name: weight for name, weight in weights.items() if not name.startswith("mlp.layers.7")},
        folder / "ImageReward.pt",
    )
    told["cut"] = refusal("image_reward", weights=str(folder))
    torch.save(weights, folder / "ImageReward.pt")

    images = pictures()
    scorer = started("image_reward", weights=str(folder), batch_size=2)
    pairs = [(image, prompt) for image in images for prompt in PROMPTS]
    found = scores(scorer, [Sample.of_picture(*pair) for pair in pairs])
    with torch.no_grad():
        told["library"] = [model.score(prompt, image) for image, prompt in pairs]
        told["ranked"] = model.inference_rank(PROMPTS[0], images)[1]
    told["scores"] = [one.value for one in found]
    told["cut_tokens"] = [one.components["tokens_cut"] for one in found]
    square = [images[0], images[2]]
    (film,) = scores(scorer, [Sample(np.stack([np.asarray(one) for one in square]), PROMPTS[0])])
    told["film"] = film.value
    told["version"] = scorer.version
    return told


if __name__ == "__main__":
    print("\n" + json.dumps(main(Path(sys.argv[1]))))
