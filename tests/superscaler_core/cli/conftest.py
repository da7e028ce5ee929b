"""A command line that is run in this process, with what it prints."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from superscaler_core.cli.main import main


class Said:
    """The output and the exit status of a command line."""

    def __init__(self, words: Sequence[str], capsys: pytest.CaptureFixture[str]) -> None:
        self.status = main(words)
        self.out, self.err = capsys.readouterr()


Say = Callable[[Sequence[str]], Said]


@pytest.fixture
def say(capsys: pytest.CaptureFixture[str]) -> Say:
    return lambda words: Said(words, capsys)
