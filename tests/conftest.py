"""Its presence puts this folder on the import path, for the helpers beside it."""
