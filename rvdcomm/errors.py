"""Errors, one class per party at fault: the caller, rvdcomm, or the network."""


class LayoutError(ValueError):
    """The caller asked for a layout or a transition that does not exist."""


class MemoryLimitError(LayoutError):
    """No plan fits ``memory_limit``; the message names the least memory that one needs."""


class ShapeMismatchError(ValueError):
    """A shard's shape, dtype or presence is not what its layout gives this rank."""


class CheckpointError(ValueError):
    """A checkpoint is damaged, incomplete, not writable, or not what the caller says it is."""


class ProgramError(Exception):
    """A verifier found an illegal program. This is a bug of rvdcomm: please report it."""


class CommError(RuntimeError):
    """A peer or the communication backend failed."""
