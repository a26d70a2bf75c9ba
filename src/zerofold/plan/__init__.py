"""What a training run will take, before it is started: bytes, traffic and time, for every row of the table."""
