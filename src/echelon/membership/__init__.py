"""Who takes part in a run, and what becomes of a step when somebody is lost? All of it is pure.

    view.py         who belongs together: the members in order, under one number and id
    ledger.py       which samples are still to be drawn, and who draws which next
    messages.py     what workers and the coordinator say to each other
    decision.py     the commit rule: what becomes of the step under way when a view ends
    machine.py      the coordinator: when the next view begins, and with whom
    worker.py       a member: what it does when its view is fenced, and when the next one begins
    lateness.py     which members hold the others up, by their progress
    stuck.py        which members are stuck while others wait for them: what runs use today
slow.py         which members slow the others down, and are well again
    readmission.py  when a worker that was left out may come back
    respawn.py      whether a worker that has ended is started again
    survival.py     who goes on after workers were killed, and from which operation: what runs use today
    log.py          where the coordinator writes what it has decided

Nothing here uses sockets, clocks or threads: events and times come in, instructions go out. So a cluster,
the virtual clock (`simulate/churn.py`) and the tests run the same objects.
"""
