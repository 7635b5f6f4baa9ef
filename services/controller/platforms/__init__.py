"""Where the fleet runs, a folder a platform: its directory, its launcher of trainers and their places."""
