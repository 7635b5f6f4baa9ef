"""What keeps the processes of a stack alive: starts, health, restarts, and the cleanup after a crash."""
