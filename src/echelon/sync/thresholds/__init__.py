"""Thresholds, one file each; `echelon.sync.threshold.THRESHOLDS` finds them by name."""
