"""Losses and algorithms of policies that write tokens."""
