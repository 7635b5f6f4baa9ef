"""Composition: a world of scenes with captions on which counts, colors, places, words and styles have to be learned."""
