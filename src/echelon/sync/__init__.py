"""Synchronisation policies: when workers synchronise, and with whom. All of them are pure.

    policy.py     the contract of a policy, what it knows of the cluster, and the registry
    cluster.py    what a policy knows of a run's cluster, from the plan
    delay_rate.py which learning rate is safe with delayed gradients
    policies/     the policies, one file each
    families/     what the policies of a family have in common
    detector.py   the contract of detectors, which tell slow workers from normal ones
    detectors/    the detectors, one file each
    threshold.py  the contract of thresholds: how many gradients make an update
    thresholds/   the thresholds, one file each
    graph.py      the contract of graphs: which workers are neighbours
    graphs/       the graphs, one file each

Nothing here uses sockets, clocks or threads, so that real training (`train/`) and the virtual clock
(`simulate/`) run the same objects. A policy that computes with tensors uses only their methods.
"""
