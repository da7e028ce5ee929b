"""WeightStore: the parameters that a rank stores, and the copies of them that its segments read."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial, reduce

import torch
from torch import Tensor, nn

import rvdcomm as rv
from superscaler_core.errors import PlanError
from superscaler_core.run.host import Host
from superscaler_core.run.moves import Brought, Moves, Shard, move_many, start_many
from superscaler_core.run.tables import Stored, SubTransfer, Tables, Weight, box_of
from superscaler_core.run.transport import Transport
from superscaler_core.run.versions import Versions


class WeightStore:
    """The parameters of one rank.

    A *stored* parameter is the tensor that the optimizer updates: this rank's box of a parameter,
    under its single-device name. A *copy* is what segments read, and where autograd leaves
    gradients. The two share memory where their box and dtype are the same. Gradients of copies in a
    narrower dtype are summed and reduced in the dtype of the stored parameter. A parameter stored
    on the host shares no memory with its copies; its gradients move to the host after they are
    reduced.

    Args:
        tables: tables of the rank's file.
        transport: moves copies and gradients.
        dtype: dtype of stored parameters (master weights); that of the model if None.
        device: where copies live, and stored parameters that are not on the host.
        host: the place of parameters that are stored on the host; a new ``Host`` if None.
        stored: the stored parameters of another program on this rank, which this one uses too.
    """

    def __init__(
        self,
        tables: Tables,
        transport: Transport,
        dtype: torch.dtype | None = None,
        device: torch.device | str = "cpu",
        host: Host | None = None,
        stored: Mapping[str, nn.Parameter] | None = None,
    ) -> None:
        if dtype is not None and not dtype.is_floating_point:
            raise PlanError(f"parameters are stored in a floating-point dtype, not in {dtype}.")
        self._tables, self._transport, self._dtype = tables, transport, dtype
        self._device, self.versions = device, Versions()
        self._host = host or Host(device)
        self.stored = {
            name: stored[name] if stored is not None else self._new(name, entry, device)
            for name, entry in tables.parameters.items()
            if entry.box is not None
        }
        self._copies: dict[str, Tensor] = {}
        resting = [n for n, w in tables.weights.items() if w.unit != "unshard"]
        for name, weight in tables.weights.items():
            if weight.box:
                self._copies[name] = self._made(name, weight)
                # At once, because all of them together are the whole model.
                self.drop([name] if weight.unit == "unshard" else [])
        self._wide: dict[str, Tensor] = {}
        self._totals: dict[str, Tensor] = {}
        self._landing: list[tuple[str, rv.Box, Tensor]] = []
        self._under_way: dict[tuple[str, str], Callable[[], Brought]] = {}
        self._read_here = [n for n in resting if all(x.is_idle for x in tables.weights[n].fetch)]
        self._unwindowed = [n for n, w in tables.weights.items() if not (w.unit or w.is_borrowed)]
        self._handed: dict[str, deque[list[tuple[rv.Box, Tensor]]]] = {
            n: deque() for n, w in tables.weights.items() if w.is_borrowed
        }
        self._unreduced = dict.fromkeys(self._unwindowed)
        self._shared = [n for n in self._copies if self._is_shared(tables.weights[n])]
        self._own = [n for n in resting if not self._is_shared(tables.weights[n])]
        self._rests = False

    def _new(self, name: str, entry: Stored, device: torch.device | str) -> nn.Parameter:
        """A stored parameter without values."""
        shape, dtype = entry.stored_shape, self.stored_dtype(name)
        if entry.on_host:
            shard = self._host.zeros(shape, dtype)
        else:
            shard = torch.zeros(shape, dtype=dtype, device=device)
        return nn.Parameter(shard, requires_grad=entry.is_trained)

    def check_given(self) -> None:
        """Refuse to train parameters that have never been given values.

        Raises:
            PlanError: every parameter stored here still has the values it was allocated with.
        """
        values = self.stored.values()
        if values and not any(value._version or value.any() for value in values):
            raise PlanError(
                "the parameters have no values yet: the model was captured on the meta device, or "
                "saved without weights; call load_state_dict, load or init_weights first."
            )

    def stored_dtype(self, parameter: str) -> torch.dtype:
        """The dtype in which a parameter is stored."""
        return self._dtype or _dtype(self._tables.parameters[parameter].dtype)

    @property
    def trained_dtype(self) -> torch.dtype:
        """The dtype that holds the stored dtypes of all trained parameters, of all ranks."""
        parameters = self._tables.parameters.items()
        dtypes = [self.stored_dtype(name) for name, entry in parameters if entry.is_trained]
        return reduce(torch.promote_types, dtypes) if dtypes else torch.get_default_dtype()

    def _made(self, name: str, weight: Weight) -> Tensor:
        """A copy without values, or one that shares memory with the stored parameter."""
        # Parameters that are read only under ``no_grad`` have no gradient, as in torch.
        dtype, is_trained = _dtype(weight.dtype), bool(weight.reduce)
        if self._is_shared(weight):
            # Unlike ``detach``, ``data`` does not tell autograd when the parameter is updated in
            # place: a backward may read a newer version than its forward (WeightRule.NEWEST).
            stored = self._tables.parameters[weight.name].boxed(self.stored[weight.name].data)
            return stored.requires_grad_(is_trained)
        assert weight.box is not None
        # What a unit gathers is dropped at once; filling it would take the memory of the model.
        make = torch.empty if weight.unit == "unshard" else torch.zeros
        copy = make(box_of(weight.box).shape, dtype=dtype, device=self._device)
        copy.requires_grad_(is_trained)
        if is_trained and dtype != self.stored_dtype(weight.name):
            hook = partial(self._widen, name)
            copy.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
        return copy

    def _is_shared(self, weight: Weight) -> bool:
        """Whether a copy shares memory with the stored parameter."""
        if weight.name not in self.stored or self._tables.parameters[weight.name].on_host:
            return False
        is_here = not weight.fetch and weight.unit != "unshard"
        return is_here and self.stored_dtype(weight.name) == _dtype(weight.dtype)

    def _widen(self, name: str, copy: Tensor) -> None:
        """Add the gradient of a copy to a sum in the dtype of the stored parameter."""
        grad, copy.grad = copy.grad, None
        assert grad is not None
        if name in self._wide:
            self._wide[name] += grad
        else:
            parameter = self._tables.weights[name].name
            self._wide[name] = grad.to(self.stored_dtype(parameter))

    def copy(self, name: str) -> Tensor:
        """The copy that segments read, in the version that they read now."""
        return self.versions.of(name, self._copies[name])

    def shard(self, parameter: str, dtype: torch.dtype | None = None) -> Shard | None:
        """This rank's stored shard of a parameter, on the device, in ``dtype`` if it is given."""
        entry = self._tables.parameters[parameter]
        if entry.box is None:
            return None
        value = entry.boxed(self.stored[parameter].data)
        value = value if dtype is None else value.to(dtype)
        if entry.on_host:
            value = self._host.to_device(value)()
        return value, box_of(entry.box)

    def whole(self, parameter: str, tensor: Tensor | None, dtype: torch.dtype) -> Tensor:
        """Gather a tensor that is stored in a parameter's boxes, such as an optimizer's state.

        Collective; the result is whole, on the CPU, in the dims of the model.

        Args:
            parameter: the parameter's name.
            tensor: this rank's box of the tensor; None if it stores nothing of the parameter.
            dtype: dtype of the tensor, the same on all ranks.
        """
        entry, shard = self._tables.parameters[parameter], None
        if tensor is not None:
            assert entry.box is not None
            value = entry.boxed(tensor.detach())
            shard = (self._host.to_device(value)() if entry.on_host else value), box_of(entry.box)
        sub_transfers = _sub_transfers_in(entry.whole, str(dtype).removeprefix("torch."))
        made = torch.empty(entry.shape, dtype=dtype)
        for _, box, piece in move_many(self._transport, {parameter: (sub_transfers, shard)}):
            made[box.slices_within(rv.Box.of_shape(entry.shape))] = piece.cpu()
        return entry.unpacked(made)

    # --- values ---------------------------------------------------------------------------------

    def begin(self) -> None:
        """Refresh the copies that are made from what this rank stores."""
        self.end_versions()
        self._follow()
        if self._rests:
            self._grow(self._own)
            self._rests = False
        self._unreduced = dict.fromkeys(self._unwindowed)
        self.fetch(self._read_here)

    def _follow(self) -> None:
        """Make shared copies again whose parameter got other memory (``parameter.data = ...``)."""
        for name in self._shared:
            weight = self._tables.weights[name]
            if self._copies[name].data_ptr() != self.stored[weight.name].data_ptr():
                self._copies[name] = self._made(name, weight)

    def rest(self) -> None:
        """Free the copies until the next step, while another program runs."""
        self.drop(self._own)
        self._rests = True

    def unshard(self, names: Sequence[str]) -> None:
        """Fill copies that an FSDP unit drops when it ends."""
        self._grow(names)
        self.fetch(names)

    def start_unshard(self, names: Sequence[str]) -> None:
        """Start to fill copies of an FSDP unit."""
        self.start_fetch(names)

    def wait_unshard(self, names: Sequence[str]) -> None:
        """Wait for a started gather, and fill the copies with its result."""
        self._grow(names)
        self.wait_fetch(names)

    def _grow(self, names: Iterable[str]) -> None:
        for name in names:
            copy = self._copies.get(name)
            if copy is not None:
                copy.untyped_storage().resize_(copy.numel() * copy.element_size())

    def drop(self, names: Iterable[str]) -> None:
        """Free the memory of copies; autograd keeps the tensors, which the next gather refills."""
        for name in names:
            copy = self._copies.get(name)
            if copy is not None:
                copy.untyped_storage().resize_(0)

    def fetch(self, names: Sequence[str]) -> None:
        """Update copies to the stored values, whichever ranks store these."""
        self._fill(move_many(self._transport, self._fetched(names)))
        self._fill_from_here(names)

    def start_fetch(self, names: Sequence[str]) -> None:
        """Start to update copies to the stored values."""
        wait = start_many(self._transport, self._fetched(names))
        self._under_way["fetch", names[0]] = wait

    def wait_fetch(self, names: Sequence[str]) -> None:
        """Wait for a started fetch, and fill the copies with its result."""
        self._fill(self._under_way.pop(("fetch", names[0]))())
        self._fill_from_here(names)

    def _fetched(self, names: Iterable[str]) -> Moves:
        weights = ((name, self._tables.weights[name]) for name in names)
        return {name: (w.fetch, self._value(w)) for name, w in weights if w.fetch}

    def _fill_from_here(self, names: Iterable[str]) -> None:
        """Fill copies whose values are stored on this rank."""
        for name in names:
            weight = self._tables.weights[name]
            if name in self._copies and not weight.fetch and not self._is_shared(weight):
                value = self._value(weight)
                assert value is not None, "it is read where it is stored"
                self._copies[name].data.copy_(value[0])

    def _fill(self, brought: Brought) -> None:
        for name, box, result in brought:
            held = self._tables.weights[name].box
            assert held is not None
            self._copies[name].data[box.slices_within(box_of(held))] = result

    def _value(self, weight: Weight) -> Shard | None:
        """The stored shard that a weight is a copy of, in the dtype in which it is read."""
        return self.shard(weight.name, _dtype(weight.dtype))

    # --- gradients ------------------------------------------------------------------------------

    def reduce(self, names: Sequence[str]) -> None:
        """Move gradients of copies to where the parameters are stored, and sum them there.

        Weights that were gathered are dropped.
        """
        self._add_up(move_many(self._transport, self._reduced(names)))
        self._drop_unsharded(names)

    def start_reduce(self, names: Sequence[str]) -> None:
        """Start to reduce gradients; weights that were gathered are dropped."""
        wait = start_many(self._transport, self._reduced(names))
        self._under_way["reduce", names[0]] = wait
        self._drop_unsharded(names)

    def _drop_unsharded(self, names: Sequence[str]) -> None:
        self.drop(name for name in names if self._tables.weights[name].unit == "unshard")

    def wait_reduce(self, names: Sequence[str]) -> None:
        """Wait for a started reduction, and add its result to the gradients."""
        self._add_up(self._under_way.pop(("reduce", names[0]))())

    def _reduced(self, names: Iterable[str]) -> Moves:
        """The moves of the gradients of copies; the gradients of the copies are cleared."""
        chosen = [name for name in names if self._tables.weights[name].reduce]
        moves = {name: (self._way_home(name), self._grad(name)) for name in chosen}
        for name in chosen:
            self._unreduced.pop(name, None)
            self._wide.pop(name, None)
            for copy in self._every(name):
                copy.grad = None
        return moves

    def _every(self, name: str) -> Iterable[Tensor]:
        """All versions of a copy; none if this rank does not read the weight."""
        copy = self._copies.get(name)
        return () if copy is None else self.versions.every(name, copy)

    def _add_up(self, brought: Brought) -> None:
        # Gradients that an earlier FSDP unit sent to the host have had the time since then to
        # arrive.
        if self._landing:
            self._settle()
        handed: dict[str, list[tuple[rv.Box, Tensor]]] = {}
        for name, box, result in brought:
            parameter = self._tables.weights[name].name
            if self._tables.weights[name].is_borrowed:
                handed.setdefault(name, []).append((box, result))
            elif self._tables.parameters[parameter].on_host:
                self._landing.append((parameter, box, self._host.to_host(result)))
            else:
                self._add(parameter, box, result)
        for name, results in handed.items():
            self._handed[name].append(results)

    def _settle(self) -> None:
        """Wait for copies to and from the host, and add the gradients that arrived there."""
        self._host.wait()
        for parameter, box, grad in self._landing:
            self._add(parameter, box, grad)
        self._landing.clear()

    def _way_home(self, name: str) -> tuple[SubTransfer, ...]:
        """The sub-transfers of a gradient, in the dtype in which it was summed."""
        weight = self._tables.weights[name]
        dtype = str(self.stored_dtype(weight.name)).removeprefix("torch.")
        return _sub_transfers_in(weight.reduce, dtype)

    def _grad(self, name: str) -> Shard | None:
        """The gradient that autograd left at all versions of a copy; zeros if there is none."""
        box = self._tables.weights[name].box
        if box is None:
            return None
        held = box_of(box)
        given = (copy.grad for copy in self._every(name))
        grads = [grad for grad in (self._wide.get(name), *given) if grad is not None]
        if grads:
            return reduce(torch.add, grads), held
        dtype = self.stored_dtype(self._tables.weights[name].name)
        return torch.zeros(held.shape, dtype=dtype, device=self._copies[name].device), held

    def _add(self, parameter: str, box: rv.Box, grad: Tensor) -> None:
        entry = self._tables.parameters[parameter]
        assert entry.box is not None
        held = box_of(entry.box)
        total = self._totals.get(parameter)
        if total is None and box == held:
            self._totals[parameter] = grad
            return
        if total is None:
            zeros = torch.zeros_like(self.stored[parameter].data)
            total = self._totals[parameter] = entry.boxed(zeros)
        total[box.slices_within(held)] += grad

    def settle(self, parameters: Sequence[str]) -> None:
        """Add gradients of parameters to the ``.grad`` that the optimizer reads.

        A gradient that no instruction reduces is complete on this rank, and is used as it is. Hooks
        of parameters see it here, once, as those of the leaves of a backward do; a parameter that
        was frozen meanwhile gets none.
        """
        mine, weights = set(parameters), self._tables.weights
        self.reduce([name for name in self._unreduced if weights[name].name in mine])
        self._settle()
        with torch.no_grad():
            for name in [name for name in self._totals if name in mine]:
                stored = self.stored[name]
                total = self._tables.parameters[name].unpacked(self._totals.pop(name))
                if stored.requires_grad:
                    accumulate(stored, total)

    # --- updates between microbatches -----------------------------------------------------------

    def update(self, parameters: Sequence[str], keeps: int, step: Callable[[], object]) -> None:
        """Make the next version of parameters, and keep earlier versions that are still read.

        Args:
            parameters: those of a stage; some may be stored on other ranks.
            keeps: number of versions that exist after the update.
            step: steps the optimizer.
        """
        mine = set(parameters)
        # A stage that borrows a weight may be some updates ahead: the k-th update takes its k-th
        # gradient.
        for name, waiting in self._handed.items():
            if waiting and self._tables.weights[name].name in mine:
                for box, grad in waiting.popleft():
                    self._add(self._tables.weights[name].name, box, grad)
        self.settle(parameters)
        # The next microbatches may give these weights gradients again.
        weights = self._tables.weights
        self._unreduced |= {n: None for n in self._unwindowed if weights[n].name in mine}
        copies = [name for name in self._copies if weights[name].name in mine]
        if keeps > 1:
            self._make_room(copies, keeps)
        step()
        for name in copies:
            self.versions.push(name, self._copies[name] if keeps > 1 else None)
            if keeps > 1:
                self._copies[name] = self._made(name, weights[name])
        self._fill_from_here(copies)

    def _make_room(self, copies: Iterable[str], keeps: int) -> None:
        """Move stored parameters that share memory with copies, so that the copies keep theirs."""
        moved = set[str]()
        for name in copies:
            spare, weight = self.versions.drop(name, keeps - 2), self._tables.weights[name]
            if self._is_shared(weight) and weight.name not in moved:
                if spare is not None:
                    spare = self._tables.parameters[weight.name].unpacked(spare)
                self.versions.move(weight.name, self.stored[weight.name], spare)
                moved.add(weight.name)

    def end_versions(self) -> None:
        """Keep only the newest version of each weight, in the memory that it had at the start."""
        moved = self.versions.end(self.stored.__getitem__)
        for name in self._shared if moved else ():
            if self._tables.weights[name].name in moved:
                self._copies[name] = self._made(name, self._tables.weights[name])

    def newest(self, first: Collection[str]) -> Iterable[tuple[str, Tensor, int]]:
        """All copies with the numbers of their newest versions, those in ``first`` first."""
        names = sorted(self._copies, key=lambda name: name not in first)
        return ((name, self._copies[name], self.versions.number(name)) for name in names)

    def check_done(self) -> None:
        """Check that a step waited for all that it started, and updated every trained parameter."""
        assert not self._under_way, "what was started was waited for"
        assert not self._totals, "what has a gradient is updated"
        assert not any(self._handed.values()), "what was handed over is updated"

    def forget(self) -> None:
        """The step has failed: drop its gradients that have not reached a parameter's ``.grad``."""
        for name in self._copies:
            for copy in self._every(name):
                copy.grad = None
        for kept in (self._wide, self._totals, self._landing, self._under_way):
            kept.clear()
        for waiting in self._handed.values():
            waiting.clear()


def accumulate(parameter: nn.Parameter, grad: Tensor) -> None:
    """Add a complete gradient to a parameter's ``.grad``, and call the parameter's hooks.

    Hooks of ``register_hook`` may replace the gradient; those of
    ``register_post_accumulate_grad_hook`` see the parameter with its ``.grad``, which an optimizer
    in them may step and clear. Called without gradients, like hooks in a backward.
    """
    for hook in [*(parameter._backward_hooks or {}).values()]:
        changed = hook(grad)
        grad = grad if changed is None else changed
    parameter.grad = grad if parameter.grad is None else parameter.grad + grad
    for hook in [*(getattr(parameter, "_post_accumulate_grad_hooks", None) or {}).values()]:
        hook(parameter)


@cache
def _sub_transfers_in(
    sub_transfers: tuple[SubTransfer, ...], dtype: str
) -> tuple[SubTransfer, ...]:
    return tuple(replace(sub_transfer, dtype=dtype) for sub_transfer in sub_transfers)


def _dtype(name: str) -> torch.dtype:
    found: torch.dtype = getattr(torch, name)
    return found
