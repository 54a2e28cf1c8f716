"""What happened: events, the folder they live in, and what is made of them.

events.py      the typed facts; everything else here reads nothing else
run_folder.py  where a run leaves its traces
recorder.py    writes one worker's events, cheaply
follow.py      reads the events of a run while it goes on
arrival.py     who kept the others waiting, judged by arrival
coding.py      how much smaller a codec made what was sent
hiding.py      how much of communication was hidden, and what limits a step
agreement.py   what a sync policy other than full made of the workers' steps
spans.py       when each part of a step took place
summary.py     the figures of a run, from its events
verdict.py     what the figures mean, in a sentence
progress.py    the live display and the closing table
trace.py       Chrome-trace JSON, for Perfetto
report.py      one self-contained HTML page; page/ draws its parts
write.py       files that are whole or not there
"""
