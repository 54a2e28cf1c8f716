"""Records what happens in a run, and summarises, explains and draws it.

events.py      the typed events; all other files here work from them
run_folder.py  the paths of a run's files
readiness.py   how far each worker is, for the launcher
stacks.py      where is a worker's main thread now? For the launcher
recorder.py    writes one worker's events, cheaply
growth.py      what a run's folder has gained, for workers that do not share the record's disk
follow.py      reads the events of a run, also while it is running
arrival.py     who kept the others waiting in a step, judged by arrival
lateness.py    who was late over a whole run: in every round, now and then, or once
encoding.py    how many bytes a codec saved
overlap.py     how much of communication was hidden, and what limits a step
step_cost.py   what a step costs each worker, and which shares would balance it
decisions.py   what a run's own decisions were expected to bring, and what came of them
sync.py        what a sync policy other than full did with the workers' steps
spans.py       when each part of a step took place
worker_figures.py one worker's figures, from its steps
settled.py     the same since the last change of shares, from which lateness is judged
membership.py  who was lost, left out and back, in one line
verified.py    what the checks of --verify found, in one line
stages.py      what stages of a pipeline did with their time, and for whom they waited
summary.py     the figures of a run, from its events
reason.py      why a worker keeps the others waiting, and what helps
verdict.py     what the figures mean, in sentences
stall.py       do steps go on, and if not, who is missing?
progress.py    what is shown while a run goes on: sentences and a panel
pane.py        lines that stay at the bottom of a terminal
display.py     shows progress and the script's output in a terminal or elsewhere
damage.py      is a run's record whole?
closing.py     the closing table
plan_view.py   what a plan says that a reader wants to see
plan_tree.py   a plan as a tree of lines
trace.py       Chrome-trace JSON, for Perfetto
report.py      one self-contained HTML page
page/          the parts of that page
atomic.py      writes a file completely or not at all
"""
