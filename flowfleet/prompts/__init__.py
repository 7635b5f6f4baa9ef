"""Data sets of prompts and of preferences: their formats, their columns, and one prompt of them."""
