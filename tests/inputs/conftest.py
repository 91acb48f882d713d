"""Its presence puts this folder on the import path, for the helper beside it."""
