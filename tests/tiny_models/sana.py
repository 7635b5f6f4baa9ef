"""A random tiny Sana: `make_tiny_sana(path)` writes a `SanaPipeline` folder, with latents at 1/32 size as published."""

import json
import string
from pathlib import Path

import torch
from diffusers import AutoencoderDC, DPMSolverMultistepScheduler, SanaPipeline, SanaTransformer2DModel
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, trainers
from transformers import Gemma2Config, Gemma2Model, GemmaTokenizer

from flowfleet.models.families.sana import INSTRUCTION
from tests.tiny_models.z_image import spread_prompts

TEXT_WIDTH = 32
CHANNELS = 4
_SPECIAL = ["<pad>", "<eos>", "<bos>", "<unk>", "<mask>"]


def make_tiny_sana(path: Path, *, seed: int = 0) -> Path:
    """Writes a random fp32 `SanaPipeline` checkpoint under `path` and returns `path`."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        tokenizer = make_gemma_tokenizer()
        SanaPipeline(
            tokenizer=tokenizer,
            text_encoder=_make_gemma(len(tokenizer)),
            vae=_make_vae(),
            transformer=_make_transformer(),
            scheduler=DPMSolverMultistepScheduler(
                prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0, solver_order=2
            ),
        ).save_pretrained(path)
    return path


def make_gemma_tokenizer() -> GemmaTokenizer:
    """A BPE that knows the words of the pipeline's instruction and single characters."""
    bpe = Tokenizer(models.BPE(unk_token="<unk>"))
    bpe.normalizer = normalizers.Replace(" ", "▁")
    bpe.pre_tokenizer = pre_tokenizers.Split("▁", "merged_with_next")
    trainer = trainers.BpeTrainer(
        vocab_size=1000, special_tokens=_SPECIAL, initial_alphabet=["▁", *string.printable], show_progress=False
    )
    bpe.train_from_iterator(INSTRUCTION * 10, trainer)
    merges = json.loads(bpe.to_str())["model"]["merges"]
    return GemmaTokenizer(vocab=bpe.get_vocab(), merges=[tuple(pair) for pair in merges])


def _make_gemma(vocab_size: int) -> Gemma2Model:
    config = Gemma2Config(
        vocab_size=vocab_size,
        hidden_size=TEXT_WIDTH,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=16,
        query_pre_attn_scalar=16,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=2,
    )
    encoder: Gemma2Model = spread_prompts(Gemma2Model(config))
    return encoder


def _make_vae() -> AutoencoderDC:
    vae = AutoencoderDC(
        latent_channels=CHANNELS,
        encoder_block_out_channels=(8,) * 6,
        decoder_block_out_channels=(8,) * 6,
        encoder_layers_per_block=(1,) * 6,
        decoder_layers_per_block=(1,) * 6,
        encoder_qkv_multiscales=((),) * 6,
        decoder_qkv_multiscales=((),) * 6,
        scaling_factor=0.41407,
    )
    return vae.eval()


def _make_transformer() -> SanaTransformer2DModel:
    model = SanaTransformer2DModel(
        in_channels=CHANNELS,
        out_channels=CHANNELS,
        num_attention_heads=2,
        attention_head_dim=16,
        num_layers=2,
        num_cross_attention_heads=2,
        cross_attention_head_dim=16,
        cross_attention_dim=32,
        caption_channels=TEXT_WIDTH,
    )
    return model.eval()
