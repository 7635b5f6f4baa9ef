"""A folder of Qwen3-Omni's Thinker at its real width without weights, for jobs with `model.load_format = "dummy"`.

Sizes are those of Qwen3-Omni-30B-A3B: layers of 128 experts of which a token takes 8, and the encoders of pictures and
sounds. The tokenizer is the tiny Thinker's, so that a word is a token; of the model's 152,064 tokens it knows the first
few.
"""

from pathlib import Path

from transformers import Qwen3OmniMoeThinkerConfig

from recipes.tiny_thinker.model import configuration, save_processors

NUM_LAYERS = 48
BYTES_OF_LAYER, BYTES_OF_REST = 1.25e9, 3.7e9
"""Weights in bfloat16: a layer of the language model, and all that is not one."""


def write_folder(directory: Path, num_layers: int, *, tiny: bool = False) -> Path:
    """Writes the folder and returns it. `tiny` keeps every part and shrinks it."""
    directory.mkdir(parents=True, exist_ok=True)
    real = Path(__file__).with_name("thinker.json")
    config = configuration() if tiny else Qwen3OmniMoeThinkerConfig.from_json_file(real)
    config.text_config.num_hidden_layers = num_layers
    config.architectures = ["Qwen3OmniMoeThinkerForConditionalGeneration"]
    config.save_pretrained(directory)
    patch = config.vision_config.patch_size
    save_processors(directory, config, {"shortest_edge": 16 * patch**2, "longest_edge": 4096 * patch**2})
    return directory
