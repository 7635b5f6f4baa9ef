"""Recipes: job files and the small models they run on."""
