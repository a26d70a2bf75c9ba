"""ZeRO-R: activation checkpoints and where they are kept, activations off the device, logits that are never whole."""
