"""Tests of rvdcomm and superscaler_core.

No process of the tests asks a name server. torch's store asks one for the name of every client
that connects, on the only thread that serves all of them. Where no answer comes, glibc waits for
5 to 20 seconds, which is more than the timeouts of the groups in which ranks fail. glibc reads the
variable when a process asks for the first time; with no attempts it asks nobody.

Torch computes on one thread. Where all cores are busy, its threads spin while they wait for each
other: an operator on a small tensor takes ten times as long.
"""

import os

os.environ["RES_OPTIONS"] = "attempts:0"
os.environ["OMP_NUM_THREADS"] = "1"
