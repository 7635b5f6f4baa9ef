"""A job's data: read, checked, dealt out by step, and brought to the rollouts."""
