"""Losses on velocities at new noise over finished latents."""
