"""Messages of one communicator: sends, receives, probes, partitioned messages, and those along a topology's edges."""
