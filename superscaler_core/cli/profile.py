"""``superscaler profile``: measure a device of this machine."""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

from rvdcomm.cli import OK, Command, UsageError
from superscaler_core.cli.arguments import rate
from superscaler_core.cli.progress import phase
from superscaler_core.simulator.measured import measured_speeds
from superscaler_core.simulator.meter import SIZES, Meter

DTYPES = ("float16", "bfloat16", "float32", "float64")


def _profile(args: argparse.Namespace) -> int:
    device = _device(args.device)
    # Before minutes of measuring, and not after them.
    if args.out.is_dir() or not args.out.parent.is_dir():
        raise UsageError(f"{args.out}: expected a file in a folder that exists.")
    with phase(f"measure {device}"):
        meter = Meter(device, args.secs)
        found = measured_speeds(meter, args.dtypes, name=args.name)
    found.save(args.out)
    print("\n".join(found.assumptions))
    print(f"wrote {args.out}")
    return OK


def _device(text: str) -> torch.device:
    try:
        device = torch.device(text)
    except RuntimeError:
        device = torch.device("meta")
    num_gpus = torch.cuda.device_count()
    if device.type not in SIZES or (device.index or 0) >= {"cpu": 1, "cuda": num_gpus}[device.type]:
        here = ["cpu", *(f"cuda:{i}" for i in range(num_gpus))]
        raise UsageError(f"--device {text!r}: the devices here are {', '.join(here)}.")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    return device


def _dtypes(text: str) -> tuple[str, ...]:
    found = tuple(dict.fromkeys(word.strip() for word in text.split(",")))
    if not set(found) <= set(DTYPES):
        raise argparse.ArgumentTypeError(f"expected some of {','.join(DTYPES)}, got {text!r}")
    return found


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("out", type=Path, metavar="OUT.json", help="file of the profile")
    parser.add_argument(
        "--device", default="cuda" if torch.cuda.is_available() else "cpu",
        help="cpu, or a GPU such as cuda:0 (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--dtypes", type=_dtypes, default=DTYPES, help=f"of products (default: {','.join(DTYPES)})"
    )
    parser.add_argument(
        "--secs", type=rate, default=0.2, help="that each call is measured (default: %(default)s)"
    )
    parser.add_argument(
        "--name", default="this machine", help="of the profile (default: %(default)s)"
    )


COMMAND = Command(
    "measure the products, memory and launches of a device of this machine",
    """examples:
  superscaler profile here.json
  superscaler profile gpu.json --device cuda:0 --dtypes bfloat16,float32
  superscaler simulate gpt megatron --devices 4 --profile here.json --summary

It measures how fast products, copies and launches of a device are, and on a GPU how fast this host
issues kernels from Python. Attention is priced as products; overheads of programs are not measured.
The exit status is 2 if there is no such device, or the file cannot be written.
""",
    _add_arguments,
    _profile,
)
