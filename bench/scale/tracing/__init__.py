"""What traces cost a controller (`__main__.py`), and a collector that takes them."""
