"""Emulated clusters on one Linux machine: unequal CPUs, unequal links, and injected faults.

spec.py       reads and checks lab files
files/        the lab files that ship with Echelon
paths.py      chooses the uplinks between two sites
ends.py       which two sites does an uplink of a file join, and is each site joined to the others?
names.py      the names of everything that a lab creates
needs.py      what a lab needs and this machine lacks
commands.py   runs ip, tc and bridge, and reports errors
network.py    namespaces, links, shaping
cpu.py        CPU quotas
state.py      the state files of labs that are up
processes.py  finds and ends the processes of a node
remove.py     removes a lab, even after a crash
lab.py        a lab that is up: its seats and its controls
variation.py  jitter and loss of links where the kernel has no netem
faults.py     injects faults at a second or at a step: kill, stop, slow, cut, ...
execute.py    runs a program in the nodes

Nothing touches the host's own network: every interface and bridge is in a namespace that the lab creates
and removes.
"""
