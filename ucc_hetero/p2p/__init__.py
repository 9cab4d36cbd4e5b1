"""Point-to-point messages of a communicator: sends, receives, probes, partitioned and neighbourhood messages."""
