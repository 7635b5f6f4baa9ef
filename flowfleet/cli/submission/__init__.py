"""Parts of `flowfleet submit`: `--check` and `--dry-run`."""
