"""The engine room: what the machine has, streams, kernels and memory. No word of video or of models here."""
