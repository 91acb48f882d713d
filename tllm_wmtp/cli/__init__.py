"""The ``wmtp`` command.

Exit codes: 0 done; 1 the property that the command checks does not hold; 2 bad input, with one
line that gives the value, the rule and the remedy; 70 a defect of this program; 130 interrupted.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Sequence

from tllm_wmtp import __version__
from tllm_wmtp.cli import bench, demo, generate, info
from tllm_wmtp.cli.arguments import Parser
from tllm_wmtp.errors import WmtpError

INTERNAL_ERROR, INTERRUPTED = 70, 130


def build_parser() -> Parser:
    parser = Parser(prog="wmtp", description="Speculative decoding with a windowed MTP draft.")
    parser.add_argument("--version", action="version", version=f"wmtp {__version__}")
    parser.add_argument("--debug", action="store_true", help="show logs and tracebacks")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for module in (generate, demo, bench, info):
        module.add_parser(commands)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    args = build_parser().parse_args(argv)
    log = logging.getLogger("tllm_wmtp")
    if args.debug:
        logging.basicConfig(level=logging.INFO)
    elif not log.handlers:
        log.addHandler(logging.NullHandler())  # a failing request is reported, not traced
    try:
        code: int = args.run(args)
        sys.stdout.flush()
        return code
    except WmtpError as error:
        return _fail(2, str(error), args.debug)
    except KeyboardInterrupt:
        return _fail(INTERRUPTED, "interrupted", False)
    except BrokenPipeError:
        # The reader has left; nothing more can be written, not even at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except MemoryError:
        return _fail(
            2, "out of memory: the model and its caches must fit; lower the context", False
        )
    except Exception as error:
        if args.debug:
            raise
        message = f"{type(error).__name__}: {error}: a defect of this program; run wmtp --debug"
        return _fail(INTERNAL_ERROR, message, False)


def _fail(code: int, message: str, show_traceback: bool) -> int:
    if show_traceback:
        logging.getLogger("tllm_wmtp").exception("failed")
    sys.stderr.write(f"wmtp: {message}\n")
    return code
