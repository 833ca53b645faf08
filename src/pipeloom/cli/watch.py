"""`pipeloom watch`: a page in the browser that shows a run while it trains."""

import signal
import threading
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from pipeloom.cli.common.parser import Parser


def main(argv: Sequence[str]) -> int:
    """Serve the page until a signal ends it; returns the exit code."""
    parser = Parser(
        prog="pipeloom watch",
        description="Show a run in the browser while it trains: loss, throughput, bubble, memory, the last timeline, "
        "and what each process does. The page is the report of the run so far. It is served on the loopback "
        "interface, at an address with a token, and changes nothing. Ctrl-C ends it; the run goes on.",
        examples="""
            pipeloom watch runs/corpus
            pipeloom watch runs/corpus --port 8765      then, elsewhere: ssh -L 8765:127.0.0.1:8765 HOST
        """,
    )
    parser.add_argument("output_dir", type=str, metavar="DIR", help="output directory of a run")
    parser.add_argument("--port", type=int, default=0, metavar="N", help="port (default: a free one)")
    parser.add_argument(
        "--seconds", type=float, default=2.0, metavar="X", help="refresh interval in seconds (default: 2)"
    )
    options = parser.parse_args(list(argv))
    if not 0 <= options.port < 65536:
        parser.error(f"--port {options.port}: must be from 0 to 65535")
    if not 0.1 <= options.seconds <= 3600:
        parser.error(f"--seconds {options.seconds:g}: must be from 0.1 to 3600")
    directory = Path(options.output_dir)
    if not directory.is_dir():
        parser.error(f"{directory} is not a directory. Pass the --output_dir of `pipeloom train`")
    from pipeloom.watch.run_view import RunView
    from pipeloom.watch.server import served

    ended = threading.Event()
    with ExitStack() as stack:
        stack.callback(signal.signal, signal.SIGTERM, signal.signal(signal.SIGTERM, lambda *_: ended.set()))
        address = stack.enter_context(served(RunView(directory, options.seconds), options.port))
        print(f"{directory} at {address}\nCtrl-C ends this page; the run goes on.", flush=True)
        try:
            ended.wait()
        except KeyboardInterrupt:
            print()
    return 0
