"""Random tiny CLAP and Whisper, saved as checkpoints that their processors' Auto classes load."""

from pathlib import Path

import torch
from tokenizers import pre_tokenizers
from transformers import (
    ClapConfig,
    ClapFeatureExtractor,
    ClapModel,
    WhisperConfig,
    WhisperFeatureExtractor,
    WhisperForConditionalGeneration,
    WhisperTokenizer,
)

from tests.tiny_models.clip import randomize
from tests.tiny_models.text_encoders import make_clip_tokenizer

RATE, WIDTH, MEL_BINS = 16_000, 16, 8
_SPECIAL = (
    *("<|endoftext|>", "<|startoftranscript|>", "<|en|>", "<|translate|>", "<|transcribe|>", "<|startoflm|>"),
    *("<|startofprev|>", "<|nocaptions|>", "<|notimestamps|>"),
)


def save_clap(folder: Path, *, seed: int = 0) -> Path:
    """Writes model, tokenizer and feature extractor of a second of sound to `folder`, and returns it."""
    tokenizer = make_clip_tokenizer()
    text = {"vocab_size": len(tokenizer), "max_position_embeddings": 80, "pad_token_id": 1, "num_hidden_layers": 1}
    text |= {"hidden_size": WIDTH, "intermediate_size": 2 * WIDTH, "num_attention_heads": 2, "projection_dim": WIDTH}
    sound = {"spec_size": 32, "window_size": 2, "num_mel_bins": MEL_BINS, "patch_size": 4, "patch_stride": [4, 4]}
    sound |= {"num_classes": 4, "hidden_size": WIDTH, "patch_embeds_hidden_size": WIDTH // 2, "depths": [1, 1]}
    sound |= {"num_attention_heads": [1, 2], "projection_dim": WIDTH}
    torch.manual_seed(seed)
    model = ClapModel(ClapConfig(text_config=text, audio_config=sound, projection_dim=WIDTH))
    randomize(model)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    ClapFeatureExtractor(
        feature_size=MEL_BINS,
        sampling_rate=RATE,
        max_length_s=1,
        fft_window_size=256,
        hop_length=160,
        truncation="rand_trunc",
    ).save_pretrained(folder)
    return folder


def save_whisper(folder: Path, *, seed: int = 0) -> Path:
    """Writes model, tokenizer and feature extractor of a second of sound to `folder`, and returns it."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = WhisperTokenizer(vocab={token: number for number, token in enumerate(alphabet)}, merges=[])
    tokenizer.add_special_tokens({"additional_special_tokens": list(_SPECIAL)})
    end = int(tokenizer.convert_tokens_to_ids(_SPECIAL[0]))
    sizes = {
        f"{side}_{name}": size for side in ("encoder", "decoder") for name, size in (("layers", 1), ("ffn_dim", 32))
    }
    sizes |= {"encoder_attention_heads": 2, "decoder_attention_heads": 2, "max_source_positions": 50}
    config = WhisperConfig(
        vocab_size=len(tokenizer),
        d_model=WIDTH,
        num_mel_bins=MEL_BINS,
        max_target_positions=64,
        pad_token_id=end,
        bos_token_id=end,
        eos_token_id=end,
        decoder_start_token_id=end + 1,
        suppress_tokens=[],
        begin_suppress_tokens=[],
        **sizes,
    )
    torch.manual_seed(seed)
    model = WhisperForConditionalGeneration(config)
    randomize(model)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    WhisperFeatureExtractor(feature_size=MEL_BINS, sampling_rate=RATE, chunk_length=1).save_pretrained(folder)
    return folder
