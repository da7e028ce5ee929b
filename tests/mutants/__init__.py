"""A fixed set of small faults (mutants), and which tests find each: how much the tests notice.

A change of the tests must not lose a fault that they found before. Three commands, in this order:

    python -m tests.mutants draw              draw the set (once; mutants.json is kept)
    python -m tests.mutants reach OUT         which tests run through each fault: OUT/reach.txt
    python -m tests.mutants kill OUT RESULT   put in one fault at a time, run tests that reach it

``reach`` runs the tests once, over a copy of the tree in which every faulty place reports to a
file. ``kill`` then needs some minutes to an hour instead of 300 runs of all tests.
"""
