"""The memory of a training step: set aside, reported, watched, and how large a batch fits it."""
