"""What would a step take? Strategies are costed from measured machines, links and jobs. Pure.

engine_costs.py  what Echelon's own software costs, and CPU quotas
flows.py         who sends how much to whom in a collective, phase by phase
network.py       links that flows share: bytes and seconds on each
buckets.py       which gradients travel together, when they are ready, and in which form
workers.py       computing and communicating on one CPU budget
step.py          the simulation of steps
policies.py      policies that do not reduce gradients in every step
predict.py       the prediction of a strategy, and of many steps with noise
scaling.py       what more or faster machines would bring
"""
