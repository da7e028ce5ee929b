"""Dry run: the generated functions of a stage run on tensors without data, to measure memory.

The ordinary run time runs them on torch's meta device. So the memory, and how long it is held, is
that of generated code and autograd; only weights, inputs and communication are replaced.
"""

from __future__ import annotations

import importlib
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from functools import cached_property, partial
from types import ModuleType
from typing import Any, cast
from weakref import WeakMethod

import torch
import torch.nn.functional as F  # noqa: N812 - as everybody writes it
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

import rvdcomm as rv
from superscaler_core import ops
from superscaler_core.codegen.names import Names
from superscaler_core.codegen.stage_writer import STAGE_FUNCTIONS, StageWriter
from superscaler_core.graph.tensor import ITEM_BYTES
from superscaler_core.memory.fused_attention import FusedAttention
from superscaler_core.memory.moments import Meter
from superscaler_core.memory.played_tape import PlayedTape
from superscaler_core.memory.stage_form import stored_name
from superscaler_core.memory.stored import StoredMemory
from superscaler_core.plan import Device
from superscaler_core.plan.savings import Window
from superscaler_core.program.edges import Edge
from superscaler_core.program.materialized import Materialized
from superscaler_core.program.segments import Segment
from superscaler_core.program.transfer import Transfer
from superscaler_core.program.verb import Verb
from superscaler_core.program.weights import Use
from superscaler_core.run.host import Arrival, Host
from superscaler_core.run.segment_runner import SegmentRunner
from superscaler_core.run.tape import SegmentFunction
from superscaler_core.schedules import ActionKind

_SEED = 0
"""Seed of dropout, which draws nothing here."""


class DryRun(SegmentRunner):
    """Provides the calls of one stage's functions on one device, without data.

    Args:
        made: the plan.
        stage, device: the stage and the device.
        master_dtype: dtype of stored parameters; the model's if None.
    """

    def __init__(
        self,
        made: Materialized,
        stage: int,
        device: Device,
        master_dtype: str | None = None,
    ) -> None:
        # Otherwise torch imports this inside the first operator whose shapes it computes in Python,
        # and the frames of the import keep that operator's callers and their tensors alive.
        importlib.import_module("torch._dynamo")
        self.meter = Meter()
        self._made, self._stage, self._here = made, stage, device
        self._stored = StoredMemory(made, master_dtype)
        writer = StageWriter(made, stage, device, Names())
        in_halves = {
            made.subject(instruction)
            for block in made.stages[stage].order
            for instruction in made.block(stage, block)
            if instruction.kind is Verb.BACKWARD_INPUTS
        }
        self._module = _module_of(writer, f"dry_{stage}_{device}", in_halves)
        self._edges = {edge.name: edge for edge in made.edges.all}
        self._uses = {use.name: use for use in made.weights.uses}
        self._weights: dict[str, Tensor] = {}
        self._trained: dict[int, Use] = {}
        self._arriving: dict[str, int] = {}
        self._moving: defaultdict[tuple[str, bool], deque[tuple[Any, Any]]] = defaultdict(deque)
        self._open: set[str] = set()
        host, add_grad = _Elsewhere(self.meter), partial(_call, WeakMethod(self._add_played_grad))
        recomputed = [segment.name for segment in writer.segments if segment.recompute]
        swapped = [segment.name for segment in writer.segments if segment.swap]
        tape = PlayedTape(recomputed, swapped, host, self.meter, _form_of, add_grad)
        super().__init__(tape)
        self.loss_grad = self._outside((), made.plan.graph.loss.dtype)

    def run(self, kind: ActionKind) -> Meter:
        """Run the stage for a microbatch whose earlier runs are done."""
        self._with_grad, self._run = kind is not ActionKind.TURN, kind
        self._is_back = kind.goes_back or kind is ActionKind.WEIGHTS
        self.meter.start()
        with torch.enable_grad(), FusedAttention(), self.meter:
            getattr(self._module, f"stage{self._stage}_{STAGE_FUNCTIONS[kind]}")(self, 0)
        self.meter.step(None)
        return self.meter

    @property
    def parcel_bytes(self) -> Mapping[str, int]:
        """The bytes on the host of each swapped segment."""
        return self._tape.parcel_bytes(0)

    # --- arguments of segments ------------------------------------------------------------------

    def input(self, key: str, mb: int) -> Tensor:
        name, box = self._made.sources.boxes_on(self._here)[key]
        (tensor,) = (t for t in self._made.plan.graph.inputs if t.name == name)
        return self._outside(rv.Box.parse(box).shape, tensor.dtype)

    def constant(self, name: str) -> Tensor:
        if name not in self._weights:
            (tensor,) = {t for op in self._made.plan.graph.ops for t in op.inputs if t.name == name}
            self._weights[name] = self._outside(tensor.shape, tensor.dtype)
        return self._weights[name]

    def state(self, name: str, mb: int) -> Tensor:
        return self.constant(name)

    def keep_state(self, name: str, value: Tensor) -> None:
        """Ignore the value, which replaces an old value of the same size."""

    def use(self, name: str) -> Tensor:
        if name not in self._weights:
            use = self._uses[name]
            shape = use.side.shards[self._here].box.shape
            weight = self._outside(shape, use.tensor.dtype)
            if use.is_trained:
                weight.requires_grad_()
                # The graph of a forward holds the weight and the hook, where the garbage collector
                # does not see them: if the hook held this object, both would stay for ever.
                hook = partial(_call, WeakMethod(self._add_grad), use)
                self._trained[id(weight)] = use
                weight.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
            self._weights[name] = weight
        return self._weights[name]

    def _outside(self, shape: Sequence[int], dtype: str) -> Tensor:
        """A tensor whose memory is counted elsewhere, or not at all."""
        # Otherwise it would be counted when it is allocated.
        with _disable_current_modes():
            tensor = torch.empty(tuple(shape), dtype=getattr(torch, dtype), device="meta")
        self.meter.ignore([tensor])
        return tensor

    # --- weights --------------------------------------------------------------------------------

    def _add_grad(self, use: Use, weight: Tensor) -> None:
        """Count a gradient that autograd made as accumulated, or as one of an open window."""
        size = weight.numel() * self._stored_item_bytes(use)
        grads = self.meter.staying if use.window is None else self.meter.passing
        grads[use.name] = size
        if self._stored_item_bytes(use) != weight.element_size():
            self.meter.look()
        weight.grad = None

    def _add_played_grad(self, weight: Tensor) -> None:
        self._add_grad(self._trained[id(weight)], weight)

    def _stored_item_bytes(self, use: Use) -> int:
        return ITEM_BYTES[self._stored.master_dtype or use.tensor.dtype]

    def gather(self, names: Sequence[str]) -> None:
        self._begin_window(names, opens=not self._is_back)
        self._open_window(names)
        # Arriving weights are copied to where they are read.
        self._wait(self._gathered_bytes(names))

    def start_gather(self, names: Sequence[str]) -> None:
        size = self._gathered_bytes(names)
        self._arriving[names[0]] = size
        self.meter.buffers += size
        self.meter.look()

    def wait_gather(self, names: Sequence[str]) -> None:
        self._begin_window(names, opens=not self._is_back)
        self._open_window(names)
        self.meter.look()
        self.meter.buffers -= self._arriving.pop(names[0])

    def _open_window(self, names: Sequence[str]) -> None:
        self._open.add(names[0])
        self.meter.opened += sum(self._copy_bytes(self._uses[name]) for name in names)

    def _gathered_bytes(self, names: Sequence[str]) -> int:
        """The bytes that arrive, and the bytes that are first copied from the host."""
        uses = [self._uses[name] for name in names]
        passing = (self._stored.passing_bytes(use, self._here) for use in uses)
        return sum(map(self._copy_bytes, uses)) + sum(passing)

    def _wait(self, num_bytes: int) -> None:
        """Record the moment at which communication holds this many bytes."""
        self.meter.buffers += num_bytes
        self.meter.look()
        self.meter.buffers -= num_bytes

    def drop(self, names: Sequence[str]) -> None:
        # A backward of inputs (I) drops a window at the step that opens it in the forward; other
        # runs drop it at the step that closes it.
        self._begin_window(names, opens=self._run is ActionKind.INPUTS)
        self._open.discard(names[0])
        self.meter.opened -= sum(self._copy_bytes(self._uses[name]) for name in names)

    def _copy_bytes(self, use: Use) -> int:
        shard = use.side.shards.get(self._here)
        return 0 if shard is None else shard.box.num_elements * ITEM_BYTES[use.tensor.dtype]

    def reduce(self, names: Sequence[str]) -> None:
        self._begin_window(names, opens=True)
        uses = [self._uses[name] for name in names]
        self._wait(sum(self._reduced_bytes(use) for use in uses))
        self._end_reduction(uses)
        self._drop_gathered(names)

    def start_reduce(self, names: Sequence[str]) -> None:
        uses = [self._uses[name] for name in names]
        if uses[0].window is None:
            return  # Gradients outside windows are counted at the step's end.
        self._begin_window(names, opens=True)
        self._arriving[names[0]] = size = sum(self._reduced_bytes(use) for use in uses)
        self.meter.buffers += size
        self.meter.look()
        self._drop_gathered(names)

    def wait_reduce(self, names: Sequence[str]) -> None:
        if names[0] in self._arriving:
            self.meter.buffers -= self._arriving.pop(names[0])
            self._end_reduction([self._uses[name] for name in names])

    def start_fetch(self, names: Sequence[str]) -> None:
        """Counted at the step's start."""

    fetch = wait_fetch = start_fetch

    def _end_reduction(self, uses: Iterable[Use]) -> None:
        """Move the gradients to where they are stored, and free them where they were."""
        for use in uses:
            self.meter.passing.pop(use.name, None)
            if use.reduce and use.tensor.name not in self._made.plan.on_host:
                self.meter.staying[stored_name(use.tensor)] = self._reduced_bytes(use)

    def _drop_gathered(self, names: Sequence[str]) -> None:
        if names[0] in self._open:
            self._open.remove(names[0])
            self.meter.opened -= sum(self._copy_bytes(self._uses[name]) for name in names)

    def _begin_window(self, names: Sequence[str], *, opens: bool) -> None:
        window = self._uses[names[0]].window
        assert window is not None
        self.meter.step(window_step(window, opens=opens))

    def _reduced_bytes(self, use: Use) -> int:
        """Bytes of a gradient where it is stored; 0 if it is not trained."""
        if not use.reduce:
            return 0
        shard = use.storage.shards.get(self._here)
        return 0 if shard is None else shard.box.num_elements * self._stored_item_bytes(use)

    # --- segments -------------------------------------------------------------------------------

    def _rng(self, mb: int) -> int:
        return _SEED

    def _begin(self, segment: SegmentFunction) -> None:
        self.meter.step(segment.__name__)

    def add_loss(self, loss: Tensor) -> None:
        """Ignore the loss, whose sum is a single number."""

    # --- communication --------------------------------------------------------------------------

    def move(self, name: str, shard: Tensor | None) -> Any:
        edge = self._edges[name]
        self.meter.step(name)
        return self._moved(edge.forward, shard, edge.src, edge.dst, edge)

    def move_back(self, name: str, grad: Tensor | None) -> Any:
        edge = self._edges[name]
        self.meter.step(name)
        if grad is None:
            grad = self._made_for(edge.dst, edge)
        return self._moved(edge.backward, grad, edge.dst, edge.src, edge)

    def start_move(self, name: str, shard: Tensor | None) -> None:
        # The sent value is held until it has left, together with the arriving one.
        self._moving[name, False].append((shard, self.move(name, shard)))

    def wait_move(self, name: str) -> Any:
        self.meter.step(name)
        return self._moving[name, False].popleft()[1]

    def start_move_back(self, name: str, grad: Tensor | None) -> None:
        self._moving[name, True].append((grad, self.move_back(name, grad)))

    def wait_move_back(self, name: str) -> Any:
        self.meter.step(name)
        return self._moving[name, True].popleft()[1]

    def _moved(
        self, legs: Sequence[Transfer], shard: Tensor | None, src: Any, dst: Any, edge: Edge
    ) -> Tensor | None:
        if len(legs) == 1 and legs[0].is_idle and self._here in dst.shards:
            assert shard is not None, "nothing moves, so it is here"
            box = dst.shards[self._here].box
            return shard[box.slices_within(src.shards[self._here].box)]
        pieces = [
            torch.empty(leg.dst.cell(self._here).box.shape, dtype=_dtype(edge), device="meta")
            for leg in legs
            if len(legs) > 1 and self._here in leg.dst and not leg.is_idle
        ]
        result = self._made_for(dst, edge)
        del pieces
        return result

    def _made_for(self, side: Any, edge: Edge) -> Tensor | None:
        shard = side.shards.get(self._here)
        if shard is None:
            return None
        return torch.empty(shard.box.shape, dtype=_dtype(edge), device="meta")

    # --- between stages and turns ---------------------------------------------------------------

    def send(self, name: str, mb: int, shard: Tensor | None) -> None:
        self.meter.look()

    def receive(self, name: str, mb: int) -> Any:
        edge = self._edges[name]
        return self._brought(edge.forward, edge.src, edge.dst, edge)

    def recycle(self, name: str, mb: int, shard: Tensor | None) -> None:
        self.meter.look()

    def result(self, name: str, mb: int, shard: Tensor | None) -> None:
        self.meter.look()

    def recycled(self, name: str, mb: int) -> Any:
        return self.receive(name, mb)

    def send_grad(self, name: str, mb: int, grad: Tensor | None) -> None:
        self.meter.look()

    def receive_grad(self, name: str, mb: int) -> Any:
        edge = self._edges[name]
        return self._brought(edge.backward, edge.dst, edge.src, edge)

    def _brought(self, legs: Sequence[Transfer], src: Any, dst: Any, edge: Edge) -> Tensor | None:
        result = self._made_for(dst, edge)
        # A value that this device sent to itself is counted where it was made.
        if result is not None and self._here in src.shards and all(leg.is_idle for leg in legs):
            self.meter.ignore([result])
        return result


def _call(method: WeakMethod[Callable[..., None]], *args: Any) -> None:
    living = method()
    if living is not None:
        living(*args)


def window_step(window: Window, *, opens: bool) -> str:
    """The name of the step at which a window opens, or closes, in the forward."""
    return f"{'open' if opens else 'close'} {window.ops[0].name}"


class _Elsewhere(Host):
    """A host whose memory is not counted."""

    def __init__(self, meter: Meter) -> None:
        super().__init__("meta")
        self._meter = meter

    def to_host(self, x: Tensor) -> Tensor:
        self._meter.is_paused = True
        copy = torch.empty_like(x)
        self._meter.is_paused = False
        self._meter.host.count([copy])
        return copy

    def to_device(self, x: Tensor) -> Arrival:
        copy = torch.empty_like(x)
        return lambda: copy


class _Segment:
    """A segment's function, which is generated when it is first called."""

    def __init__(
        self, segment: Segment, writer: StageWriter, scope: dict[str, Any], is_whole: bool
    ) -> None:
        self.__name__ = segment.name
        self._segment, self._writer, self._scope = segment, writer, scope
        self._is_whole = is_whole

    @cached_property
    def form(self) -> Hashable:
        """See ``StageWriter.segment_form``; None if the segment is swapped or run in halves."""
        return self._writer.segment_form(self._segment) if self._is_whole else None

    @cached_property
    def _function(self) -> SegmentFunction:
        scope = dict(self._scope)
        exec(self._writer.segment_function(self._segment), scope)
        return cast(SegmentFunction, scope[self.__name__])

    def __call__(self, *args: Any) -> tuple[Tensor, ...]:
        return self._function(*args)


def _form_of(segment: SegmentFunction) -> Hashable:
    assert isinstance(segment, _Segment)
    return segment.form


def _module_of(writer: StageWriter, name: str, in_halves: Collection[Segment]) -> ModuleType:
    """The module with the stage's functions; the backward of some segments is run in halves."""
    module = ModuleType(name)
    module.__dict__.update(torch=torch, F=F, ops=ops)
    parts = (part for segment in writer.segments for part in segment.parts)
    for path in {path for part in parts for path in part.op.imports}:
        importlib.import_module(path)
        root = path.partition(".")[0]
        setattr(module, root, importlib.import_module(root))
    scope = dict(module.__dict__)
    for segment in writer.segments:
        is_whole = not segment.swap and segment not in in_halves
        setattr(module, segment.name, _Segment(segment, writer, scope, is_whole))
    exec("\n\n".join(writer.stage_functions()), module.__dict__)
    return module


def _dtype(edge: Edge) -> torch.dtype:
    found: torch.dtype = getattr(torch, edge.tensor.dtype)
    return found
