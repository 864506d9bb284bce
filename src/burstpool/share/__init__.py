"""Sharing: background training in what a foreground job leaves, within a slowdown budget."""
