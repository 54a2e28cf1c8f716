"""The session: how a training script takes part in a run.

join.py         a script becomes a worker
session.py      what the script talks to: prepare, epochs, reduce, save, load
talk.py         what a script can ask of the other workers directly
loader.py       draws this worker's share of every batch
agree.py        do all workers have the same model, optimizer and data?
in_step.py      keeps models the same on all workers
late.py         updates that wait until somebody needs them: overlap="step"
linear.py       linear layers that keep the factors of their gradients
factoring.py    which of them send these
batchnorm.py    batch normalisation over all workers' samples
clock.py        where a worker's time goes, step by step
resume.py       what a run needs to go on as if it had never stopped
checkpoint.py   files that are whole or not there
state_tree.py   nested state as JSON and tensors, and back
job.py          the built-in training job of `echelon train`
"""
