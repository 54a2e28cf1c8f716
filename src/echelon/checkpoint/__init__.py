"""Writes state to disk atomically and reads it back exactly, without pickle.

store.py       writes a checkpoint atomically, and finds the newest readable one
state_tree.py  converts nested state to JSON plus named tensors, and back
"""
