"""Checkpoints: written, verified, set aside when damaged, fenced from trainers that were replaced."""
