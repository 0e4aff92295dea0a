"""The river: from files to batches, in the order in which a frame travels it. See ``gpupipe/README.md`` for the map."""
