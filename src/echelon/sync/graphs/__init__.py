"""Graphs of neighbours, one file each; `echelon.sync.graph.GRAPHS` finds them by name."""
