"""Ways for bytes between ranks: ring buffers, bounce buffers, network threads."""
