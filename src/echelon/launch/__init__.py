"""How workers get started, watched and ended.

worker.py   the first code that runs in a worker: run a script, keep its error
server.py   a process that only sums for the workers
crew.py     the worker processes of one run: start, watch, end; none is left behind
failure.py  which worker failed first, and why (pure)
run.py      a whole run: folder, plan, lab, crew, faults, summary
"""
