"""Verb: what an instruction does, and which values follow from that."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from superscaler_core.program.value import Role


class Verb(StrEnum):
    """What an instruction does; the value of a member is its spelling in texts."""

    FORWARD = "F"
    """Run a segment, and keep what its backward needs."""
    COMPUTE = "f"
    """Run a segment, and keep nothing."""
    HOLD = "hold"
    """Keep only the inputs of a segment, because its backward recomputes it."""
    RECOMPUTE = "R"
    """Recompute, before its backward, a segment that kept only its inputs."""
    BACKWARD = "B"
    """Compute the gradients of a segment's inputs and of its weights."""
    BACKWARD_INPUTS = "I"
    """Compute the gradients of a segment's inputs; keep what the gradients of its weights need."""
    BACKWARD_WEIGHTS = "W"
    """Compute the gradients of a segment's weights, after those of its inputs."""
    OFFLOAD = "offload"
    """Copy what a segment keeps for its backward to host memory."""
    RELOAD = "reload"
    """Copy it back to the device."""
    KEEP = "keep"
    """Keep the inputs of a region, which is recomputed as a whole before its backward."""
    RESUME = "resume"
    """Take the kept inputs of a region; the instructions after this recompute it."""
    MOVE = "move"
    """Move the value of an edge inside the stage."""
    MOVE_BACK = "move-back"
    """Move the gradient of that value back."""
    FETCH = "fetch"
    """Fetch the weights of a bucket to where they are read; they stay for the step."""
    UNSHARD = "unshard"
    """Gather the weights of an FSDP unit where they are read."""
    RESHARD = "reshard"
    """Drop the gathered weights of an FSDP unit."""
    REDUCE = "reduce"
    """Reduce the gradients of an FSDP unit's or bucket's weights to where the weights are stored.
    """
    LOSS = "loss"
    """Sum the losses of all microbatches; every device gets the sum."""
    SEND = "send"
    """Leave a value for its transfer to another stage or pass, or out of the program."""
    RECEIVE = "receive"
    """Take the value of such a transfer."""
    RECYCLED = "recycled"
    """Take the value of the pass before; zeros in the first pass."""
    SEND_BACK = "send-back"
    """Leave the gradient of a received value for its transfer back."""
    RECEIVE_BACK = "receive-back"
    """Take the gradient of a sent value."""
    UPDATE = "update"
    """Let the optimizer make the next version of a stage's weights, where they are stored."""


GOES_BACK = frozenset({Verb.BACKWARD, Verb.BACKWARD_INPUTS})
"""Kinds that compute gradients of a segment's inputs."""

COMPUTING = frozenset(
    {Verb.FORWARD, Verb.COMPUTE, Verb.RECOMPUTE, *GOES_BACK, Verb.BACKWARD_WEIGHTS}
)
"""Kinds that run a segment."""

OFFLOADS = frozenset({Verb.OFFLOAD, Verb.RELOAD})
"""Copies between a device and its host; they wait for no other communication."""

ALONE = COMPUTING | OFFLOADS | {Verb.HOLD, Verb.KEEP, Verb.RESUME}
"""Kinds that each device of an instruction does by itself, without waiting for the others."""

MOVES = frozenset({Verb.MOVE, Verb.MOVE_BACK})
"""Communication inside a stage, of a microbatch's values and gradients."""

OF_MICROBATCH = OFFLOADS | MOVES
"""Communication that belongs to one microbatch; all other communication is of weights."""

OF_WEIGHTS = frozenset({Verb.FETCH, Verb.UNSHARD, Verb.RESHARD, Verb.REDUCE})
"""Communication of weights in a stage's block, done once for both halves of a microbatch."""


IN_PHASES = OF_MICROBATCH | {Verb.FETCH, Verb.UNSHARD, Verb.REDUCE}
"""Communication that may be started in the background."""

BETWEEN = frozenset({Verb.SEND, Verb.RECEIVE, Verb.RECYCLED, Verb.SEND_BACK, Verb.RECEIVE_BACK})
"""What a stage leaves for transfers to other stages, and takes from them."""


class Phase(StrEnum):
    """Which part of a communication an instruction is; the value is its spelling in texts."""

    WHOLE = ""
    """Start it, and wait until it is done."""
    START = "start"
    """Start it in the background."""
    WAIT = "wait"
    """Wait until the started communication is done."""


# --- values that follow from the kind -----------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Own:
    """Values that have the name of their instruction, by roles; and what it frees.

    Attributes:
        reads, writes: roles of its own values.
        frees: roles of the values among all that it reads which it frees.
    """

    reads: tuple[Role, ...] = ()
    writes: tuple[Role, ...] = ()
    frees: frozenset[Role] = frozenset()


def _own(reads: Role | None = None, writes: Role | None = None, *frees: Role) -> Own:
    taken = () if reads is None else (reads,)
    return Own(taken, () if writes is None else (writes,), frozenset((*taken, *frees)))


OWN: Mapping[Verb, Own] = {
    Verb.FORWARD: _own(None, Role.KEPT),
    Verb.COMPUTE: _own(),
    Verb.HOLD: _own(None, Role.KEPT),
    Verb.RECOMPUTE: Own((Role.KEPT,)),
    Verb.BACKWARD: _own(Role.KEPT),
    Verb.BACKWARD_INPUTS: _own(Role.KEPT, Role.HALF),
    Verb.BACKWARD_WEIGHTS: _own(Role.HALF),
    Verb.OFFLOAD: _own(Role.KEPT, Role.HOST),
    Verb.RELOAD: _own(Role.HOST, Role.KEPT),
    Verb.KEEP: _own(None, Role.KEPT),
    Verb.RESUME: _own(Role.KEPT),
    Verb.MOVE: _own(),
    Verb.MOVE_BACK: _own(),
    Verb.SEND: _own(None, Role.OUT),
    Verb.SEND_BACK: _own(None, Role.OUT_BACK),
    Verb.RECEIVE: _own(Role.SENT, Role.ARRIVED),
    Verb.RECYCLED: _own(Role.SENT, Role.ARRIVED),
    Verb.RECEIVE_BACK: _own(Role.SENT_BACK),
    Verb.FETCH: _own(),
    Verb.UNSHARD: _own(),
    Verb.RESHARD: _own(None, None, Role.COPY),
    Verb.REDUCE: _own(None, None, Role.SUM, Role.COPY),
    Verb.LOSS: _own(None, Role.TOTAL, Role.LOSS),
    Verb.UPDATE: _own(None, Role.VERSION, Role.SUM, Role.STORED, Role.COPY),
}
"""For each kind, its own values."""
