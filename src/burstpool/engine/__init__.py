"""Engines: who starts the worker processes, watches them and ends them."""
