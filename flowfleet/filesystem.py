"""Proof that two processes see the same files."""

from __future__ import annotations

import hashlib
import os
import platform
from pathlib import Path


def filesystem_id() -> str:
    """The same in every process that sees the same mounts, and in no other. A container has one of its own, even where
    it is reached at 127.0.0.1. Where there is no /proc: the host's name."""
    try:
        parts = [Path("/proc/sys/kernel/random/boot_id").read_text(), os.readlink("/proc/self/ns/mnt")]
    except OSError:
        parts = [platform.node()]
    return hashlib.sha256(" ".join(parts).encode()).hexdigest()[:16]
