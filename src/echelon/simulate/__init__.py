"""What would happen? A virtual clock that runs real policies on real gradients, in one process.

    setting.py   what is simulated: workers, model, data, delays, how long
    profile.py   how long things take: a gradient, the server's work, a transfer; measured or given
    clock.py     virtual time: what is due next
    order.py     in which order the samples are taken
    learner.py   a model as one flat tensor: its gradient, and how good it is
    scene.py     what every run has: workers, their pace and links, what is counted and told
    served.py    runs policies that a server carries out
    mixed.py     runs policies of averages between workers
    together.py  runs `full`: one gradient of all, every step
    shared.py    runs `hogwild`: all workers write to one memory
    levels.py    groups that act as one, and averages on two levels
    ring.py      how long an average takes, and giving a group new weights
    run.py       `simulate`: several policies from the same start, on the same data
    outcome.py   what came out: curves, totals, and comparisons
    record.py    a server's arrivals and decisions as events
    replay.py    feeds a recorded run to a policy, and compares its decisions

The same setting gives the same result, to the bit.
"""
