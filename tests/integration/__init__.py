"""Whole jobs: real processes, real gloo, real signals."""
