"""Emulated clusters on one Linux machine: unequal CPUs, unequal links, and faults on purpose.

spec.py       what a lab file says, checked; the only description the rest reads
files/        the lab files that ship with Echelon
paths.py      which uplinks carry traffic between two sites
names.py      how everything a lab makes is called, so that it is found again
needs.py      what this machine lacks, in plain words
commands.py   runs ip, tc and bridge, and says what went wrong
network.py    namespaces, links, shaping
cpu.py        CPU quotas
state.py      what is written down about labs that are up
processes.py  which processes are in a node, and how they are ended
remove.py     takes a lab away, also after a crash
lab.py        a lab that is up: its seats, its controls
faults.py     kill, stop, slow, cut: at a second or at a step
execute.py    runs any program in the nodes

Nothing of it touches the host's own network: every interface and bridge lives in a namespace that the
lab made and goes away with it.
"""
