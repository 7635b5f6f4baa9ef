"""Where trainers run and what the fleet has: one folder a platform behind the protocols Launcher and Directory."""
