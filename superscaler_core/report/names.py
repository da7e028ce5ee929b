"""Names of layers with equal structure."""

from __future__ import annotations

import re

_NUMBER = re.compile(r"(?<=\.)\d+(?=[.:])")
_COPY = re.compile(r"@\d+$")


def pattern_of(name: str) -> str:
    """The name of a tensor or op without the numbers of modules and of copies of the model.

    >>> pattern_of("layers.12.attn.q.linear"), pattern_of("layers.3:add_2@1")
    ('layers.*.attn.q.linear', 'layers.*:add_2')
    """
    return _NUMBER.sub("*", _COPY.sub("", name))
