"""The built-in job: a byte-level GPT that learns the source text of the Python standard library."""
