"""The cffi extension and the libraries that it loads."""
