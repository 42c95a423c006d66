"""The shell of one job: hears the agents, asks the core, writes the ledger, carries out the decisions."""
