"""Faces that users of other libraries know: DeepSpeed's engine, FSDP's wrapper, Accelerate's loop."""
