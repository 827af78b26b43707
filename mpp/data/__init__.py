"""Images from disk or hub to uint8 batches: sources, decoding, transforms, order, loading."""
