"""Is this machine ready, and if not, what would help? Nothing here imports torch.

finding.py    one thing that was looked at, and what came of it
installed.py  Echelon's version and those of what it needs
hardware.py   processor, memory, shared memory, clock
network.py    interfaces, which of them would be used, open ports
emulation.py  whether clusters can be emulated here
data.py       which data sets are there

Nothing is changed and nothing is sent to other machines: ports are opened on loopback and closed again.
"""
