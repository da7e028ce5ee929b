"""Executors: ways to run a program (docs/executors.md).

- ``simulate``: all ranks in one process; the meaning.
- ``choice`` decides what a group runs for a plan; ``schedule`` what one rank does and waits for;
  ``rank_program`` compiles that, and a ``call`` is one run of it.
- What it is compiled to: ``stage`` (the native core) or ``local`` (torch) between transfers, and
  ``dist`` for the transfers.
- Memory: ``staging`` and ``cuda_staging`` for what is under way, ``results`` for what is returned.
- Ranks of one machine: ``rendezvous`` finds them, a ``segment`` is one rank's shared memory, an
  ``island`` all of theirs.
- Ranks of one group: ``world`` holds what is made once for it, ``agreement`` lets them compare.
"""
