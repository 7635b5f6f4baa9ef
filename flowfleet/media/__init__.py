"""Pictures and videos as bytes and as frames."""
