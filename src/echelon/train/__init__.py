"""The session: how a training script takes part in a run.

join.py         turns a script into a worker
session.py      what the script talks to; its methods are in the classes that it inherits:
script_prepare.py  how a script's models, optimizers and loaders become part of the run
script_loop.py  what happens at an epoch, a pass, a batch and a step of the script's loop
script_layout.py  how models are spread over the workers, and what synchronises and checks them
script_members.py  what becomes of a session when its members change
script_checkpoints.py  how a script keeps where it is, and goes on from there
script_log.py   what a script can record
collectives.py  what a script can ask of the other workers: reduce, gather, broadcast, wait
preparable.py   what can be prepared, with which options?
loader.py       draws this worker's share of every batch
loader_rules.py what may a loader be that is shared out, and what do its samplers say?
to_device.py    data on the device of a worker
arranging.py    how gradients travel: by the sites found, and by the workers' speeds
auto_shares.py  lets shares follow the workers' measured speeds
layout_pick.py  which layout has the shortest step? parallel="auto"
fitting_memory.py  do models fit into the workers' memory?
memory_watch.py  memory of this worker's part, predicted and measured
memory_room.py  how large may a share become before memory is full?
order.py        in which order are samples drawn, alike on all workers?
batches.py      which batch does a forward pass belong to?
weighing.py     gives a backward pass the weight of its own batch
changes.py      what a worker does when others are lost
change_calls.py when are a script's functions told that members have changed?
progress.py     how far each worker is, for the launcher
own_cycles.py   what do steps take this worker, without waiting for others?
service.py      how a worker asks the launcher about the run's members
drawn.py        whose samples would be missing if a worker were lost?
admission.py    after which round do members admit a worker that comes back?
coming_back.py  how a worker that was started again takes its place in a session
state_pieces.py sends the whole state to it, in pieces with checksums
guard.py        what is checked while a script trains on several workers
drift.py        do all workers still have the same weights?
verifying.py    what the checks of --verify see of a session, and how findings are told
leaving.py      how does a worker notice that its machine will be taken away?
forgotten.py    what did the script forget to prepare?
saving.py       one whole file if all workers save to one path
streams.py      random numbers of its own for every worker
families/       keeps models synchronised: one file per family of sync policies
checks.py       can this plan work? asked by the launcher and by `join`
consistency.py  do all workers have the same model, optimizer and data?
encoding.py     which codec each model's gradients are encoded with
linear.py       linear layers that keep the factors of their gradients
factoring.py    which linear layers send factors
batchnorm.py    batch normalisation over all workers' samples
convolution.py  weight gradients that are computed while statistics travel
clock.py        where a worker's time goes, step by step
profile_job.py  what does a model cost on this worker?
thread_times.py did the training thread have a core?
record.py       a worker's events, and the start and end of a run without a launcher
far_events.py   sends the events of workers that do not share the leader's disk to its record
left_loop.py    did an exception end the script's loop, in an engine that catches it?
freed_memory.py is memory that a step frees kept for the next one?
threads.py      how many threads does each worker compute with under another launcher?
user_traceback.py  the traceback of a user's error, without Echelon's wrappers
run_state.py    the whole state of a run as a tree: collected, and put back
checkpoint_writer.py  writes it in the background, every worker its part
checkpoint_settings.py  where and how often: asked by `join`, or set by the launcher
stopping.py     do all workers save or stop now? SIGTERM, and times they agree on
resume.py       finds a checkpoint that fits, and gives it to all workers
job.py          the built-in training job of `echelon train`
probe_job.py    what every worker measures for `echelon probe`
local_worker.py one process of a trial on one machine
local_job.py    what `echelon train` trains, for such a trial
local_messages.py  what such processes are told, and what they answer
profiling.py    what kind of job is this run?
first_steps.py  what a script's own model costs, from its first steps
"""
