"""The command line: one file per command; nothing here loads torch."""
