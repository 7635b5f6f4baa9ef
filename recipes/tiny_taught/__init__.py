"""Tiny bases of edits and of films with sound, which code teaches in seconds to do most of what is asked."""
