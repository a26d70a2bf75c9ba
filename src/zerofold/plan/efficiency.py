"""How much of a device's arithmetic is left when states have to be moved: the model of arithmetic intensity.

ait = computation / data movement          flops for each byte that is moved
efficiency = ait · bw / (ait · bw + peak)  moved and computed after each other
"""

from __future__ import annotations


def computation_per_iteration(samples: float, tokens: float, parameters: float) -> float:
    """Flops of forward, backward (twice that) and the forward again that checkpoints need.

    >>> computation_per_iteration(1, 1024, 1e9)
    8192000000000.0
    """
    return 2 * 4 * samples * tokens * parameters


def parameter_intensity(samples: float, tokens: float) -> float:
    """Of parameters and gradients: 16-bit, loaded for two forwards and a backward, gradients stored once.

    >>> parameter_intensity(1, 1024)
    1024
    """
    return samples * tokens


def optimizer_intensity(samples: float, tokens: float) -> float:
    """Of the optimizer's states: 16 bytes a parameter, read and written.

    >>> optimizer_intensity(1, 1024)
    256.0
    """
    return samples * tokens / 4


def checkpoint_intensity(hidden: float, checkpoint_every: float) -> float:
    """Of activation checkpoints: the input of every `checkpoint_every`-th block, stored and loaded once.

    >>> checkpoint_intensity(2048, 1)
    49152
    """
    return 24 * hidden * checkpoint_every


def efficiency(intensity: float, bandwidth: float, peak: float) -> float:
    """The part of `peak` (flops a second) that is reached at `bandwidth` (bytes a second).

    >>> round(efficiency(1024, 70e9, 70e12), 3)
    0.506
    """
    moved = intensity * bandwidth
    return moved / (moved + peak)


def bandwidth_for(wanted: float, intensity: float, peak: float) -> float:
    """The bytes a second that an efficiency takes.

    >>> round(bandwidth_for(0.5, 1024, 70e12) / 1e9, 1)
    68.4
    """
    if not 0 < wanted < 1:
        raise ValueError(f"efficiency {wanted} is never reached; ask for one between 0 and 1")
    return wanted * peak / (intensity * (1 - wanted))
