"""The sharded step: any elementwise torch optimizer on pieces, and clipping."""
