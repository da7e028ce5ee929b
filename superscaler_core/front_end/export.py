"""Export: the only file that uses ``torch.export``; it converts a module to plain records."""

from __future__ import annotations

import io
import itertools
import logging
import operator
import re
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr, suppress
from dataclasses import replace
from functools import partial
from traceback import walk_tb
from typing import Any

import torch
import torch.fx.config
from torch import Tensor, fx, nn
from torch.export.graph_signature import InputKind
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

from superscaler_core.errors import CaptureError
from superscaler_core.front_end.autocast import MARK, Autocast, entered, is_cast, marked_changes
from superscaler_core.front_end.checkpointed import CHECKPOINT, mark_checkpoints
from superscaler_core.front_end.composites import composed
from superscaler_core.front_end.definitions import definitions
from superscaler_core.front_end.dense import is_dense
from superscaler_core.front_end.effects import watched
from superscaler_core.front_end.functions import functions_as_ops
from superscaler_core.front_end.hooks import hooks_kept
from superscaler_core.front_end.model_call import ModelCall
from superscaler_core.front_end.modules import ModulesAsOps, UntraceableError
from superscaler_core.front_end.probe import NotOneOpError
from superscaler_core.front_end.user_line import line_of_error, line_of_trace
from superscaler_core.rules import aten
from superscaler_core.rules.aten import Runner, value_of
from superscaler_core.rules.calls import TARGET, TracedCall, recorded
from superscaler_core.rules.records import (
    Node,
    Ref,
    TracedProgram,
    TracedValue,
    mapped,
    place_of,
)
from superscaler_core.rules.table import has_rule, is_covered


def trace(model: nn.Module, call: ModelCall, *, lines: bool = False) -> TracedProgram:
    """Trace a forward pass; nothing is computed, so meta tensors suffice.

    The innermost module that tracing cannot follow becomes one op.

    Args:
        model: the model to trace.
        call: the arguments of the model.
        lines: whether to record the user's line behind every node, which costs a tenth of the time.

    Raises:
        CaptureError: tracing cannot follow the model.
    """
    mark_checkpoints()
    ops = ModulesAsOps(model)
    while True:
        try:
            with (
                recorded() as calls,
                functions_as_ops(),
                definitions(),
                ops.tracing(),
                marked_changes() as changes,
            ):
                exported = _exported(model, call, lines)
                return _Reader(exported, calls, call.autocasts, changes).program()
        except UntraceableError as error:
            ops.add(error)


def _exported(model: nn.Module, call: ModelCall, lines: bool) -> Any:
    refused: list[str] = []
    try:
        # Export warns of attributes that a forward sets; `State` checks these more exactly.
        with (
            warnings.catch_warnings(),
            watched(model, refused),
            hooks_kept(model),
            torch.enable_grad(),
            _stack_traces(lines),
            call.returning_loss(model),
            _quiet(),
            entered(call.autocasts),
        ):
            warnings.simplefilter("ignore")
            exported = torch.export.export(model, call.args, call.kwargs, strict=False)
    except Exception as error:
        raise _reason(model, error, refused) from None
    if refused:
        raise CaptureError(f"{type(model).__name__}: {refused[0]}.")
    return exported


@contextmanager
def _quiet() -> Iterator[None]:
    """Suppress torch's output if tracing fails: the graph so far, and warnings of its variables."""
    logger = logging.getLogger("torch.fx.experimental.symbolic_shapes")
    was_off, logger.disabled = logger.disabled, True
    try:
        with redirect_stderr(io.StringIO()) as said:
            yield
        sys.stderr.write(said.getvalue())
    finally:
        logger.disabled = was_off


@contextmanager
def _stack_traces(are_kept: bool) -> Iterator[None]:
    setting = "do_not_emit_stack_traces"  # versions of torch without this setting ignore it
    before = getattr(torch.fx.config, setting, False)
    setattr(torch.fx.config, setting, not are_kept)
    try:
        yield
    finally:
        setattr(torch.fx.config, setting, before)


class _Reader:
    """Reads one exported program; ``refs`` has the ref of each fx node's name.

    A block such as ``torch.no_grad()`` is a program in the program; its body is read in its place.
    ``calls`` are one op each, by their numbers in the program. ``autocasts`` are on at its start,
    and ``changes`` has those after each call of ``MARK``, by its number.
    """

    def __init__(
        self,
        exported: Any,
        calls: Sequence[TracedCall],
        autocasts: tuple[Autocast, ...],
        changes: Sequence[tuple[Autocast, ...]],
    ) -> None:
        self.exported, self.calls = exported, calls
        self.refs: dict[str, Any] = {}
        self.prefix = ""
        self.autocasts, self.changes = autocasts, changes
        self.checkpoint = 0
        self.checkpoints: dict[int, int] = {0: 0}
        modules = (m for m in exported.graph_module.modules() if isinstance(m, fx.GraphModule))
        self.writes = any(_writes(node) for module in modules for node in module.graph.nodes)

    def program(self) -> TracedProgram:
        module: fx.GraphModule = self.exported.graph_module
        found = {n.name: n for n in module.graph.nodes if n.op == "placeholder"}
        named: dict[InputKind, dict[str, str]] = {kind: {} for kind in InputKind}
        for spec in self.exported.graph_signature.input_specs:
            named[spec.kind][spec.arg.name] = spec.target or spec.arg.name
        values = ((name, found[name].meta["val"]) for name in named[InputKind.USER_INPUT])
        inputs = [(name, value_of(value)) for name, value in values if isinstance(value, Tensor)]
        self.refs |= {name: Ref(name) for name in found}
        # As nodes are read one after another, the number is that of the call around each.
        nodes = tuple(
            replace(node, checkpoint=self.checkpoint) if self.checkpoint else node
            for node in self._nodes(module, with_grad=True)
        )
        returned = next(n for n in module.graph.nodes if n.op == "output").args[0]
        constants = named[InputKind.CONSTANT_TENSOR].items()
        return TracedProgram(
            tuple(inputs),
            named[InputKind.PARAMETER],
            named[InputKind.BUFFER],
            {name: (target, self.exported.constants[target]) for name, target in constants},
            nodes,
            tuple(self.refs[n.name] for n in returned if isinstance(n, fx.Node)),
        )

    def _nodes(self, module: fx.GraphModule, with_grad: bool) -> Iterator[Node]:
        for node in module.graph.nodes:
            if node.op != "call_function":
                continue
            if node.target is operator.getitem:
                self.refs[node.name] = self.refs[node.args[0].name][node.args[1]]
            elif node.target is torch.ops.higher_order.wrap_with_set_grad_enabled:
                is_on, body, *args = node.args
                inner = getattr(module, str(body.target))
                yield from self._inlined(inner, node, args, bool(is_on))
            elif node.target is MARK:
                self.autocasts = self.changes[node.args[0]]
            elif node.target is CHECKPOINT:
                self.checkpoint = self.checkpoints.setdefault(node.args[0], len(self.checkpoints))
            elif str(node.target) == "aten._assert_tensor_metadata.default":
                continue  # a check that export inserts
            elif isinstance(node.target, torch._ops.OpOverload):
                made = self._node(node, with_grad)
                if parts := self._parts(node, made):
                    yield from parts
                    continue
                yield from (calls := self._casts(node, made))
                cast = {call.args["self"]: Ref(call.name) for call in calls}
                yield replace(made, args=mapped(made.args, partial(_other, cast)))
            else:
                raise _refused(
                    node,
                    "is no op; call what it does directly, or put it into a function under "
                    "@register_op.",
                    can_be_inside=True,
                )

    def _parts(self, node: fx.Node, made: Node) -> list[Node]:
        """The inner calls of a call without a rule, if each of them has a rule; else empty."""
        if has_rule(made) or self.autocasts or (inner := composed(node)) is None:
            return []
        refs, writes = dict(self.refs), self.writes
        self.writes = writes or any(map(_writes, inner.graph.nodes))
        parts = list(self._inlined(inner, node, node.all_input_nodes, made.with_grad))
        if all(map(is_covered, parts)):
            return parts
        self.refs, self.writes = refs, writes
        return []

    def _inlined(
        self, inner: fx.GraphModule, node: fx.Node, args: Sequence[Any], with_grad: bool
    ) -> Iterator[Node]:
        """The nodes of an inner program in place of a call, such as of ``torch.no_grad()``."""
        places = [n for n in inner.graph.nodes if n.op == "placeholder"]
        outside = dict(self.refs)
        self.refs |= {p.name: self._read(a) for p, a in zip(places, args, strict=True)}
        prefix, self.prefix = self.prefix, f"{self.prefix}{node.name}."
        yield from self._nodes(inner, with_grad)
        self.prefix = prefix
        returned = next(n for n in inner.graph.nodes if n.op == "output").args[0]
        results = self._read(returned)
        self.refs = outside | {node.name: results}

    def _node(self, node: fx.Node, with_grad: bool) -> Node:
        target: Any = node.target
        schema = target._schema.arguments
        positional = [a.name for a in schema if not a.kwarg_only]
        given = dict(zip(positional, node.args, strict=False)) | node.kwargs
        args = {a.name: self._read(given.get(a.name, a.default_value)) for a in schema}
        if isinstance(args.get("generator"), Ref):
            raise _refused(
                node,
                "draws from a torch.Generator of its own, whose state no program has; leave "
                "generator= out, so that the numbers come from the program's seed and step, or "
                "draw them before the step and pass them as an input.",
            )
        made = node.meta["val"]
        name, returns_list = self.prefix + node.name, isinstance(made, list | tuple)
        refs = (Ref(name, i) for i in itertools.count())
        # In a list, what is no tensor stays as it is.
        every = [next(refs) if isinstance(v, Tensor) else v for v in made] if returns_list else []
        self.refs[node.name] = every if returns_list else Ref(name)
        path, kind = _module(node)
        run: Callable[[Mapping[str, Any]], tuple[Any, ...]] = Runner(target)
        writes = _writes(node)
        if is_call := str(target.name()) == TARGET.replace(".", "::"):
            called = args["number"] = self.calls[args["number"]]
            run = called.by_name
        return Node(
            name=name,
            target=str(target),
            args=args,
            given=tuple((a.name, a.kwarg_only) for a in schema if a.name in given),
            outputs=self._outputs(node),
            module=path,
            module_type=kind,
            is_pointwise=torch.Tag.pointwise in target.tags,
            is_random=torch.Tag.nondeterministic_seeded in target.tags,
            writes=writes,
            shares=self._shares(node),
            returns_list=returns_list,
            with_grad=with_grad,
            is_passed_on=not (with_grad or writes or is_call) and _is_passed_on(node),
            run=run,
            line=_line(node),
        )

    def _casts(self, node: fx.Node, made: Node) -> list[Node]:
        """The casts of a call's arguments by the autocasts around it."""
        found: list[Node] = []
        given = {n.name: n.meta["val"] for n in node.all_input_nodes if _tensors(n)}
        for autocast in self.autocasts if given and made.outputs and not made.writes else ():
            dtype = self._dtype_of(autocast, node)
            for name, fake in given.items():
                if dtype is not None and is_cast(fake, dtype):
                    value = replace(value_of(fake), dtype=str(dtype).removeprefix("torch."))
                    args = {"self": self.refs[name], "dtype": dtype}
                    cast = f"{made.name}.cast{len(found)}"
                    call = aten.call(made, cast, "aten._to_copy.default", args, value)
                    found.append(replace(call, is_autocast=True))
        return found

    def _dtype_of(self, autocast: Autocast, node: fx.Node) -> torch.dtype | None:
        args, kwargs = _values(node)
        target: Any = node.target
        devices = {t.device.type for n in node.all_input_nodes for t in _tensors(n)}
        why = f"whose tensors are on {', '.join(sorted(devices))}"
        if devices <= {autocast.device}:
            why = "whose casts inside of it are not known"
            with suppress(LookupError):
                if target.namespace == "aten":
                    return autocast.cast_of(target, args, kwargs)
        raise _refused(
            node,
            f"runs under torch.autocast({autocast.device!r}), {why}; call it under "
            f"torch.autocast({autocast.device!r}, enabled=False) with arguments in the dtype that "
            "it is to compute in.",
        )

    def _shares(self, node: fx.Node) -> tuple[Ref | None, ...]:
        # A copy of a constant is traced as the constant itself.
        if not self.writes or str(node.target) == "aten.lift_fresh_copy.default":
            return (None,) * len(self._outputs(node))
        # The traced result has memory of its own even where torch returns the argument.
        if str(node.target) == "aten.dropout.default" and _is_passed_on(node):
            return (self._read(node.args[0]),)
        held = {t.untyped_storage()._cdata: n for n in node.all_input_nodes for t in _tensors(n)}
        nodes = [held.get(t.untyped_storage()._cdata) for t in _tensors(node)]
        nodes += [None] * (len(self._outputs(node)) - len(nodes))
        return tuple(self.refs[n.name] if n else None for n in nodes)

    def _outputs(self, node: fx.Node) -> tuple[TracedValue, ...]:
        fakes = node.meta["val"]
        made = fakes if isinstance(fakes, list | tuple) else [fakes]
        tensors = _tensors(node)
        numbers = [*made, *(size for tensor in tensors for size in tensor.shape)]
        if any(isinstance(n, torch.SymInt | torch.SymFloat | torch.SymBool) for n in numbers):
            raise _refused(
                node,
                "makes a number or a shape that depends on values; put what calls it into a "
                "function under @register_op.",
                can_be_inside=True,
            )
        if not all(map(is_dense, tensors)):
            raise _refused(
                node,
                "makes a sparse or nested tensor, which no plan can cut or move; put what makes "
                "and reads it into a function under @register_op.",
                can_be_inside=True,
            )
        if str(node.target) in _KEEPS_STATISTICS:
            written = {a.name: i for i, a in enumerate(node.target._schema.arguments)}  # type: ignore[union-attr]
            tensors += [node.args[written[name]].meta["val"] for name in _writes(node)]  # type: ignore[union-attr]
        return tuple(map(value_of, tensors))

    def _read(self, value: Any) -> Any:
        return mapped(value, lambda v: self.refs[v.name] if isinstance(v, fx.Node) else v)


def _other(others: Mapping[Ref, Ref], value: Any) -> Any:
    return others.get(value, value) if isinstance(value, Ref) else value


def _tensors(node: fx.Node) -> list[Tensor]:
    """The tensors that a node returns."""
    fakes = node.meta.get("val")
    found = fakes if isinstance(fakes, list | tuple) else [fakes]
    return [t for t in found if isinstance(t, Tensor)]


def _writes(node: fx.Node) -> dict[str, int]:
    """The arguments that a node modifies in place, each with the number of its result; -1: none."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return {}
    if keeps := _KEEPS_STATISTICS.get(str(node.target)):
        args = dict(zip((a.name for a in node.target._schema.arguments), node.args, strict=False))
        is_kept = args[keeps] and args["running_mean"] is not None
        return {"running_mean": 1, "running_var": 2} if is_kept else {}
    schema = node.target._schema
    returned = [a.alias_info and a.alias_info.before_set for a in schema.returns]
    return {
        a.name: returned.index(sets) if (sets := a.alias_info.before_set) in returned else -1
        for a in schema.arguments
        if a.alias_info and a.alias_info.is_write
    }


_KEEPS_STATISTICS = {
    "aten.batch_norm.default": "training",
    "aten.instance_norm.default": "use_input_stats",
}
"""Ops that write running statistics although their schemas do not say so, each with the argument
that enables it. Here the statistics are further results."""


def _is_passed_on(node: fx.Node) -> bool:
    """Whether torch returns an argument itself, so that the argument's gradient is kept."""
    args, keywords = _values(node)
    with torch.no_grad():
        result = node.target(*args, **keywords)  # type: ignore[operator]
    given = (tensor for other in node.all_input_nodes for tensor in _tensors(other))
    return any(result is tensor for tensor in given)


def _values(node: fx.Node) -> Any:
    """The arguments of a node by position and by name, without values."""
    return fx.map_arg((node.args, node.kwargs), lambda other: other.meta["val"])


def _module(node: fx.Node) -> tuple[str, str]:
    """Path and class of the innermost module; the ``@1`` of a second call is removed."""
    stack = node.meta.get("nn_module_stack") or {"": ("", "")}
    path, kind = list(stack.values())[-1]
    name = kind if isinstance(kind, str) else kind.__name__
    return re.sub(r"@\d+", "", path), name.rpartition(".")[2]


def _refused(node: fx.Node, why: str, *, can_be_inside: bool = False) -> CaptureError:
    """The error of a call; its module can be one op if the call ``can_be_inside`` of one."""
    target, (path, kind) = node.target, _module(node)
    is_op = isinstance(target, torch._ops.OpOverload)
    name = target if is_op else getattr(target, "__name__", target)
    text = f"{name} in {place_of(path, kind)} {why}{_line(node)}"
    error = UntraceableError(path, text) if can_be_inside else CaptureError(text)
    error.node = node.name
    return error


def _line(node: fx.Node) -> str:
    return line_of_trace(node.meta.get("stack_trace") or "")


def _control_flow(error: Exception) -> str:
    """The function of torch for branches and loops in which an error was raised; else empty."""
    for frame, _ in walk_tb(error.__traceback__):
        if str(frame.f_globals.get("__name__")).startswith("torch._higher_order_ops."):
            return frame.f_code.co_name
    return ""


def _reason(model: nn.Module, error: Exception, known: Sequence[str]) -> CaptureError:
    """Why tracing failed, in which module, and at which line of the user's code.

    The module is the last one whose code was running.
    """
    paths = {id(module): path for path, module in model.named_modules()}
    path = ""
    for frame, _ in walk_tb(error.__traceback__):
        path = paths.get(id(frame.f_locals.get("self"))) or path
    line = line_of_error(error.__traceback__)
    place = place_of(path, type(model.get_submodule(path)).__name__)
    if isinstance(error, NotOneOpError):
        return UntraceableError(error.path, f"It cannot be one op: {error}.", is_op=True)
    if known or isinstance(error, CaptureError):
        return CaptureError(f"{place}: {known[0] if known else error}".rstrip(".") + f".{line}")
    reason = next((text for text in str(error).splitlines() if text.strip()), repr(error)).strip()
    if control := _control_flow(error):
        why = (
            f"{place} calls torch.{control}, whose branches and bodies are not traced; compute "
            "both branches and choose by torch.where, write a loop of fixed length in Python, or "
            f"put it into a function under @register_op.{line}"
        )
        return UntraceableError(path, why)
    if isinstance(error, GuardOnDataDependentSymNode):
        reason = (
            "what it does depends on the values of tensors; put that into a function under "
            "@register_op."
        )
    why = f"tracing cannot follow {place}: {type(error).__name__}: {reason}{line}"
    return UntraceableError(path, why)
