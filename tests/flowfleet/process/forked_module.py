"""What the tests of the fork server have forked: does as its first argument says."""

import json
import os
import sys
import time
from pathlib import Path

if __name__ == "__main__":
    what, *rest = sys.argv[1:]
    if what == "tell":
        told = {
            "pid": os.getpid(),
            "group": os.getpgid(0),
            "session": os.getsid(0),
            "cwd": os.getcwd(),
            "env": dict(os.environ),
            "path": sys.path[0],
            "stdin": sys.stdin.read(),
            "rank": os.environ.get("RANK"),
        }
        sys.stdout.write(json.dumps(told) + "\n")  # one write a rank, which print's two are not when unbuffered
        print("to stderr", file=sys.stderr)
    if what == "mark":
        Path(rest[0]).write_text(str(os.getpid()))
    if what == "sleep":
        time.sleep(60)
    if what == "raise":
        raise ValueError("wrong")
    if what == "exit":
        sys.exit(int(rest[0]) if rest[0].isdecimal() else rest[0])
