"""Text: read a program from its text; errors name the line."""

from __future__ import annotations

import re

from rvdcomm.errors import ProgramError
from rvdcomm.layout import MAX_RANKS, Box, Layout, View, dtype_name, parse_ranges
from rvdcomm.program.instructions import (
    UNKNOWN_BUFFER,
    UNKNOWN_PIECE,
    Buffer,
    Collective,
    Copy,
    Entry,
    Instruction,
    Message,
    Zero,
)
from rvdcomm.program.shards import DIMS, DST, SRC, Transition
from rvdcomm.text import integer, quoted

MAX_CHARS = 1 << 26
"""The most characters that a program's text may have."""

MAX_TEXT_BOXES = 1 << 20
"""The most boxes and lines in a program's text: about 400 MB in memory. An all-to-all of 512 ranks
has half as many. A ``Program`` that is built in Python has no limit."""


class TextReader:
    """Reads a program line by line; every error names the line.

    Memory and time are proportional to the text, even if it comes from an untrusted source: counts
    in the text are checked before anything of that size is allocated.
    """

    def __init__(self, text: str) -> None:
        self.num_boxes = text.count("\n")
        self.text = text
        self.lines: list[str] = []
        self.at = 0
        # The line that is being read; `at` is the next line.
        self.reading = 0

    def read(
        self,
    ) -> tuple[
        tuple[Transition, ...],
        str,
        tuple[Buffer, ...],
        tuple[Instruction, ...],
        tuple[int, ...] | None,
    ]:
        """The fields of a program: transitions, dtype, buffers, instructions and members.

        Raises:
            ProgramError: the text is not a program, or is too large; the message names the line.
        """
        try:
            self._check_text()
            self.lines = self.text.splitlines()
            name, is_part, some = self._after("program ").partition(" of ")
            dtype = dtype_name(name)
            members = parse_ranges(some) if is_part else None
            transitions = [self._transition(dtype)]
            while self.at < len(self.lines) and self.lines[self.at].startswith((SRC, DIMS)):
                transitions.append(self._transition(dtype))
            buffers, instructions = [], []
            while self.at < len(self.lines):
                word = self.lines[self.at].split(" ", 1)[0]
                if word == "buffer":
                    buffers.append(self._buffer())
                else:
                    instructions.append(self._instruction(word))
        except (ValueError, IndexError) as error:
            line = self.lines[self.reading] if self.reading < len(self.lines) else "the end"
            raise ProgramError(
                f"cannot parse program, line {self.reading + 1}: {line[:80]!r}: {error}"
            ) from None
        return tuple(transitions), dtype, tuple(buffers), tuple(instructions), members

    def _transition(self, dtype: str) -> Transition:
        has_view = self.at < len(self.lines) and self.lines[self.at].startswith(DIMS)
        view = View.parse(self._after(f"{DIMS} ")) if has_view else None
        src, src_dtype = self._side(SRC, dtype)
        dst, dst_dtype = self._side(DST, dtype)
        return Transition(src, dst, src_dtype, dst_dtype, view)

    def _side(self, side: str, dtype: str) -> tuple[Layout, str]:
        layout, _, own = self._after(f"{side} ").partition(" as ")
        return Layout.parse(layout), dtype_name(own or dtype)

    def _after(self, prefix: str) -> str:
        self.reading = self.at
        line = self.lines[self.at]
        if not line.startswith(prefix):
            raise ValueError(f"expected a line that starts with {quoted(prefix)}")
        self.at += 1
        return line.removeprefix(prefix)

    def _buffer(self) -> Buffer:
        head, _, pieces = self._after("buffer ").partition(":")
        name, word, rank = head.split(" ", 3)
        self._expect("rank", word)
        boxes = [Box.parse(piece) for piece in self._items(pieces)]
        return Buffer(name, integer(rank), tuple(boxes))

    def _instruction(self, word: str) -> Instruction:
        if word == "collective":
            return self._collective()
        head, _, entries = self._after(f"{word} ").partition(": ")
        if word == "zero":
            rank_word, rank, dst = head.split(" ", 3)
            self._expect("rank", rank_word)
            return Zero(integer(rank), dst, self._entries(entries))
        if word not in ("copy", "add"):
            raise ValueError("expected buffer, copy, add, zero or collective")
        rank_word, rank, *steps, src, dst = head.split(" ", 6)
        self._expect("rank", rank_word)
        src, is_remote, src_rank = src.partition("@")
        owner, step = integer(rank), 0
        if is_remote:
            owner = integer(src_rank)
            step_word, number = steps
            self._expect("step", step_word)
            step = integer(number)
        elif steps:
            raise ValueError("expected 'SRC DST:' after the rank")
        return Copy(word, integer(rank), src, dst, self._entries(entries), owner, step)

    def _collective(self) -> Collective:
        words = self._after("collective ").split(" ", 7)
        kind, step_word, step, ranks_word, group, src, dst = words
        self._expect("step ranks", f"{step_word} {ranks_word}")
        index = integer(step)
        # A group has one buffer name per rank on each side, so a short text cannot mean many ranks.
        ranks = parse_ranges(group, min(src.count(",") + 1, MAX_RANKS))
        names = tuple(src.split(",", len(ranks))), tuple(dst.split(",", len(ranks)))
        messages = []
        while self.at < len(self.lines) and self.lines[self.at].startswith("  "):
            head, _, entries = self._after("  ").partition(":")
            a, b = head.split("->", 2)
            messages.append(Message(integer(a), integer(b), self._entries(entries)))
        return Collective(kind, index, ranks, *names, tuple(messages))

    def _entries(self, text: str) -> tuple[Entry, ...]:
        entries = []
        for item in self._items(text):
            box, _, pieces = item.partition("@")
            src_piece, dst_piece = pieces.split(">", 2)
            entries.append(Entry(Box.parse(box), _piece(src_piece), _piece(dst_piece)))
        return tuple(entries)

    # --- limits ---------------------------------------------------------------------------------

    def _check_text(self) -> None:
        if len(self.text) > MAX_CHARS or self.num_boxes > MAX_TEXT_BOXES:
            raise ValueError(
                f"the text has {len(self.text)} characters in {self.num_boxes} lines; at most "
                f"{MAX_CHARS} and {MAX_TEXT_BOXES} are read"
            )
        if not (self.text.isascii() and self.text.replace("\n", "").isprintable()):
            odd = re.search(r"[^\n -~]", self.text)
            assert odd is not None
            self.reading = self.text.count("\n", 0, odd.start())
            self.lines = self.text.split("\n", self.reading + 1)
            raise ValueError(f"{odd[0]!r} is no printable ASCII character")

    def _items(self, text: str) -> list[str]:
        """The boxes or entries of a line, which are counted against the limit."""
        self.num_boxes += text.count(" ") + 1
        if self.num_boxes > MAX_TEXT_BOXES:
            raise ValueError(f"the text has more than {MAX_TEXT_BOXES} lines and boxes")
        return text.split()

    @staticmethod
    def _expect(word: str, found: str) -> None:
        if word != found:
            raise ValueError(f"expected {word!r}, got {quoted(found)}")


def _piece(text: str) -> int:
    return UNKNOWN_PIECE if text == UNKNOWN_BUFFER else integer(text)
