"""Detectors of slow workers, one file each; `echelon.sync.detector.DETECTORS` finds them by name."""
