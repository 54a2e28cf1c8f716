"""Who does how much, and how workers communicate: pure decisions, values in and values out.

topology.py what machines and links there are
measured.py what a probe measured between nodes: pairs alone, and flows at the same time
fair.py     which rate each of several flows gets
distances.py
            which nodes are near each other, by measurements
fit.py      which links explain the measurements, for given sites
sites.py    which nodes share a site, and what joins sites; which flows to measure next
site_reasons.py
            what was found about sites, in sentences
equations.py
            equations (1) to (5) of the first seed: serial, or how many groups
grouping.py who forms a group: by transfer cost and compute power, by equal power, at random
group_rule.py
            which groups does the user ask for, by cost, by equal power or at random?
equal_power.py
            groups of unequal nodes whose total power is equal
hierarchy.py
            levels of groups, the collective that sums along them, and candidates for a search
job.py      what a training job costs: computing, gradients, memory
cluster_file.py  reads and writes the file that says what machines, links and job there are
told.py     what a lab's file tells about its machines
strategy.py one way to run a job on a topology, and what it would take
bound.py    what limits a job: computing, memory or communication?
reach.py    which nodes can take part, and which of them together?
subsets.py  which sets of nodes are worth trying?
explore.py  where does a search go, from what was tried to what is tried next?
ways.py     in which ways could some nodes run a job?
servers.py  how many parameter servers should there be?
trials.py   every strategy that a search tries, with its prediction
static_choice.py
            what do the first seed's equations say of a job on these machines?
search.py   which strategy is best?
make.py     how the result of a search becomes a plan, with a reason for each choice
predict/    what would a step take?
groups.py   which workers form a group, as the user says
share_times.py how does a step's time depend on the share?
balance.py  which shares let all workers arrive together?
arrange.py  who are neighbours, and how do they sum? From links
neighbours.py in which order are workers neighbours? By machine and site
congestion.py do gradients travel slower than before?
owners.py   who sums, if workers are unequal?
shares.py   a batch cut into one share per worker, an epoch cut into batches
optimal_shares.py
            which whole shares are best, by cost, link and memory?
plan.py     the whole assignment of a run, and its form on disk
placed.py   what a plan's file says about machines and links
plan_file.py a plan's file as a person reads and edits it
check_file.py what contradicts itself in a plan that was edited by hand?
toml_lines.py on which line of a TOML text does each key stand?
"""
