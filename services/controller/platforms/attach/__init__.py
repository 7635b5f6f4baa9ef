"""Trainers that somebody else starts: ranks announce themselves, and hear when they must end."""
