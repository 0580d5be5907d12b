"""Being here puts this folder on sys.path, so that tests of all parts can use `tiny_model`."""
