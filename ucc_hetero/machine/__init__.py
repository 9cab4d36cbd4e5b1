"""Devices, links and network ports of this host."""
