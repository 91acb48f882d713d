"""One module per section of the report; each builds it from the results."""
