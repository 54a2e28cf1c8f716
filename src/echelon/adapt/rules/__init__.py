"""The rules of `echelon adapt`: one file each, found by being there.

A rule looks for one habit of training scripts; the first line of its class's docstring is its help. Rules
do not know each other: what they share, they ask the `Reading`.
"""
