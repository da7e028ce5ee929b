"""Fuzzing: random transitions and damaged texts, for minutes by a command, for seconds in pytest.

``python -m tests.fuzz.pairs`` simulates random pairs of layouts, ``.processes`` runs them on real
processes, ``.parsers`` feeds damaged texts to everything that reads, ``.soak`` watches memory while
a loop runs. All take ``--help`` and ``--seed``, and print how to repeat what they find.
"""
