"""Arguments: options that all commands share, and the program that they describe."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from textwrap import fill
from typing import Any

import torch
from torch import Tensor

import rvdcomm as rv
from rvdcomm.cli import UsageError, named_network, num_bytes
from superscaler_core.cli.errors import USER_ERRORS
from superscaler_core.cli.progress import phase
from superscaler_core.cli.sources import MadeModel, Source, model_source, plan_source, settings_of
from superscaler_core.compiled import Compiled, compile
from superscaler_core.front_end import capture
from superscaler_core.graph.graph import Graph
from superscaler_core.levels import levels_of
from superscaler_core.memory import STATES
from superscaler_core.models import MODELS
from superscaler_core.plan import Overlap, Plan
from superscaler_core.plan.overlap import BUCKET_BYTES
from superscaler_core.plans import PLANS
from superscaler_core.plans.option_texts import parse_plan
from superscaler_core.precision import Precision

MICROBATCH = 4
"""Samples in a microbatch, if neither --microbatch nor the plan says how many."""

DTYPES = ("float16", "bfloat16", "float32", "float64")


def _names(title: str, names: Iterable[str], more: str) -> str:
    text = f"{', '.join(names)}; or path/to/file.py:function, {more}"
    return fill(text, 98, initial_indent=f"{title:<8}", subsequent_indent=" " * 8) + "\n"


MODEL_NAMES = _names(
    "MODEL", MODELS,
    "which returns (module, example_inputs), a tuple or dict of inputs; may take 'batch'",
)  # fmt: skip
NAMES = MODEL_NAMES + _names(
    "PLAN", PLANS,
    "which takes the plan; or FILE.plan, which 'plan --decisions' wrote; a plan's options may "
    "follow its name: hybrid:tp=2,pp=2; or a name of search's table, such as "
    "'hybrid dp=2 tp=2 pp=1 samples=4 zero=1'",
)  # fmt: skip


def add_program(parser: argparse.ArgumentParser) -> None:
    """Add the options that choose the model, the plan and the devices."""
    parser.add_argument("model", metavar="MODEL", help="what to train: see below")
    parser.add_argument("plan", metavar="PLAN", help="how to parallelize it: see below")
    add_training(
        parser,
        "default: all of --topology; or 1, or as many as torchrun has started",
        "a size of the model or an option of the plan; write 'model.NAME' or 'plan.NAME' if "
        "both have it; may be given several times; every plan takes block, features, experts and "
        "embedding, for parts of the model that the search by structure does not find",
    )
    parser.add_argument(
        "--microbatch", metavar="B", type=count,
        help="samples in a microbatch (default 4, or as a plan of search's table says)",
    )  # fmt: skip
    parser.add_argument(
        "--overlap", metavar="DEPTH", type=count,
        help="overlap communication with computing: fetch weights DEPTH gathers ahead, and "
        "reduce gradients during the backward (default: as the plan says, normally no overlap)",
    )  # fmt: skip
    parser.add_argument(
        "--overlap-moves", action="store_true",
        help="overlap communication inside stages with independent computing, for example "
        "gradients of inputs with gradients of weights",
    )  # fmt: skip
    parser.add_argument(
        "--duplex", action="store_true",
        help="run every microbatch of the schedule as two halves of --microbatch samples, of which "
        "one computes while the other communicates inside its stage",
    )  # fmt: skip
    parser.add_argument(
        "--pairs", action="store_true",
        help="run the two actions of a pair of the schedule (dualpipe) as one: one computes while "
        "the other communicates inside its stage",
    )  # fmt: skip
    parser.add_argument(
        "--bucket", metavar="BYTES", type=num_bytes, default=BUCKET_BYTES,
        help="the most bytes that one of these calls reduces or fetches (default 16MiB)",
    )  # fmt: skip


def add_training(parser: argparse.ArgumentParser, devices: str, settings: str) -> None:
    """Add the options that say what is trained, given words about devices and ``--set``."""
    parser.add_argument("--devices", metavar="N", type=count, help=f"number of devices ({devices})")
    parser.add_argument("--set", metavar="NAME=VALUE", action="append", default=[], help=settings)
    parser.add_argument("--preset", help="name of a set of model sizes (default tiny)")
    parser.add_argument("--dtype", choices=DTYPES, help="dtype of the model (default: as built)")
    parser.add_argument(
        "--master-dtype", choices=DTYPES, help="dtype of stored parameters (default: the model's)"
    )
    parser.add_argument(
        "--optimizer", choices=sorted(STATES), default="adam", help="(default adam)"
    )


def add_cluster(parser: argparse.ArgumentParser) -> None:
    """Add the options that describe the cluster."""
    parser.add_argument(
        "--topology",
        metavar="NAME:HxD|FILE",
        help="hosts and links: a preset with its counts, such as h100:2x8 or torus:4x4, or a file "
        "that rvdcomm.Topology.save or rvdcomm.Network.save wrote (default: one host)",
    )
    parser.add_argument(
        "--memory-limit", metavar="BYTES", type=num_bytes,
        help="memory of each device, such as 32GiB",
    )  # fmt: skip


def count(text: str) -> int:
    """Parse a number of at least 1."""
    if not text.isdecimal() or len(text) > 9 or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a number of at least 1, got {text!r}")
    return int(text)


def seed(text: str) -> int:
    """Parse a seed that torch takes."""
    try:
        found = int(text)
    except ValueError:
        found = 1 << 63
    if not -(1 << 63) <= found < 1 << 63:
        raise argparse.ArgumentTypeError(f"expected an integer of at most 64 bits, got {text!r}")
    return found


def rate(text: str) -> float:
    """Parse a number that is finite and not negative, such as a learning rate."""
    try:
        found = float(text)
    except ValueError:
        found = math.nan
    if not 0 <= found < math.inf:
        raise argparse.ArgumentTypeError(f"expected a number of at least 0, got {text!r}")
    return found


# --- from arguments to values -------------------------------------------------------------------


@dataclass(frozen=True)
class AskedProgram:
    """The program that a command line describes.

    Attributes:
        plan: the plan, filled by the sProgram.
        made: the captured model, with the inputs of the capture.
        make: builds the model and its inputs for a batch size.
        microbatch: samples of a microbatch.
        recycled: names of the recycled inputs, as in ``models.Model``.
    """

    plan: Plan
    made: MadeModel
    make: Callable[[int], MadeModel]
    microbatch: int
    recycled: Mapping[str, int]

    @property
    def graph(self) -> Graph:
        """The graph of the model."""
        return self.plan.graph

    def batch(self, size: int) -> dict[str, Tensor]:
        """Inputs of ``size`` samples by name; examples of one fixed size are repeated."""
        made = self.make(size)
        names = [t.name for t in self.graph.inputs]
        named = {self.graph.arguments.get(name, name): x for name, x in made.kwargs.items()}
        given = dict(zip(names, made.args, strict=False)) | named
        return {
            name: x.repeat(-(-size // len(x)), *[1] * (x.dim() - 1))[:size] if x.shape else x
            for name, x in given.items()
            if isinstance(x, Tensor) and name not in self.recycled
        }


def program_of(args: argparse.Namespace, *, device: str = "meta", seed: int = 0) -> AskedProgram:
    """Capture the model, with parameters of a seed, and let the sProgram fill a plan.

    Raises:
        UsageError: there is no such model, plan or setting.
        CaptureError: the model cannot be captured.
        PlanError: the sProgram asks for something impossible.
    """
    name, said = parse_plan(args.plan)
    model_from, plan_from = model_source(args.model, args.preset), plan_source(name)
    sizes, more = settings_of(model_from, plan_from, args.set)
    options = {**said, **more}
    samples = args.microbatch or plan_from.microbatch or MICROBATCH
    if plan_from.microbatch not in (0, samples):
        raise UsageError(
            f"--microbatch {samples}: the plan is of microbatches of {plan_from.microbatch}."
        )
    make = partial(built, model_from, sizes, args.dtype, device, seed)
    with phase(f"build {model_from.name}"):
        made = make(samples)
    with phase("capture"):
        graph = capture(made.model, made.args, made.kwargs, recycled=model_from.recycled)
    plan = Plan(graph, range(devices_of(args)))
    with phase(f"apply {plan_from.name}"):
        _called(plan_from, plan, **options)
    if args.overlap is not None:
        plan.overlap = Overlap(args.overlap, reductions=True, bucket_bytes=args.bucket)
    said = {"moves": args.overlap_moves, "duplex": args.duplex, "pairs": args.pairs}
    plan.overlap = replace(plan.overlap, **{word: True for word, is_on in said.items() if is_on})
    return AskedProgram(plan, made, make, samples, model_from.recycled)


def compiled_of(
    args: argparse.Namespace, topology: rv.Topology | None
) -> tuple[AskedProgram, Compiled]:
    """``program_of``, and what it compiles to for the training and the devices of the options."""
    program = program_of(args)
    with phase("validate and materialize"):
        return program, compile(
            program.plan, topology=topology, memory_limit=vars(args).get("memory_limit"),
            optimizer=args.optimizer, precision=Precision(args.master_dtype),
        )  # fmt: skip


def built(
    source: Source, sizes: Mapping[str, Any], dtype: str | None, device: str, seed: int, batch: int
) -> MadeModel:
    """The model and its inputs for a batch size, ready to be trained."""
    with torch.random.fork_rng(devices=[]), torch.device(device):
        torch.manual_seed(seed)
        made: MadeModel = _called(source, batch, **sizes)
    made.model.train()
    return made if dtype is None else made.to(getattr(torch, dtype))


def _called(source: Source, *args: Any, **named: Any) -> Any:
    """Call user code; report its errors in one line."""
    try:
        return source.call(*args, **named)
    except USER_ERRORS:
        raise
    except Exception as error:
        raise UsageError(f"{source.name} fails: {type(error).__name__}: {error}") from error


def topology_of(args: argparse.Namespace) -> rv.Topology | None:
    """The topology of the options, or the levels of a network; None is one host.

    Raises:
        UsageError: there is no such preset or file, or it has fewer devices than the plan.
    """
    found = _whole_topology(args)
    if found is not None and len(found.ranks) < (args.devices or 0):
        raise UsageError(
            f"--topology {args.topology} has {len(found.ranks)} devices, and the plan "
            f"{args.devices}."
        )
    return found


def devices_of(args: argparse.Namespace) -> int:
    """The number of devices of the options: without one, all of the topology's, or one."""
    if args.devices is not None:
        return int(args.devices)
    found = _whole_topology(args)
    return 1 if found is None else len(found.ranks)


def _whole_topology(args: argparse.Namespace) -> rv.Topology | None:
    name = vars(args).get("topology")
    if name is None:
        return None
    found = levels_of(named_network(name))
    assert found is not None, "a network has levels"
    return found
