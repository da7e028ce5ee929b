"""``superscaler run``: train a few steps with a plan, and compare with a single device."""

from __future__ import annotations

import argparse
import os
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from rvdcomm.cli import FAILED, OK, Command, UsageError
from superscaler_core.cli.arguments import (
    NAMES,
    AskedProgram,
    add_program,
    count,
    program_of,
    rate,
    seed,
)
from superscaler_core.cli.progress import phase
from superscaler_core.cli.training import Training, TrainingResult, on_single_device
from superscaler_core.compiled import compile
from superscaler_core.training.load import load, run_threads
from superscaler_core.training.world import join_world, local_device

TOLERANCES = {"float64": 1e-10, "float32": 1e-4, "float16": 5e-2, "bfloat16": 5e-2}
"""Differences that ``--check`` tolerates, by the coarsest dtype of the loss and the parameters.

Sums in another order differ in their last digits, and an optimizer may amplify this.
"""

TIMEOUT_SECS = 600.0
"""Timeout of a thread that waits for another."""


def _run(args: argparse.Namespace) -> int:
    world = int(os.environ["WORLD_SIZE"]) if "RANK" in os.environ else 0
    _check_processes(args, world)
    args.devices = args.devices or world or 1
    program = program_of(args, device="cpu", seed=args.seed)
    batch = program.batch(program.microbatch * program.plan.num_microbatches)
    state = {name: value.clone() for name, value in program.made.model.state_dict().items()}
    training = Training(state, batch, args.steps, args.optimizer, args.lr)
    if args.check:
        # By default, convolutions on a GPU round float32 to TF32; the comparison is on the CPU.
        torch.backends.cudnn.allow_tf32 = False
    with tempfile.TemporaryDirectory() as folder:
        with phase("compile"):
            compile(program.plan).save(folder)
        with phase(f"train {args.steps} steps"):
            found = _trained(Path(folder), training, args, world)
    if world and os.environ["RANK"] != "0":
        return OK
    for number, loss in enumerate(found.losses, 1):
        print(f"step {number:<3} loss {loss:.6f}")
    return _compared(program, training, found, args) if args.check else OK


def _check_processes(args: argparse.Namespace, world: int) -> None:
    if args.threads and world:
        raise UsageError("--threads runs all ranks in one process; leave it out under torchrun.")
    if not args.threads and not world:
        raise UsageError(
            "run needs a process for every device: 'torchrun --nproc-per-node N -m "
            "superscaler_core run ...'; or add --threads to run all ranks in this one."
        )
    if world and args.devices not in (None, world):
        raise UsageError(
            f"--devices {args.devices}, but torchrun started {world} processes: leave --devices "
            f"out, or start {args.devices}."
        )


def _trained(
    folder: Path, training: Training, args: argparse.Namespace, world: int
) -> TrainingResult:
    """Train with the program in ``folder``, on all ranks, or on the one that torchrun started."""
    options: dict[str, Any] = {"seed": args.seed, "dtype": _master_dtype(args)}
    if not world:
        ranks = range(args.devices)
        return run_threads(folder, training, ranks, timeout_secs=TIMEOUT_SECS, **options)[0]
    device = local_device()
    join_world(device)
    try:
        return training.to(device)(load(folder, device=device, **options))
    finally:
        dist.destroy_process_group()


def _compared(
    program: AskedProgram, training: Training, found: TrainingResult, args: argparse.Namespace
) -> int:
    """Train on a single device, and report the differences."""
    with phase("train on a single device"):
        expected, by = on_single_device(
            training,
            program.made,
            program.plan,
            program.recycled,
            seed=args.seed,
            master_dtype=_master_dtype(args),
        )
    losses, parameters, worst = expected.difference(found)
    tensors = [program.graph.loss, *program.graph.parameters.values()]
    limit = max(TOLERANCES[tensor.dtype] for tensor in tensors)
    is_same = losses <= limit and parameters <= limit
    print(
        f"{'same' if is_same else 'DIFFERENT'}  as {by} to {limit:g}: losses differ by at most "
        f"{losses:.2g}, parameters by {parameters:.2g} ({worst})"
    )
    return OK if is_same else FAILED


def _master_dtype(args: argparse.Namespace) -> torch.dtype | None:
    found: torch.dtype | None = (
        None if args.master_dtype is None else getattr(torch, args.master_dtype)
    )
    return found


def _add(parser: argparse.ArgumentParser) -> None:
    add_program(parser)
    parser.set_defaults(devices=None)
    parser.add_argument("--steps", type=count, default=3, help="training steps (default 3)")
    parser.add_argument("--lr", type=rate, default=1e-2, help="learning rate (default 0.01)")
    parser.add_argument(
        "--seed", type=seed, default=0, help="seed of parameters and dropout (default 0)"
    )
    parser.add_argument(
        "--threads", action="store_true", help="run all ranks as threads of this process (slow)"
    )
    parser.add_argument(
        "--check", action="store_true",
        help="train on a single device as well, and compare (exit 1 if they differ)",
    )  # fmt: skip


COMMAND = Command(
    "train a few steps on random data; with --check, compare with a single device",
    f"""{NAMES}
examples:
  All ranks in one process, compared with the eager model:
    superscaler run gpt megatron --devices 2 --threads --check --dtype float64
  A process for every device (NCCL where there are GPUs, gloo elsewhere):
    torchrun --nproc-per-node 2 -m superscaler_core run gpt zero3 --check
""",
    _add,
    _run,
)
