"""Scorers that read text in pictures: recognition models, and what they are compared with."""
