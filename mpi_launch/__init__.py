"""Installed as ucc_hetero.launch: starting jobs, and the emulated cluster that rehearses them."""
