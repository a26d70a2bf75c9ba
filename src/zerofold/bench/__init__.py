"""Side-by-side measurements: the same work on PyTorch's and DeepSpeed's engines and on zerofold's rows."""
