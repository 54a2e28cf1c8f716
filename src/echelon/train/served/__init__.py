"""The parameter server on the cluster: who says what to whom, and what each makes of it.

protocol.py     the letters between workers and servers
recipe.py       an optimizer as a description that another process can build it from
coordinator.py  asks the policy's rule about every arrival, and gives its decisions as orders
keeper.py       one server process: shards, their replicas, and the coordinator on the first of them
client.py       a worker's side: pushes while backward goes on, and takes weights
line.py         a worker's post to the servers
coding.py       gradients and weights in fewer bytes, between a worker and the servers
"""
