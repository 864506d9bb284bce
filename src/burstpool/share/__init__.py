"""Sharing: background training in what a foreground job leaves, within a slowdown budget.

base.py        what is asked for, and what comes of it; which way serves which device
budget.py      the controller that all ways share, pure; of base_time.py and prices.py
cpu.py         the way for CPU workers: gates/
cuda.py        the way for GPUs: gpu/ where one process drives one GPU, gates/ under a plan of several
interference/  what it would bring, before anything is run
"""
