"""The checks that `--verify` chooses by name.

gradients.py  finite gradients and usual norms
weights.py    the same weights and optimizer states on all workers
replay.py     a backward pass computed again gives the same gradients
replicate.py  workers with the same samples compute the same gradients
"""
