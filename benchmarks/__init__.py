"""OSU-style benchmarks of ucc_hetero and its peers: ``python -m ucc_hetero.bench``. This folder is benchmarks/."""
