"""Trainers as steps of the Slurm allocation that the controller runs in."""
