"""Moves tensors between workers: manifest, stripes, checksums. Only raw bytes travel."""
