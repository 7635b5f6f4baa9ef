"""Samples that do not go through the stream: previews, and held-out ones."""
