"""Models: the user's module as a graph of layers that can each be run on its own."""
