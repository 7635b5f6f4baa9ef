"""The base model of composition: its parts, and how they are trained before reinforcement learning."""
