"""The sharded step: any elementwise optimizer on pieces, by owner any other, clipping, and Lion."""
