"""What Keepstep must know about PyTorch's own classes, each in a file of its own."""
