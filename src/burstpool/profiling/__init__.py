"""Profiles: how long each layer of a model takes, measured here, estimated for another device, or imported.

profile.py        the artifact
interpolation.py  values between and beyond the measured batches
measure.py        measures one on a device; timing.py, memory.py and cache.py help it
estimate.py       what a measured one would be on another device
importers/        reads measurements others have made

Only measure.py and what it uses import torch.
"""
