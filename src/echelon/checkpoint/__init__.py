"""Writes state to disk atomically and reads it back exactly, without pickle.

store.py       writes a checkpoint of one or several workers atomically, and finds the newest readable one
part.py        one worker's part: copied into memory in the layout of its file, then written and hashed
manifest.py    state.json: all that is not a tensor, and the checksums of all parts
folder.py      the folders: hidden while they are written, renamed when complete, removed when abandoned
retention.py   which checkpoints stay: the newest ones, and the best by a figure
state_tree.py  converts nested state to JSON plus named tensors, and back
"""
