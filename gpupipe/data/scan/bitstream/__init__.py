"""The few header bits that the index and the decoders need; everything else is FFmpeg's and NVDEC's business."""
