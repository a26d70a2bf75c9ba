"""Numbers and names that other code reads."""

# As DeepSpeed's, whose behaviour is followed; the local part shows who answers.
__version__ = "0.19.8+zerofold"
TORCH_DISTRIBUTED_DEFAULT_PORT = 29500
CROSS_RANK = "CROSS_RANK"
CROSS_SIZE = "CROSS_SIZE"
