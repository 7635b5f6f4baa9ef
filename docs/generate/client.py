"""Write the synchronous client from the asynchronous one: `python -m docs.generate.client`.

Each file of flowfleet/client/aio becomes one of flowfleet/client. Words are replaced and `await` is left out; the
formatter does the rest.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

FOLDER = Path(__file__).parents[2] / "flowfleet" / "client"
NAMES = ("transport.py", "download.py", "voting.py", "client.py")
WORDS = {
    r"\bawait ": "",
    r"\basync (def|with|for)\b": r"\1",
    r"import asyncio\n(import time\n)?": "import time\n",
    r"asyncio\.sleep": "time.sleep",
    r"asyncio\.to_thread\(([\w.]+), ": r"\1(",
    r"Awaitable\[(\w+)\]": r"\1",
    r"AsyncIterator, Awaitable, Callable": "Callable, Iterator",
    r"AsyncIterator": "Iterator",
    r"AbstractAsyncContextManager": "AbstractContextManager",
    r"asynccontextmanager": "contextmanager",
    r"AsyncBaseTransport": "BaseTransport",
    r"Async(Client|Transport|Pieces|Voting)": r"\1",
    r"__a(enter|exit)__": r"__\1__",
    r"\ba(close|read|iter_text|iter_bytes)\b": r"\1",
    r"flowfleet\.client\.aio\.": "flowfleet.client.",
    r"\[(\w+) for \1 in (.+)\]\)": r"list(\2))",
    r"Flowfleet, asynchronous:": "Flowfleet:",
    r"print\(\((client\.job\(job\.id\))\)": r"print(\1",
}
HEAD = "# Generated from aio/{name} by docs/generate/client.py: change that file.\n"


def synchronous(name: str) -> str:
    """The synchronous file, formatted."""
    text = (FOLDER / "aio" / name).read_text(encoding="utf-8")
    for pattern, word in WORDS.items():
        text = re.sub(pattern, word, text)
    for command in (["check", "--fix-only", "--quiet", "--select", "I,UP,SIM117,F401"], ["format", "--quiet"]):
        argv = [sys.executable, "-m", "ruff", *command, "--stdin-filename", str(FOLDER / name), "-"]
        text = subprocess.run(argv, input=text, capture_output=True, text=True, check=True).stdout
    return HEAD.format(name=name) + text


if __name__ == "__main__":
    for name in NAMES:
        (FOLDER / name).write_text(synchronous(name), encoding="utf-8")
