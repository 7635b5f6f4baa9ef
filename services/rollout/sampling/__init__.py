"""Path of a request: it is checked, its media are fetched, its samples are made and published."""
