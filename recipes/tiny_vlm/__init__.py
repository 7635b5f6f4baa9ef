"""A tiny vision-language model that judges pictures: a real Qwen2.5-VL at a few millionths of the size."""
