"""Document: everything that a page shows, as one value of JSON."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from superscaler_core.page.candidate_row import MAX_CANDIDATES, CandidateRow, shown
from superscaler_core.page.edge_rows import EdgeRows
from superscaler_core.page.layer_rows import LayerRows
from superscaler_core.page.memory_lines import memory_lines
from superscaler_core.page.runs import Runs
from superscaler_core.simulator import Simulated


def document_of(found: Simulated, candidates: Iterable[CandidateRow] = ()) -> dict[str, Any]:
    """What a page shows of a simulated step.

    Laws (tests/superscaler_core/page/test_document.py): its runs are those of the simulation, and
    the bytes of its edges those of the report.

    Args:
        found: the simulated step, which knows its program.
        candidates: the candidates of the search that chose the plan, if there was one.
    """
    compiled, made = found.compiled, found.compiled.materialized
    report = compiled.report()
    edges, layers, rows = EdgeRows(made, report), LayerRows(made), list(candidates)
    runs = Runs(found.timeline, layers, edges)
    timeline = runs.value
    notes = [*runs.notes]
    if len(rows) > MAX_CANDIDATES:
        notes.append(f"Of {len(rows)} candidates the first {MAX_CANDIDATES} are shown.")
    return {
        "title": found.title,
        "headline": found.headline,
        "secs": found.secs,
        "plan": report.title,
        "shares": dict(found.breakdown.shares),
        "overlap": found.overlap,
        "timeline": timeline,
        "memory": {
            "limit": found.memory_bytes,
            "peaks": [[d, dict(found.memory[d]), found.peak_bytes[d]] for d in runs.devices],
            "lines": memory_lines(found.live, runs.devices),
        },
        "levels": list(report.level_names),
        "edges": edges.values,
        "decisions": layers.value,
        "candidates": [row.value for row in shown(rows)],
        "notes": [*notes, *report.notes],
        "assumptions": list(found.assumptions),
    }
