"""Scripts behind every published figure: run them with `make bench`, or one with `python -m bench.<name>`."""
