"""Reports of the tests about mutants, in processes that tests start too.

Every process imports it (``sitecustomize`` of the copied tree). An instrumented expression calls
``_reach(number)``, which notes the number with the test that runs.
"""

from __future__ import annotations

import builtins
import os
from pathlib import Path

_SEEN: set[tuple[int, str]] = set()


def _reach(number: int) -> bool:
    test = os.environ.get("PYTEST_CURRENT_TEST", "").removesuffix(")").rpartition(" (")[0]
    if (number, test) not in _SEEN:
        _SEEN.add((number, test))
        with (Path(os.environ["MUTANTS_REACH"])).open("a") as out:
            out.write(f"{number}\t{test}\n")
    return True


builtins._reach = _reach  # type: ignore[attr-defined]
