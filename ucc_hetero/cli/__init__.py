"""The commands of ``python -m ucc_hetero``."""
