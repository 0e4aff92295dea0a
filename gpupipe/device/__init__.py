"""The engine room: what the machine has, streams, kernels and textures. No word of video or of models here."""
