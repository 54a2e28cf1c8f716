"""Runs the policies of each family on the virtual clock; one file per family.

reduce.py  all workers reduce their gradients in every step
serve.py   workers push to a virtual server and pull from it
mix.py     workers average their weights with each other by a schedule
share.py   all workers update the same memory
levels.py  one policy inside groups, another one between them
"""
