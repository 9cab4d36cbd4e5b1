"""Topology, cost and choice: which plan a collective runs. Nothing outside Python and numpy."""
