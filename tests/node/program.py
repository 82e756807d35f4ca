"""A training program: what the pods of the real node run. `python program.py FOLDER [OPTION…]`.

It writes what it sees and when to a file of its own in FOLDER, one JSON object a line: first its variables, then the
time, again and again for as long as it lives. So the last line tells when it was last alive, however it ended.
It runs until there is a file `<job>.end` in FOLDER, or for `--seconds`. Standard library only, and no other file: its
image has nothing else.
"""

import argparse
import json
import os
import pathlib
import signal
import subprocess
import sys
import time

PREFIXES = ("DISPATCH_", "PET_")


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=pathlib.Path)
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--ignore-sigterm", action="store_true")
    parser.add_argument("--allocate", type=int, default=0, metavar="MIB")
    parser.add_argument("--in-child", action="store_true", help="have a child allocate, and outlive it")
    parser.add_argument("--exit-code", type=int, default=0)
    options = parser.parse_args()
    exit_code: int = options.exit_code

    handler = signal.SIG_IGN if options.ignore_sigterm else lambda *_: sys.exit(143)
    signal.signal(signal.SIGTERM, handler)
    pod = os.uname().nodename
    end = options.folder / f"{pod.rpartition('-node-0-')[0]}.end"
    # The host name is the same in each attempt.
    with (options.folder / f"{pod}.{os.environ.get('DISPATCH_EPOCH', 'none')}.{time.time_ns()}.run").open("w") as file:

        def write(**entry: object) -> None:
            file.write(json.dumps({"time": time.time(), **entry}) + "\n")
            file.flush()

        write(pod=pod, variables={k: v for k, v in os.environ.items() if k.startswith(PREFIXES)})
        print("started", flush=True)
        if options.allocate and options.in_child:
            text = f"x = bytearray({options.allocate} << 20)"
            code = subprocess.run([sys.executable, "-c", text], check=False).returncode
            print("the child ended with", code, flush=True)
        elif options.allocate:
            bytearray(options.allocate << 20)
        started = time.monotonic()
        while time.monotonic() - started < options.seconds and not end.exists():
            time.sleep(0.02)
            write()
        write(exit_code=exit_code)
    return exit_code


if __name__ == "__main__":
    sys.exit(main())
