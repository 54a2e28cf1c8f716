"""The graphs of neighbours.

complete.py  every worker with every other
edges.py     the pairs that the user gives
matching.py  new random pairs in every round
random.py    a random connected graph
ring.py      a ring in the order of ranks
torus.py     rows and columns that close to rings
"""
