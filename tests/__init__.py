"""Tests of rvdcomm and superscaler_core.

No process of the tests queries a name server. torch's store queries a name server for the name of
every client that connects. It does this on the only thread that serves the clients. If no answer
comes, glibc waits for 5 to 20 seconds. This is longer than the timeouts of the process groups in
tests of failing ranks. glibc reads RES_OPTIONS at the first query of a process. With 0 attempts, it
queries no name server.

Torch computes on one thread. With several threads on busy cores, the threads spin while they wait
for each other, and an operator on a small tensor takes ten times as long.
"""

import os

os.environ["RES_OPTIONS"] = "attempts:0"
os.environ["OMP_NUM_THREADS"] = "1"
