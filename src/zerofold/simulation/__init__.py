"""Rank 0 of any number of ranks in one process: the real schedule, on wires whose time is modelled."""

from zerofold.simulation.engines import Training
from zerofold.simulation.result import Simulation
from zerofold.simulation.run import World, simulate

__all__ = ["Simulation", "Training", "World", "simulate"]
