"""Shards: the caller's buffers in a program, and their boxes."""

from __future__ import annotations

from dataclasses import dataclass

from rvdcomm.layout import ITEM_BYTES, Box, Layout, View

SRC, DST = "src", "dst"
"""The caller's buffers: a rank's shards. In a program of several tensors: ``src2``, ``dst2``."""

DIMS = "dims"
"""The word before a view in a program's text."""


def shard_name(side: str, index: int, num_tensors: int) -> str:
    """The name of a caller's buffer.

    >>> shard_name("src", 0, 1), shard_name("dst", 2, 5)
    ('src', 'dst2')
    """
    return side if num_tensors == 1 else f"{side}{index}"


def is_src(name: str) -> bool:
    """Whether a buffer is a caller's shard that the program may only read."""
    return name.startswith(SRC)


def is_shard(name: str) -> bool:
    """Whether a buffer is one of the caller's; all other buffers are staging."""
    return name.startswith((SRC, DST))


def shard_index(name: str) -> int:
    """The index of the tensor that a caller's buffer is a shard of."""
    return int(name[len(SRC) :] or 0)


def lift(box: Box, index: int, num_dims: int) -> Box:
    """A box of tensor ``index`` as a box of all tensors of a program, which has ``num_dims`` dims.

    >>> str(lift(Box((1,), (3,)), 4, 3))
    '[4:5,1:3,0:1]'
    """
    rest = num_dims - 1 - len(box.lo)
    return Box((index, *box.lo, *(0,) * rest), (index + 1, *box.hi, *(1,) * rest))


@dataclass(frozen=True, slots=True)
class Transition:
    """One tensor of a program: its layouts and dtypes before and after.

    Boxes of the program are in ``view``, or in the dims of the tensor if None.
    """

    src: Layout
    dst: Layout
    src_dtype: str
    dst_dtype: str
    view: View | None = None

    def __post_init__(self) -> None:
        if self.view == View.whole(self.src.shape):
            object.__setattr__(self, "view", None)

    @property
    def num_dims(self) -> int:
        """Number of dims of the boxes."""
        return self.view.num_dims if self.view else len(self.src.shape)

    def box(self, name: str, rank: int) -> Box:
        """The shard of ``rank`` in the buffer ``name``, as a box of the program."""
        box = self.layout(name).cell(rank).box
        return self.view.box(box) if self.view else box

    def layout(self, name: str) -> Layout:
        """The layout of the buffer ``name``."""
        return self.src if is_src(name) else self.dst

    def dtype(self, name: str) -> str:
        """The dtype of the buffer ``name``."""
        return self.src_dtype if is_src(name) else self.dst_dtype

    def lines(self, dtype: str) -> list[str]:
        """The text form in a program of ``dtype``."""
        dims = [f"{DIMS} {self.view}"] if self.view else []
        return dims + [
            f"{side} {layout}" + (f" as {own}" if own != dtype else "")
            for side, layout, own in (
                (SRC, self.src, self.src_dtype),
                (DST, self.dst, self.dst_dtype),
            )
        ]


def wire_dtype(transition: Transition) -> str:
    """The dtype that is sent: the narrower of the two, or the wider one if parts are summed.

    With this rule no superfluous byte is sent, and values are rounded once, after they are summed.
    """
    dtypes = sorted((transition.src_dtype, transition.dst_dtype), key=ITEM_BYTES.__getitem__)
    return dtypes[-1] if transition.src.rvd.v > 1 else dtypes[0]
