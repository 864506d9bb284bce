"""One GPU, driven by one process: the foreground's step as a CUDA graph, background steps cut into pieces beside it."""
