"""Checks whether this machine is ready, and suggests fixes. Nothing here imports torch.

finding.py    the result of one check
installed.py  versions of Echelon and of its dependencies
hardware.py   processor, memory, shared memory, clock
network.py    interfaces, the ones that would be used, open ports
emulation.py  whether clusters can be emulated here
data.py       which data sets are available

Nothing is changed and nothing is sent to other machines: ports are opened only on loopback, and closed
again.
"""
