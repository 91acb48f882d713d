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
from tllm_wmtp.cli import (
    bench,
    build,
    data,
    demo,
    generate,
    info,
    inspect,
    plan,
    probe,
    quantize,
    report,
    serve,
    triton_repo,
    trtllm,
)
from tllm_wmtp.cli.arguments import Parser
from tllm_wmtp.errors import WmtpError

INTERNAL_ERROR, INTERRUPTED = 70, 130


def build_parser() -> Parser:
    parser = Parser(prog="wmtp", description="Speculative decoding with a windowed MTP draft.")
    parser.add_argument("--version", action="version", version=f"wmtp {__version__}")
    parser.add_argument("--debug", action="store_true", help="show logs and tracebacks")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for module in (
        generate,
        demo,
        bench,
        info,
        build,
        inspect,
        data,
        plan,
        probe,
        quantize,
        report,
        serve,
        triton_repo,
        trtllm,
    ):
        module.add_parser(commands)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    args = build_parser().parse_args(argv)
    log = logging.getLogger("tllm_wmtp")
    if args.debug:
        logging.basicConfig(level=logging.INFO)
    elif not log.handlers:
        log.addHandler(logging.NullHandler())  # a failing request is reported, not traced
    if sys.stdout is None:
        return _fail(2, "standard output is closed: the answer goes there; open it", False)
    try:
        code: int = args.run(args)
        sys.stdout.flush()
        return code
    except WmtpError as error:
        return _fail(2, str(error), args.debug)
    except KeyboardInterrupt:
        return _fail(INTERRUPTED, "interrupted", False)
    except BrokenPipeError:
        _discard_stdout()  # the reader has left
        return 0
    except OSError as error:
        _discard_stdout()
        what = error.filename or "standard output"
        return _fail(
            2, f"{what}: it must be usable ({error.strerror}); check space and rights", args.debug
        )
    except MemoryError:
        return _fail(
            2, "out of memory: the model and its caches must fit; lower the context", False
        )
    except Exception as error:
        if args.debug:
            raise
        message = f"{type(error).__name__}: {error}: a defect of this program; run wmtp --debug"
        return _fail(INTERNAL_ERROR, message, False)


def _discard_stdout() -> None:
    """Nothing more can be written, not even what is flushed at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _fail(code: int, message: str, show_traceback: bool) -> int:
    if show_traceback:
        logging.getLogger("tllm_wmtp").exception("failed")
    if sys.stderr is not None:
        sys.stderr.write(f"wmtp: {message}\n")
    return code
