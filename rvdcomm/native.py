"""The choice of the native core: ``core`` is the extension module, or None.

The extension is for speed only: results do not depend on it. ``RVDCOMM_NATIVE=0`` leaves it out.
"""

from __future__ import annotations

import os
from typing import Any

core: Any = None
if os.environ.get("RVDCOMM_NATIVE") != "0":
    try:
        from rvdcomm import _C as core  # noqa: N811
    except ImportError:  # Not built: everything runs without it.
        core = None
