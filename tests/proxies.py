"""All variables that name a proxy, and one that nothing answers."""

PROXIES = tuple(
    case(f"{scheme}_proxy") for scheme in ("http", "https", "all", "ftp", "grpc") for case in (str.lower, str.upper)
)
DEAD = "http://127.0.0.1:9"
