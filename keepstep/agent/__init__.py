"""The shell of one node: starts and watches worker processes, keeps what must outlive them."""
