"""Trainers as processes of this machine; rewards from flags and a file."""
