"""HunyuanImage-3.0: one transformer with a mixture of experts reads the prompt and denoises the picture."""
