"""What the policies of a family have in common. Everything here is pure.

serve.py    policies of a parameter server: arrivals in, decisions out
shard.py    the state of a server's shard, and how decisions change it
mix.py      policies by which workers average weights with each other
elastic.py  the two forms of elastic averaging
"""
