"""One demux of a file, in plain Python: nothing here needs NumPy, so that a process that only scans is ready soon."""
