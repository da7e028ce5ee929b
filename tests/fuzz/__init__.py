"""Fuzzing with random transitions and damaged texts: commands run for minutes, tests for seconds.

``python -m tests.fuzz.pairs`` simulates random pairs of layouts. ``.processes`` runs random pairs
on real processes, and ``.faults`` lets ranks fail. ``.parsers`` feeds damaged texts to all readers.
``.programs`` changes step programs. ``.soak`` measures whether the memory of processes grows in a
loop of calls. All commands have ``--help``, and all but ``.soak`` have ``--seed``. ``.pairs``,
``.processes`` and ``.parsers`` print a command that repeats each finding.
"""
