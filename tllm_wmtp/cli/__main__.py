"""``python -m tllm_wmtp.cli`` is the ``wmtp`` command."""

import sys

from tllm_wmtp.cli import main

sys.exit(main())
