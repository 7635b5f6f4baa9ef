"""A tiny Thinker of Qwen3-Omni: names the color of a picture, and errs about half of the time."""
