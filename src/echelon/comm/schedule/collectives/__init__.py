"""The collectives, one file each, as schedules of steps. `comm/collective.py` is their contract."""
