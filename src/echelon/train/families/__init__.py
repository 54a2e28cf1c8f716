"""How models and optimizers are kept synchronised: one file per family of sync policies.

synchronizer.py  the contract: what the session asks of every family
choose.py        which family a policy belongs to, and what the policy is told about the cluster
reduce.py        gradients are reduced during backward
serve.py         a parameter server: each step is a push and a pull
mix.py           workers average their weights by a schedule
share.py         all workers update one memory
levels.py        one policy inside groups, another one between them
spread.py        no policy: a layout gives each worker some layers of the model
shard.py         no policy: a layout gives each worker slices of the states
slice_steps.py   steps of optimizers on slices, and whole states for checkpoints
"""
