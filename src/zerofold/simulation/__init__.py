"""Rank 0 of any number of ranks in one process: the real schedule, on wires whose time is modelled."""
