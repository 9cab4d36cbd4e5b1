"""Ways for bytes between ranks: shared segments, ring buffers, bounce buffers."""
