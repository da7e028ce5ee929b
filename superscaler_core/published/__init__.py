"""Published systems: planners, plans, schedules and models that exist to reproduce a paper.

One module or folder a system. The rest of ``superscaler_core`` imports none of them: they are rows
of its tables, which ``pyproject.toml`` names as entry points, as a package of yours would
(``superscaler_core.table``). What is exported here is what a row or a study needs.
"""
