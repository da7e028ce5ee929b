"""Result files: what a benchmark found, beside the commit, command, machine and versions."""

from __future__ import annotations

import json
import os
import platform
import shlex
import subprocess
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any


def environment(name: str, words: Sequence[str]) -> dict[str, Any]:
    """Commit, date, command, machine and versions; a result needs them to be cited.

    Args:
        name: the benchmark's module, without ``bench.``.
        words: words of its command line.
    """
    commit = subprocess.run(
        ["git", "describe", "--always", "--dirty"], capture_output=True, text=True, check=False
    ).stdout.strip()
    return {
        "commit": commit or "unknown",
        "date": f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC",
        "command": f"python -m bench.{name} {shlex.join(words)}".strip(),
        "machine": {"cores": os.cpu_count(), "processor": _processor(), **_gpu()},
        "versions": {
            "python": platform.python_version(),
            "torch": metadata.version("torch"),
            "numpy": metadata.version("numpy"),
        },
    }


def scratch_path() -> Path:
    """The path of a result that is named by its time and not committed."""
    return Path("bench/results/scratch") / f"{datetime.now(UTC):%Y%m%d-%H%M%S}.json"


def write(
    result: Mapping[str, Any],
    out: Path,
    draw: Callable[[Path], object] | None = None,
    picture: Path | None = None,
) -> None:
    """Write a result file and its picture, and print their paths.

    Args:
        result: figures that JSON has, and ``environment``.
        out: path of the file.
        draw: draws the picture to a path; without matplotlib there is none.
        picture: path of the picture; if None, beside the file.
    """
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(result, indent=1) + "\n")
    if draw is None:
        print(f"wrote {out}")
        return
    picture = picture or out.with_suffix(".png")
    try:
        draw(picture)
    except ImportError:
        print(f"wrote {out}; install the extra `plot` for a picture of it")
    else:
        print(f"wrote {out} and {picture}")


def _gpu() -> dict[str, str]:
    """The name of the GPU; empty without a GPU."""
    import torch  # Imported late: the import takes seconds, and not every result needs torch.

    return {"gpu": torch.cuda.get_device_name()} if torch.cuda.is_available() else {}


def _processor() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()
