"""``superscaler explain``: how ops are split, and any edge in full."""

from __future__ import annotations

import argparse

from rvdcomm.cli import OK, Command
from superscaler_core.cli.arguments import NAMES, add_cluster, add_program, compiled_of, topology_of
from superscaler_core.cli.html import add_html
from superscaler_core.cli.progress import phase
from superscaler_core.cli.simulate import add_profile, named_profile
from superscaler_core.materialize.events import stage_graph
from superscaler_core.page import load_candidates, save_page
from superscaler_core.report import explain_edge, explain_ops
from superscaler_core.schedules import grid, timeline
from superscaler_core.simulator import simulate


def _explain(args: argparse.Namespace) -> int:
    topology = topology_of(args)
    profile = named_profile(args)
    program, compiled = compiled_of(args, topology)
    if args.html is not None:
        with phase(f"simulate, write {args.html}"):
            save_page(simulate(compiled, profile), args.html, load_candidates(args.plan))
        print(f"wrote {args.html}; open it in a browser\n")
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
    add_profile(parser)
    more = (
        "; and the candidates of the search, if PLAN is a file that 'search --out' wrote. The step "
        "is simulated on devices of --profile"
    )
    add_html(parser, more)
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
  The same as a page for a browser, with the simulated step:
    superscaler explain gpt hybrid:tp=2,pp=2 --devices 4 --topology v100:2x2 --html hybrid.html

in the table of ops:
  b+, b^, b   a loop that is summed, that cannot be cut, that can be cut
  b/4         the loop is cut in 4
  2 copies    two devices do the same work
  again       the backward computes it again
""",
    _add,
    _explain,
)
