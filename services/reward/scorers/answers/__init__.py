"""Scorers of written answers, which compare them with the reference answer of the prompt's metadata."""
