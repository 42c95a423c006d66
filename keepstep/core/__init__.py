"""Decides: pure state machines. No clock, no I/O, no randomness, no torch; all of that comes in as arguments."""
