"""Environment: what a result carries, so that it can be cited."""

from __future__ import annotations

import os
import platform
import subprocess
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any


def environment(command: str) -> dict[str, Any]:
    """Commit, machine and versions: what a result must carry to be cited."""
    commit = subprocess.run(
        ["git", "describe", "--always", "--dirty"], capture_output=True, text=True, check=False
    ).stdout.strip()
    return {
        "commit": commit or "unknown",
        "date": f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC",
        "command": command,
        "machine": {"cores": os.cpu_count(), "processor": _processor(), **_gpu()},
        "versions": {
            "python": platform.python_version(),
            "torch": metadata.version("torch"),
            "numpy": metadata.version("numpy"),
        },
    }


def _gpu() -> dict[str, str]:
    """The GPU, where there is one."""
    import torch  # Not every result needs it, and it takes seconds.

    return {"gpu": torch.cuda.get_device_name()} if torch.cuda.is_available() else {}


def _processor() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()
