"""Inside the training process: session, elastic groups, gate, state. Needs only torch and the standard library."""
