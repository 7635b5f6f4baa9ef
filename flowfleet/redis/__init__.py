"""Redis: clients that outlive their server, users and their rights, a local server, the names of all keys."""
