"""When do workers agree, and with whom? One file per policy in `policies/`; all of them pure.

    policy.py     what a policy is, what it may know about the cluster, how it is found by name
    cluster.py    what policies are told about a run's cluster
    served.py     policies that a server carries out: arrivals in, decisions out
    ledger.py     what a server holds, and how decisions change it
    elastic.py    the two forms of elastic averaging
    mixed.py      policies that workers carry out among themselves, by schedule
    detector.py   is a worker slower than it should be? one file per rule in `detectors/`
    threshold.py  how many gradients make an update, as training goes on; one file each in `thresholds/`
    graph.py      who is whose neighbour; one file per graph in `graphs/`

Nothing here knows of sockets, clocks or threads: the cluster (`train/`) and the virtual clock
(`simulate/`) run the same objects. Where a policy computes with tensors, it only uses their methods.
"""
