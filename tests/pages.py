"""Commands of a page of the docs, for tests that run them."""


def commands(page: str, heading: str) -> str:
    """Returns the indented lines below a heading of any level, to the next one."""
    section = page.partition(f"# {heading}\n")[2].partition("\n#")[0]
    assert section, f"no section {heading!r}"
    return "\n".join(line.removeprefix("    ") for line in section.splitlines() if line.startswith("    "))
