"""Plans: which devices run each part of a model, with which samples, and how that is decided."""
