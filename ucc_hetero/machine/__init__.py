"""Devices, links and network ports of this host, and settings that they need."""
