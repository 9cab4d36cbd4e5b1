"""Thin Python classes over libucc and libucp."""
