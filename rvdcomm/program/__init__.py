"""Programs: the instructions of all ranks as values, their text, and lowering from a path."""

from rvdcomm.program.arena import ALIGN_BYTES, Arena, aligned
from rvdcomm.program.domains import SharedDomains, together
from rvdcomm.program.instructions import (
    NO_BUFFER,
    Buffer,
    BufferKey,
    Collective,
    Copy,
    Entry,
    Instruction,
    Message,
    Zero,
)
from rvdcomm.program.lower import lanes
from rvdcomm.program.program import Program
from rvdcomm.program.shards import (
    DST,
    SRC,
    Transition,
    is_shard,
    is_src,
    shard_index,
    wire_dtype,
)
from rvdcomm.program.text import MAX_CHARS, MAX_TEXT_BOXES
from rvdcomm.program.verify import MAX_SYMBOLS, Proof, verify

__all__ = [
    "ALIGN_BYTES",
    "DST",
    "MAX_CHARS",
    "MAX_SYMBOLS",
    "MAX_TEXT_BOXES",
    "NO_BUFFER",
    "SRC",
    "Arena",
    "Buffer",
    "BufferKey",
    "Collective",
    "Copy",
    "Entry",
    "Instruction",
    "Message",
    "Program",
    "Proof",
    "SharedDomains",
    "Transition",
    "Zero",
    "aligned",
    "is_shard",
    "is_src",
    "lanes",
    "shard_index",
    "together",
    "verify",
    "wire_dtype",
]
