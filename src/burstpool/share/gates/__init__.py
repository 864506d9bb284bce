"""Background jobs in processes of their own, behind gates that the foreground holds: CPUs, and several GPUs."""
