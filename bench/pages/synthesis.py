"""Parts of the page about synthesis."""

from __future__ import annotations

from collections.abc import Mapping

from bench import networks, synthesis
from bench.pages.measured import printed
from bench.pages.text import Section

SECTIONS: Mapping[str, tuple[str, Section]] = {
    "synthesis": ("synthesis", printed(synthesis.report)),
    "networks": ("networks", printed(lambda result: networks.table(result["rows"]))),
}
"""The parts, each with the name of its result and the section that describes it."""
