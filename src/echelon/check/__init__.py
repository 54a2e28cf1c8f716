"""Does a script compute the same alone and on several workers? `echelon check` runs both, and compares.

check.py    the whole check: run the script alone and on workers, compare, explain
sides.py    run one side as `echelon run` would, in a temporary folder
worker.py   the first code of the check in a worker: install the probe, then run the script
probe.py    what is noted of a running script: losses, gradients and weights of its first steps
steps.py    the steps of optimizers, and those that a script makes by hand
tensors.py  what is kept of a tensor
notes.py    the form in which it is written down
batches.py  which batch is being trained; the same random numbers for the same sample
draws.py    random tensors: recorded alone, and drawn again on workers, each its own rows
doubles.py  a script that computes in 64 bits instead of 32
recipes.py  how each of torch's random operations is drawn for the whole batch and cut
cuts.py     which rows of the whole batch's random tensor belong to a worker (pure)
saves.py    what the script saves goes to a temporary folder
patches.py  functions that are replaced during a check, and put back
compare.py  the step, and the parameter, at which two sides part (pure)
causes.py   why they part: the usual causes, each with its evidence (pure)
"""
