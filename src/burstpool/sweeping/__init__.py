"""Sweeps: many trials of one job, trained in arrays. Start at sweep.py; what to train next is decided in search/ and
policy.py, which know no torch; runner.py acts on it."""
