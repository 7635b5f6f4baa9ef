"""Checks a submitted job and opens its data."""
