"""Other architectures to compare with, at the sizes of a `model` node."""
