"""``superscaler plan``: compile a program, report on it, and write it out."""

from __future__ import annotations

import argparse

from rvdcomm.cli import OK, Command
from superscaler_core.cli.arguments import NAMES, add_cluster, add_program, compiled_of, topology_of
from superscaler_core.cli.progress import phase
from superscaler_core.plan import DECISIONS_SUFFIX


def _plan(args: argparse.Namespace) -> int:
    program, compiled = compiled_of(args, topology_of(args))
    with phase("report"):
        report = compiled.report()
    print(report.summary() if args.summary else report)
    if args.decisions is not None:
        program.plan.decisions.save(args.decisions)
        print(f"\nwrote {args.decisions}")
    if args.out is not None:
        with phase("generate"):
            folder = compiled.save(args.out)
        print(f"\nwrote {len(program.plan.devices)} files rank_*.py to {folder}")
    return OK


def _add(parser: argparse.ArgumentParser) -> None:
    add_program(parser)
    add_cluster(parser)
    parser.add_argument("--out", metavar="DIR", help="write the program to DIR, for load(DIR)")
    parser.add_argument(
        "--decisions", metavar="FILE", type=decisions_file,
        help="write the plan's decisions, as a text that can be edited and given as PLAN",
    )  # fmt: skip
    parser.add_argument("--summary", action="store_true", help="print a few lines only")


def decisions_file(path: str) -> str:
    """Check the name of a file of decisions."""
    if not path.endswith(DECISIONS_SUFFIX):
        raise argparse.ArgumentTypeError(f"a file of decisions ends with {DECISIONS_SUFFIX!r}")
    return path


COMMAND = Command(
    "compile a model with a plan; print its communication and memory",
    f"""{NAMES}
examples:
  What tensor parallelism sends, and what each device needs:
    superscaler plan gpt megatron --devices 4
  A GPT of 1.3 billion parameters on 8 devices that must do with 32 GiB:
    superscaler plan gpt hybrid --preset 1.3B --devices 8 --microbatch 1 --set pp=4 --set tp=2 \\
      --dtype bfloat16 --master-dtype float32 --memory-limit 32GiB
  The decisions of a plan, to change by hand and to look at again:
    superscaler plan gpt megatron --devices 2 --decisions mine.plan
    superscaler simulate gpt mine.plan --devices 2 --profile v100
  A model and an sProgram of your own, written out for torchrun:
    superscaler plan mine.py:model mine.py:split --devices 2 --out program

in the tables:
  edge, #         the name of one edge (see 'explain --edge'), and how many are like it
  R(2)V(1)D(1,4)  2 replicas, 1 value part, dim 0 whole, dim 1 cut in 4
  x               how often each goes in a training step
  a step          bytes that devices send in a training step, for all that are counted
  gap             time over its lower bound; 1 is best
""",
    _add,
    _plan,
)
