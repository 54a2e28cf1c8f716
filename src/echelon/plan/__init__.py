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
equal_power.py
            groups of unequal nodes whose total power is equal
hierarchy.py
            levels of groups, the collective that sums along them, and candidates for a search
job.py      what a training job costs: computing, gradients, memory
cluster_file.py  reads and writes the file that says what machines, links and job there are
told.py     what a lab's file tells about its machines
strategy.py one way to run a job on a topology, and what it would take
groups.py   which workers form a group, as the user says
balance.py  which shares let all workers arrive together?
shares.py   a batch cut into one share per worker, an epoch cut into batches
plan.py     the whole assignment of a run, and its form on disk
"""
