"""Running a schedule for real: one process a device, tensors over torch.distributed."""
