"""The update of states that are not on the device: on the host's cores, through the device, from a file."""

from zerofold.optim.away.start import DeviceMemory, updates_of

__all__ = ["DeviceMemory", "updates_of"]
