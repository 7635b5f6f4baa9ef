"""The tiny sign painter: a complete Qwen-Image checkpoint small enough to live in the repository."""
