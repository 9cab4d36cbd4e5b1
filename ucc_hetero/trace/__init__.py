"""Records of calls (flight recorder, timeline) and their export."""
