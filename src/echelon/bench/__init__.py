"""Measurements that compare strategies on one machine.

settings.py     the options of `echelon bench codecs`
codecs.py       trains a model once with each codec
codecs_page.py  writes the result as an HTML page
step.py         the step of a model with DDP and with Echelon, and what it consists of
step_words.py   what the difference is made of, in words
step_notes.py   what workers are asked, and what they note
step_worker.py  one worker: trains a model both ways in turns
step_trainer.py one way on one worker: a model, trained step by step
step_plain.py   the process of a worker that trains without Echelon
local.py        samples/s of every way in which one machine can train a model
workloads.py    the models, and their batches
scripts.py      the step of a script with DDP, and of its counterpart with Echelon
script_notes.py what workers are asked for scripts, and what they note
script_worker.py one worker: runs a script and times its optimizer steps
"""
