"""How workers find each other, connect, and measure their links.

place.py       which worker is this process? Reads the variables that launchers set
rendezvous.py  workers meet at a key-value store, and report there why they failed
mesh.py        connects every worker with every other one
handshake.py   a peer proves that it knows the run's secret
tls.py         encrypted connections, on request
links.py       measures latency and bandwidth between the workers
"""
