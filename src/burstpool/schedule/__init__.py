"""Schedules: a plan as ordered actions a device; checked, timed and drawn here, run in `run/`."""
