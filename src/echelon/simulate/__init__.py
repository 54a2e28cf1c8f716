"""Simulates policies: real policies and real gradients on a virtual clock, in one process.

    setting.py    what is simulated: workers, model, data, delays, seconds
    profile.py    how long a gradient, the server's work and a transfer take; measured or given
    clock.py      virtual time: a queue of actions
    order.py      the order in which samples are taken
    learner.py    a model as one flat tensor: its gradient and its evaluation
    late.py       how much later transfers arrive: jitter and loss
    virtual.py    the virtual cluster: workers with speeds, delays and links; counts and curve
    families/     runs the policies of each family
    averaging.py  how long averages and broadcasts take
    run.py        `simulate`: several policies with the same weights, data and delays
    sweep.py      runs every policy with every seed, in several processes
    outcome.py    the results: curves, totals, and averages
    compare.py    compares policies with the first one, in figures and sentences
    page.py       the HTML page about a simulation
    page.css      the page's additional styles
    record.py     a server's arrivals and decisions as events
    replay.py     feeds recorded arrivals to a policy and compares its decisions
    recorded_cluster.py what does a run's cluster.toml add to its record?
    recorded_job.py which machines, links and job does a recorded run show?
    what_if.py    what would a recorded run take if something were different?
    churn.py      what losses cost: the state machines of `membership/` on the virtual clock
    recorded.py   replays a run of real training from its folder

The same setting gives the same result, to the bit.
"""
