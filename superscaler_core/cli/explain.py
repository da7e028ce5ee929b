"""``superscaler explain``: how ops are split, and any edge in full."""

from __future__ import annotations

import argparse

from rvdcomm.cli import OK, Command
from superscaler_core.cli.arguments import NAMES, add_cluster, add_program, compiled_of, topology_of
from superscaler_core.cli.progress import phase
from superscaler_core.materialize.events import stage_graph
from superscaler_core.report import explain_edge, explain_ops
from superscaler_core.schedules import grid, timeline


def _explain(args: argparse.Namespace) -> int:
    topology = topology_of(args)
    program, compiled = compiled_of(args, topology)
    if args.edge:
        texts = [explain_edge(compiled.materialized, name, topology) for name in args.edge]
        print("\n\n".join(texts))
        return OK
    if args.step:
        print(compiled.step_program)
        return OK
    print(f"what was split how\n{explain_ops(program.plan)}\n")
    with phase("report"):
        report = compiled.report()
    print(report)
    if program.plan.schedule is not None:
        made = compiled.materialized
        times = timeline(program.plan.schedule, edges=stage_graph(made.plan, made.edges))
        print(f"\nschedule, if every action took as long\n{grid(times)}")
    return OK


def _add(parser: argparse.ArgumentParser) -> None:
    add_program(parser)
    add_cluster(parser)
    parser.add_argument(
        "--edge", metavar="NAME", action="append",
        help="only this edge (e3, or a parameter's name): its ends and its plans, step by step",
    )  # fmt: skip
    parser.add_argument(
        "--step", action="store_true",
        help="only the step: all instructions of every stage, and the order in which stages run",
    )  # fmt: skip


COMMAND = Command(
    "print what was split how, the communication, the memory and the schedule",
    f"""{NAMES}
examples:
  Everything about tensor parallelism on two devices:
    superscaler explain gpt megatron --devices 2
  One edge, with the plan of its communication:
    superscaler explain gpt megatron --devices 2 --edge e3
  The whole step, instruction by instruction:
    superscaler explain gpt zero3 --devices 2 --step
  A pipeline, with the picture of its schedule:
    superscaler explain gpt one_f_one_b --devices 2 --set microbatches=4

in the table of ops:
  b+, b^, b   a loop that is summed, that cannot be cut, that can be cut
  b/4         the loop is cut in 4
  2 copies    two devices do the same work
  again       the backward computes it again
""",
    _add,
    _explain,
)
