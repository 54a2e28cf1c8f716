"""How is one model spread over several workers?

layout.py      an expression of dimensions, and who is in which replica and stage
dimension.py   the contract of a dimension
strategies/    the dimensions, one file each
schedule.py    in which order a stage computes micro-batches
schedule_time.py  how long a schedule takes on unequal workers and links
cut.py         where the layers are cut, so that unequal workers finish together
chain.py       a model as a chain of layers
traced.py      any module as such a chain, by torch.fx
measure.py     what each layer costs on this worker
masks.py       the same dropout masks as in one process
pass_times.py  when a stage computed which pass, and how long it waited
again.py       a forward pass once more, exactly
micro.py       a call of the model in micro-batches
losses.py      losses that are computed micro-batch by micro-batch
awaited.py     an output that waits for its loss, so that an unchanged loop runs any schedule
passing.py     values from stage to stage
stage.py       one worker's part of a pipeline
stage_chunk.py one run of layers of a worker: its forward passes and its links
late.py        backward passes that come late, so that a pipeline is not emptied
backward.py    one stage's backward passes of one call
split.py       a backward pass in two parts: gradients of inputs first, of weights later
slices.py      which elements of a parameter each worker has
shards.py      a model whose states are divided among workers
slice_sums.py  sums of gradients, slice by slice
stage_shards.py  one stage whose states are divided among its workers
gathered_layers.py  when a stage's divided parameters are whole
value_gather.py  gathers of divided parameters
gathered.py    when divided parameters are whole
offload.py     optimizer states in mapped files
holdings.py    which worker holds which parameters
norms.py       the norm of a whole model's gradients
memory.py      what a layout needs on each worker, and whether it fits
candidates.py  which layouts `auto` considers
layout_probe.py  what layers and exchanges cost, for `auto`
layout_cost.py what a step would take with a layout; the ranking
local_way.py   in which ways one machine can compute a batch
threaded.py    replicas of a model in the threads of one process
spread.py      one model spread over the workers: cut at its first call, then run
"""
