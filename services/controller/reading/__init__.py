"""Files and URLs that jobs name: which are allowed, and the processes without secrets that read them."""
