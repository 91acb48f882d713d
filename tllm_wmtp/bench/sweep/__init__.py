"""``wmtp bench run``: a suite of inputs, arms and settings; one row of results per cell.

``suite.py`` reads and checks the YAML, ``cells.py`` says what a cell is, ``runner.py`` runs the
cells on a target (``embedded.py``, ``openai.py``, ``triton.py``), ``protocol.py`` has the
statistics, and ``rows.py`` and ``store.py`` the file.
"""
