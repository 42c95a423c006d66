"""Promises of Keepstep, as tests."""
