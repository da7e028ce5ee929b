"""Environment: the commit, machine and versions that are stored with every result."""

from __future__ import annotations

import os
import platform
import subprocess
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any


def environment(command: str) -> dict[str, Any]:
    """Commit, date, command, machine and versions; a result needs them to be cited."""
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
    """The name of the GPU; empty without a GPU."""
    import torch  # Imported late: the import takes seconds, and not every result needs torch.

    return {"gpu": torch.cuda.get_device_name()} if torch.cuda.is_available() else {}


def _processor() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()
