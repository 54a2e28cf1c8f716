"""How workers are started, watched and ended.

worker.py     the first code that runs in a worker: run a script, write down its error
warn.py       how a worker's warnings reach the user
template.py   a process that imports torch once and forks the workers
command.py    how one worker is started
forked.py     the launcher's side of the template: process ids and exit codes of forked workers
processes.py  the worker processes of one run: start, watch, end; none is left behind
input.py      what workers read: the leader what the launcher was given, the others nothing
output.py     what the launcher shows of the leader's log
members.py    who is still in the run? The launcher's service for runs that go on when workers are lost
member_board.py  how do launcher and members see each other, beside requests and answers?
control.py    how is a running run asked to let workers leave or join? The launcher's side
control_client.py  and the side of a command
further_machines.py  which machines may join a running run, and what are they told?
join_elsewhere.py  the side of a machine that joins the run of another one
further.py    how does a worker start that joins a running run?
member_board.py  how do the launcher and the members of a run see each other?
stuck_watch.py  which workers hold the others up now?
ring_form.py   what does `--sync flexible` mean where there is no server?
failure.py    which worker failed first, and why
whereabouts.py  where are workers that others wait for, or that go on without the others?
module.py     is there a module of this name, for `run -m`?
lingering.py  do some workers end, or go on, without the others?
left_behind.py  which processes has a run left behind, and how are they ended?
few_steps.py  a few steps of a run, and then no more: what a step takes, what a script's step costs
planning.py   which machines and which job is to be planned? From a lab, hosts, a file, a run
planned.py    a run by a plan's file: is it right for this place, and what does it decide?
auto_plan.py  does a run make a plan by itself, from what is known about machines and job?
earlier_run.py  what did an earlier run of the same script on the same machines leave in the cache?
known_links.py  what did an earlier probe find about these machines?
layout_choice.py  `--parallel auto`: which layout has the shortest step for this job?
local_choice.py  `--local auto`: which way of using this machine trains most samples a second?
local_trial.py  how fast is each way of using this machine? Processes that train in turns
run.py        a whole run: folder, plan, lab, processes, summary
watching.py   and between start and end of its workers: what is shown, lost, stopped
recorded_command.py  what a run ran, for `echelon resume`
lab_course.py what happens to a lab in the course of a run: quotas, faults
quotas.py     when do the CPU quotas of a lab come into force?
log_file.py   a worker's output on a full disk: lost, without an error
launcher.py   the contract of what starts agents on other machines
launchers/    one file for each: local, ssh, mpi, slurm, ray, spark, dask
engines/      how engines start agents and end them: the parts that know an engine's own interface
function.py   `echelon.launch`: a run of a function, and what it returns
call.py       what a worker runs then
hosts.py      which machines, and how many workers on each?
remote.py     workers on other machines: ranks, where they meet, what they are told
doctor.py     will a run on these machines work? Asks each, step by step
diagnosis.py  what do a machine's answers mean for a run there?
probe.py      a whole probe: a worker on every node, what they measure, who did not answer
probe_result.py  what does a probe's raw data say?
agents/       the process on another machine that starts workers and sends back what they write
history.py    the runs of a folder, with their figures
"""
