"""The commands of a training step, a file each."""
