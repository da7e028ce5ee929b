"""Tests of rvdcomm and superscaler_core.

No process of the tests queries a name server. torch's store queries one for the name of every
client that connects, on the only thread that serves all clients. If no answer comes, glibc waits
for 5 to 20 seconds, which is longer than the timeouts of the groups in which ranks fail. glibc
reads RES_OPTIONS at the first query of a process; with 0 attempts it queries no server.

Torch computes on one thread. If all cores are busy, its threads spin while they wait for each
other, and an operator on a small tensor takes ten times as long.
"""

import os

os.environ["RES_OPTIONS"] = "attempts:0"
os.environ["OMP_NUM_THREADS"] = "1"
