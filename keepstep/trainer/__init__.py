"""Lives inside the training process: session, elastic groups, gate, records. Torch and standard library only."""
