"""How workers find each other, connect, and measure their links.

place.py       reads this worker's rank and the leader's address from the launcher's variables
foreign.py     what do the variables of MPI and Slurm say?
resolve.py     does the leader's name lead to an address?
secret.py      where does the run's secret come from?
meeting.py     where is the run's meeting? The leader opens it, the others find it
service.py     the leader answers requests of workers that have proved themselves
visit.py       a worker asks the leader, over one connection
board.py       values by key, and counters: requests, replies, and what answers them
strangers.py   callers that have not proved themselves yet, and their limits
rendezvous.py  workers sign in at the meeting, and report there why they failed
mesh.py        connects every worker with every other worker over TCP
stream.py      opens streams from some workers to the leader, besides those connections
credentials.py with what a worker proves that it belongs to a view
handshake.py   a peer proves that it knows the run's secret
certs.py       makes an authority and certificates
tls.py         optional encryption: certificates and TLS sockets
links.py       measures latency and bandwidth between the workers
flows.py       measures one flow alone, and several at the same time, so that shared links show
clocks.py      by how much do the workers' clocks differ?
"""
