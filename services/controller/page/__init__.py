"""The live page: static files that the controller serves (api/routes/page.py)."""
