"""``superscaler simulate``: time and memory of a training step on a modelled cluster."""

from __future__ import annotations

import argparse
from pathlib import Path

from rvdcomm.cli import FAILED, OK, Command, UsageError
from superscaler_core.cli.arguments import NAMES, add_program, compiled_of, topology_of
from superscaler_core.cli.progress import phase
from superscaler_core.cost.comm_cost import METHODS
from superscaler_core.simulator import PROFILES, DeviceProfile, simulate


def _simulate(args: argparse.Namespace) -> int:
    topology = topology_of(args)
    profile = named_profile(args)
    _, compiled = compiled_of(args, topology)
    found = simulate(
        compiled,
        profile,
        communication=args.communication,
        intra=args.intra,
        inter=args.inter,
    )
    print(found.summary() if args.summary else found)
    for path, write in ((args.trace, found.save_trace), (args.picture, found.draw)):
        if path is not None:
            with phase(f"write {path}"):
                write(path)
            print(f"\nwrote {path}")
    return OK if found.fits else FAILED


def profile_name(args: argparse.Namespace) -> str:
    """The profile of the options: without one, that of the topology's preset, or v100."""
    preset = (args.topology or "").partition(":")[0]
    return str(args.profile or (preset if preset in PROFILES else "v100"))


def named_profile(args: argparse.Namespace) -> DeviceProfile:
    """The preset of the profile's name, or the profile in this file."""
    text = profile_name(args)
    if text in PROFILES:
        return PROFILES[text]
    if not Path(text).is_file():
        raise UsageError(
            f"--profile {text}: there is no such file, and no such preset; the presets are "
            f"{', '.join(PROFILES)}."
        )
    return DeviceProfile.load(text)


def add_profile(parser: argparse.ArgumentParser) -> None:
    """Add the option that describes a device."""
    parser.add_argument(
        "--profile", metavar="NAME|FILE",
        help=f"device model: {', '.join(PROFILES)}, or a JSON file that DeviceProfile.save wrote "
        "(default: that of the topology, or v100)",
    )  # fmt: skip


def add_machine(parser: argparse.ArgumentParser) -> None:
    """Add the options that describe devices and their links."""
    add_profile(parser)
    parser.add_argument(
        "--topology", metavar="NAME:HxD|FILE",
        help="H hosts with D devices each of a preset (v100, a100, h100, ethernet, torus, ...), or "
        "a file that rvdcomm.Topology.save or rvdcomm.Network.save wrote (default: one host)",
    )  # fmt: skip


def _add(parser: argparse.ArgumentParser) -> None:
    add_program(parser)
    add_machine(parser)
    for option, what in (
        ("--communication", "all tensors (default rvd)"),
        ("--intra", "tensors inside stages, including weights and gradients,"),
        ("--inter", "tensors between stages"),
    ):
        default = METHODS[0] if option == "--communication" else None
        parser.add_argument(
            option, choices=METHODS, default=default, help=f"how {what} move: see below"
        )
    parser.add_argument("--summary", action="store_true", help="print only a few lines")
    parser.add_argument(
        "--trace", metavar="FILE", help="write a trace for chrome://tracing or ui.perfetto.dev"
    )
    parser.add_argument(
        "--picture", metavar="FILE",
        help="draw devices over time, with communication that is hidden in a thin lane, and memory "
        "over time, also inside runs; as .png or .svg",
    )  # fmt: skip


COMMAND = Command(
    "simulate a training step: time, bubble, communication by level, memory",
    f"""{NAMES}
examples:
  A pipeline on two hosts of four V100s:
    superscaler simulate gpt hybrid --preset 1.3B --dtype float16 --devices 8 --microbatch 1 \\
      --set pp=4 --set tp=2 --topology v100:2x4
  The same without rvdcomm's plans between stages, and a picture of it:
    superscaler simulate gpt hybrid --devices 8 --set pp=4 --set tp=2 --topology v100:2x4 \\
      --inter p2p --picture step.png

how tensors move:
  rvd   by rvdcomm's plans
  ring  by plans that know no hosts; collectives go around a flat ring of their ranks
  p2p   every reader pulls what it needs from its writers, with one message each

in the tables:
  compute        forward, backward, recomputation and the optimizer
  communication  time in which a device only communicates; hidden communication is not included
  bubble         time in which it waits for other devices
  of makespan    bubble divided by the step's time; of ideal: divided by busy time;
  of span        1 - most busy time / longest time from a device's first to its last run
  rank, host     bytes that stay inside a host, and bytes that leave it

The exit status is 1 if some device has too little memory.
""",
    _add,
    _simulate,
)
