"""Random harm to real jobs."""
