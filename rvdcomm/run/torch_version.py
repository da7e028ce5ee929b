"""Torch version: a warning for releases of torch with which this package was not tried."""

from __future__ import annotations

import warnings

OLDEST, FIRST_UNTRIED = (2, 11), (2, 14)
"""As in pyproject.toml, which an installation without dependencies does not check."""


def warn_of_untried(version: str) -> None:
    """Warn, in one line, if this package was not tried with a version of torch.

    >>> warn_of_untried("2.13.0+cpu")
    """
    major, minor = version.split(".")[:2]
    if not OLDEST <= (int(major), int(minor)) < FIRST_UNTRIED:
        oldest, untried = (".".join(map(str, each)) for each in (OLDEST, FIRST_UNTRIED))
        warnings.warn(
            f"rvdcomm was not tried with torch {version}, of which it uses private names; "
            f'pip install "torch>={oldest},<{untried}".',
            stacklevel=2,
        )
