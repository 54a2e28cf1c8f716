"""How state is written to disk whole, and read back exactly, without pickle.

store.py       writes a checkpoint atomically, and finds the newest one that can be read
state_tree.py  nested state as JSON plus named tensors
"""
