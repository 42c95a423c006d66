"""The shell of one node: starts workers, sees them die, keeps what must outlive them."""
