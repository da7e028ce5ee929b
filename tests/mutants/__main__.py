"""The commands; see the package."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import Queue

from tqdm import tqdm

from tests.mutants.mutant import ROOT, Mutant, draw, put, read, sites, write

NUM = 300
MOST_TESTS = 60
"""Tests of one mutant that run; one case of each test function comes first."""

SECS = 240


def _copy(to: Path) -> Path:
    shutil.rmtree(to, ignore_errors=True)
    keep = shutil.ignore_patterns(
        ".venv", ".git", "__pycache__", "build", ".mypy_cache", "*.egg-info"
    )
    shutil.copytree(ROOT, to, ignore=keep)
    return to


def _environment(tree: Path, **more: str) -> dict[str, str]:
    path = os.pathsep.join([str(tree), os.environ.get("MUTANTS_PATH", "")])
    return (
        os.environ
        | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
        | more
    )


def reach(out: Path) -> None:
    """Run all tests over an instrumented copy; which tests reach which mutant."""
    tree = _copy(out / "reached")
    mutants = read()
    for number, site in sites(mutants, tree).items():
        mutant = mutants[number]
        put(mutant, site, f"(_reach({number}) and ({mutant.line[mutant.start : mutant.end]}))")
    (tree / "sitecustomize.py").write_text(
        "import tests.mutants.plugin\n"
        "try:\n    import coverage\n    coverage.process_startup()\nexcept ImportError:\n    pass\n"
    )
    reached = out / "reach.txt"
    reached.write_text("")
    environment = _environment(tree, MUTANTS_REACH=str(reached.resolve()))
    for choice, more in {
        "not (dist or cluster)": ["-n", "2"],
        "dist and not (alone or cluster)": ["-n", "2", "--dist", "loadfile", "tests"],
        "alone or cluster": ["tests"],
    }.items():
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", choice]
        command += ["--timeout", "900", *more]
        subprocess.run(command, cwd=tree, env=environment, check=False)


def _tests(reached: Path) -> dict[int, list[str]]:
    """The tests to run for each mutant: of every test function one case first."""
    every: dict[int, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for line in reached.read_text().splitlines():
        number, test = line.split("\t")
        if test:
            every[int(number)][test.split("[")[0]].append(test)
    chosen = {}
    for number, functions in every.items():
        rounds: list[str] = []
        for turn in range(max(map(len, functions.values()))):
            rounds += [cases[turn] for cases in functions.values() if turn < len(cases)]
        chosen[number] = rounds[:MOST_TESTS]
    return chosen


def _killed(tree: Path, mutant: Mutant, tests: Sequence[str]) -> str:
    """How the tests end over a tree with one fault."""
    site = sites([mutant], tree).get(0)
    if site is None:
        return "gone"
    if not tests:
        return "not reached"
    before = site.path.read_text()
    put(mutant, site, mutant.fault)
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-x",
        "-q",
        "-p",
        "no:cacheprovider",
        "--timeout",
        "100",
    ]
    process = subprocess.Popen(
        [*command, *tests],
        cwd=tree,
        env=_environment(tree),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        code = process.wait(SECS)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        code = -1
        process.wait()
    finally:
        site.path.write_text(before)
    # 5: no test ran; 4: a test's name is unknown.
    return {0: "survived", 4: "error", 5: "error", -1: "killed (hangs)"}.get(code, "killed")


def kill(out: Path, result: Path, num_workers: int, every: int = 1) -> None:
    """Put in one mutant at a time; ends that ``result`` has already are kept, so it can go on.

    ``every``: of each so many mutants the first alone (a sample, which can be completed later).
    """
    mutants, tests = read(), _tests(out / "reach.txt")
    ends: dict[str, str] = json.loads(result.read_text())["ends"] if result.exists() else {}
    left = [number for number in range(0, len(mutants), every) if str(number) not in ends]
    trees: Queue[Path] = Queue()
    for worker in range(num_workers):
        trees.put(_copy(out / f"tree{worker}"))

    def one(number: int) -> tuple[int, str]:
        tree = trees.get()
        try:
            return number, _killed(tree, mutants[number], tests.get(number, []))
        finally:
            trees.put(tree)

    with ThreadPoolExecutor(num_workers) as pool:
        for number, end in tqdm(pool.map(one, left), total=len(left)):
            ends[str(number)] = end
            counts = dict(sorted(Counter(ends.values()).items()))
            result.write_text(json.dumps({"counts": counts, "ends": ends}, indent=0) + "\n")
    print(result.read_text().partition('"ends"')[0])


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.mutants")
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("draw")
    for name in ("reach", "kill"):
        one = commands.add_parser(name)
        one.add_argument("out", type=Path)
        if name == "kill":
            one.add_argument("result", type=Path)
            one.add_argument("--workers", type=int, default=2)
            one.add_argument("--every", type=int, default=1)
    args = parser.parse_args()
    if args.command == "draw":
        write(draw(NUM))
    elif args.command == "reach":
        args.out.mkdir(parents=True, exist_ok=True)
        reach(args.out)
    else:
        kill(args.out, args.result, args.workers, args.every)


if __name__ == "__main__":
    main()
