"""Checkpoints: saved by each rank alone, loaded anywhere, never executed."""
