"""Fuzzing: random transitions and damaged texts, for minutes by a command, for seconds in pytest.

``python -m tests.fuzz.pairs`` simulates random pairs of layouts. ``.processes`` runs random pairs
on real processes, and ``.faults`` lets ranks fail. ``.parsers`` feeds damaged texts to all readers.
``.soak`` watches the memory of a loop of calls. All commands have ``--help`` and ``--seed``, and
print how to repeat a finding.
"""
