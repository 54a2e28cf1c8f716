"""What machines and links there are, real and emulated.

interfaces.py  which network interface leads to a peer, and why
machine.py     facts about this machine: cores, memory, versions
probe.py       the piece size at which this machine sums fastest, measured once
checkup/       is this machine ready, and if not, what would help
delay.py       pauses drawn from a distribution, injected into a worker's computation
delays/        the distributions, one file each
pace.py        a slower processor, emulated by sleeping, without root
lab/           clusters emulated from network namespaces, shaped links and CPU quotas
"""
