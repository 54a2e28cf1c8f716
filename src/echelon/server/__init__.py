"""The parameter server on the cluster: who says what to whom, and what each makes of it.

protocol.py     the messages between workers and servers
recipe.py       an optimizer as a description that another process can build it from
coordinator.py  asks the policy's rule about every arrival, and gives its decisions as orders
keeper.py       one server process: shards, their replicas, and the coordinator on the first of them
client.py       a worker's side: takes steps by the servers, and weights in return
layout.py       where parameters lie in the model, on servers and on the way
outbox.py       what a worker pushes, piece by piece, while backward goes on
line.py         a worker's post to the servers
coding.py       gradients and weights in fewer bytes, between a worker and the servers
"""
