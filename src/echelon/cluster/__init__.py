"""Machines and links, real and emulated.

interfaces.py  finds the network interface that leads to a peer, and says why
cores.py       which cores each worker has, if workers are pinned
machine.py     facts about this machine: cores, memory, versions
probe.py       measures once at which piece size this machine sums fastest
probe_cache.py what was measured before, by what it depends on
allowance.py   what a worker may use here: cores, memory, cache; how fast the machine sums
checkup/       checks whether this machine is ready, and suggests fixes
delay.py       the contract of delays: pauses drawn from a distribution
delays/        the distributions, one file each
pace.py        emulates a slower processor by sleeping, without root
lab/           clusters emulated with network namespaces, shaped links and CPU quotas
"""
