"""Distributions of pauses, one file each; `echelon.cluster.delay.DELAYS` finds them by name."""
