"""Draw: the picture of a plan, a network or trees as a file. matplotlib writes both formats."""

from __future__ import annotations

import io
from pathlib import Path as FilePath
from typing import Any

from rvdcomm import Network, Plan
from rvdcomm.synthesis import Forest
from rvdcomm.whole_file import write_whole

STYLE: list[Any] = [
    "default",
    {"svg.fonttype": "none", "svg.hashsalt": "rvdcomm", "hatch.linewidth": 1.6},
]
"""Overrides the user's matplotlibrc. Texts stay texts, and ids in an SVG are reproducible."""
PIXELS_PER_UNIT = 2
"""Resolution of a PNG; a unit of a picture is a point of matplotlib's."""


MAX_NODES = 200
"""Ranks and switches of a network's picture."""


class PictureError(ValueError):
    """A picture cannot be written as asked: an unknown kind of file, or matplotlib is missing."""


def svg(plan: Plan) -> str:
    """The picture of ``plan`` as an SVG document; equal plans give equal text.

    Every message is an element with the id ``message-STEP-SRC-DST``, every cell one with the id
    ``cell-STATE-RANK``.

    Raises:
        PictureError: matplotlib is not installed.
    """
    return _written(plan, "svg").decode()


def draw(subject: Plan | Network | Forest, file: str | FilePath) -> None:
    """Write the picture of ``subject`` to ``file``, whose name ends in ``.svg`` or ``.png``.

    A plan has a row per state and a column per rank. A cell shows the tensor, with the boxes that
    the rank holds in colour. Arrows between two rows are the messages of a step.

    In a network, ranks are circles and switches are boxes. A line is a wire there and a wire back,
    an arrow is a wire in one direction; each rate has a width and a colour.

    Of a forest, a few trees are shown side by side on their network: arrows are messages, a colour
    for each beat, and the root has a thick line.

    Raises:
        PictureError: the name ends otherwise, matplotlib is not installed, or a network has too
            many nodes to tell apart.
    """
    file = FilePath(file)
    if file.suffix not in (".svg", ".png"):
        raise PictureError(f"cannot draw to {str(file)!r}: use a name in .svg or .png.")
    write_whole(file, _written(subject, file.suffix[1:]))


def _written(subject: Plan | Network | Forest, kind: str) -> bytes:
    try:
        import matplotlib.style
    except ImportError:
        raise PictureError("a picture needs matplotlib: pip install 'rvdcomm[plot]'.") from None
    from rvdcomm.picture import nodes, scene, trees

    network = Network(subject.wires) if isinstance(subject, Forest) else subject
    if isinstance(network, Network) and len(network.nodes) > MAX_NODES:
        raise PictureError(
            f"a network of {len(network.nodes)} ranks and switches; a picture shows {MAX_NODES}."
        )
    # Without a date and a version, the same subject gives the same bytes.
    metadata = {"Date": None, "Creator": None} if kind == "svg" else {"Software": None}
    file = io.BytesIO()
    with matplotlib.style.context(STYLE):
        if isinstance(subject, Forest):
            figure = trees.figure_of(subject)
        elif isinstance(subject, Network):
            figure = nodes.figure_of(subject)
        else:
            figure = scene.figure_of(subject)
        figure.savefig(file, format=kind, dpi=72 * PIXELS_PER_UNIT, metadata=metadata)
    return file.getvalue()
