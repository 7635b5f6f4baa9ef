"""Supervision that keeps a stack's processes alive: starts, health, restarts, and the cleanup after a crash."""
