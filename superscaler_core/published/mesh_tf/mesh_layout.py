"""MeshLayout: which named dims of a model are cut along which side of a mesh of devices.

The names and the form of the texts are those of Mesh-TensorFlow: ``batch:rows;hidden:cols`` on the
mesh ``rows:2,cols:2``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from superscaler_core.errors import PlanError
from superscaler_core.graph.blocks import Blocks
from superscaler_core.graph.dims import DimClass
from superscaler_core.plan import Plan
from superscaler_core.plan.mesh import Mesh


@dataclass(frozen=True, slots=True)
class MeshLayout:
    """Dims of a model by name, each with the side of a mesh along which it is cut.

    Law (tests/superscaler_core/published/mesh_tf/test_mesh_tf.py): ``MeshLayout.parse(str(x)) ==
    x``; equal layouts are equal objects, whatever the order in which their dims were given.

    >>> str(MeshLayout.parse("hidden:cols;batch:rows"))
    'batch:rows;hidden:cols'
    """

    dims: tuple[tuple[str, str], ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "dims", tuple(sorted(self.dims)))
        names = [name for name, _ in self.dims]
        if len(set(names)) < len(names):
            raise PlanError(f"layout {self}: every dim is cut along one side of the mesh at most.")

    @classmethod
    def parse(cls, text: str) -> MeshLayout:
        """Read pairs ``DIM:SIDE`` with semicolons between; an empty text cuts nothing.

        Raises:
            PlanError: the text has another form.
        """
        found = []
        for word in filter(None, (word.strip() for word in text.split(";"))):
            name, _, side = word.partition(":")
            if not (name.strip() and side.strip()):
                raise PlanError(
                    f"layout {text!r}: expected DIM:SIDE between semicolons, not {word!r}."
                )
            found.append((name.strip(), side.strip()))
        return cls(tuple(found))

    def along(self, side: str) -> tuple[str, ...]:
        """The dims that are cut along a side."""
        return tuple(name for name, its_side in self.dims if its_side == side)

    def __str__(self) -> str:
        return ";".join(f"{name}:{side}" for name, side in self.dims)


NAMES: Mapping[str, Callable[[Blocks], tuple[DimClass, ...]]] = {
    "batch": lambda blocks: (blocks.dims.batch,),
    "sequence": lambda blocks: blocks.tokens,
    "experts": lambda blocks: blocks.expert_dims,
    "vocabulary": lambda blocks: blocks.vocabulary,
    "heads": lambda blocks: tuple(dim for dim in blocks.inner if _is_of_attention(blocks, dim)),
    "hidden": lambda blocks: blocks.inner,
    "width": lambda blocks: blocks.width,
}
"""Names of dims, and where they are found in a model. Heads are the features inside attentions;
``hidden`` are other inner features, which one map makes and the next sums over; ``width`` are the
features between blocks."""


def named_dims(blocks: Blocks) -> dict[str, tuple[DimClass, ...]]:
    """The dims that a model has, by name; a dim has the first name that fits."""
    found: dict[str, tuple[DimClass, ...]] = {}
    taken: set[DimClass] = set()
    for name, search in NAMES.items():
        try:
            dims = tuple(dim for dim in search(blocks) if dim not in taken)
        except PlanError:
            continue
        if dims:
            found[name] = dims
            taken.update(dims)
    return found


def check_layout(plan: Plan, layout: MeshLayout, mesh: Mesh) -> None:
    """Check Mesh-TensorFlow's rules.

    Raises:
        PlanError: the mesh has another number of devices than the plan; the layout has a dim that
            the model lacks, or a side that the mesh lacks; two dims of one op, and so of what it
            reads or writes, are cut along one side; or a side does not divide a dim.
    """
    given = f"{plan.graph.name}: layout {layout} on mesh {mesh}"
    if mesh.num_devices != len(plan.devices):
        raise PlanError(f"{given}: the mesh has to be of the plan's {len(plan.devices)} devices.")
    dims = named_dims(plan.blocks)
    for name, side in layout.dims:
        if name not in dims or side not in mesh.sizes:
            has = ", ".join(f"{n} ({sizes_text(plan, dims[n])})" for n in dims)
            raise PlanError(
                f"{given}: {name}:{side} has to be DIM:SIDE; the model has the dims {has}, and the "
                f"mesh the sides {', '.join(mesh.sizes)}."
            )
    for op in plan.graph.ops:
        along: dict[str, str] = {}
        for name, side in layout.dims:
            loop = next((i for dim in dims[name] for i in plan.dims.ids(op, dim)), None)
            if loop is None:
                continue
            if (other := along.setdefault(side, name)) != name:
                raise PlanError(
                    f"{given}: {op.name} has both {other} and {name}, and two dims of one op "
                    f"cannot be cut along the same side {side}."
                )
            if op.sizes[loop] % mesh.sizes[side]:
                raise PlanError(
                    f"{given}: {name} is {op.sizes[loop]} in {op.name}, which {side}:"
                    f"{mesh.sizes[side]} does not divide."
                )


def sizes_text(plan: Plan, dims: tuple[DimClass, ...]) -> str:
    """The sizes of dims, such as ``4, 16``."""
    return ", ".join(map(str, sorted({size for dim in dims for size in plan.dims.sizes(dim)})))


def _is_of_attention(blocks: Blocks, dim: DimClass) -> bool:
    return any(blocks.dims.ids(op, dim) for ops in blocks.attention for op in ops)
