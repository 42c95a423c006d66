"""A virtual cluster that runs the very same core as the real shells, with faults by seed."""
