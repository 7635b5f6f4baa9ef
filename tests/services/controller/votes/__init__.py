"""People's votes."""
