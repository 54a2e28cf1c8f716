"""Is what workers hold and compute still right? Optional checks against silent corruption.

verification.py    the contract of a check: its options, and what it does in a run; the registry
verifier.py        the checks of one worker, in order: what is told to all, what is decided, what is refused
outliers.py        which norms of gradients stand out from recent steps and from the other workers' (pure)
vote.py            which of several values is the right one (pure)
checksums.py       a number for a tensor's bytes, and for an optimizer's state
gradient_check.py  finite gradients and usual norms, while gradients are in flight
weight_check.py    votes on weights and optimizer states, and repairs
replay_check.py    computes a backward pass again and compares
recorded_pass.py   a model's forward passes, kept so that they can be computed again
replica_check.py   compares gradients of workers that have the same samples
replica_choice.py  which replica's gradients are used where they differ: by checksum, or by functions
checks/            the options of each check, one file each
"""
