"""The asynchronous client. The synchronous one, in the folder above, is generated from it (docs/generate/client.py)."""
