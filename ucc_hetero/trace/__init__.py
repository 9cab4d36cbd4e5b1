"""Records of what ran when, and their export."""
