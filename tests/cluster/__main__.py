"""The test cluster's command line: `python3 -m tests.cluster up DIR | down DIR | list DIR`."""

from __future__ import annotations

import argparse
import pathlib
import sys

from . import local, supervisor


def main(argv: list[str]) -> int:
    """Exit code 0: done; 1: it could not be, and stderr says why; 2: usage; 130: interrupted, and nothing is left."""
    parser = argparse.ArgumentParser(prog="python3 -m tests.cluster", description=__doc__)
    verbs = parser.add_subparsers(dest="verb", required=True)
    up = verbs.add_parser("up", help="start a cluster whose files are in DIR (built first, when it is the first time)")
    up.add_argument("--provider", choices=("local", "kind"), default="local")
    up.add_argument("--real-node", action="store_true", help="add a node with a real kubelet")
    down = verbs.add_parser("down", help="end the cluster of DIR; its logs stay in DIR/logs")
    listing = verbs.add_parser("list", help="show the processes of the cluster of DIR")
    for verb in (up, down, listing):
        verb.add_argument("folder", metavar="DIR", type=pathlib.Path)
    arguments = parser.parse_args(argv)
    try:
        if arguments.verb == "up":
            return _up(arguments)
        if arguments.verb == "down":
            local.down(arguments.folder)
            return 0
        return _list(arguments.folder)
    except (local.LocalError, supervisor.SupervisorError) as error:
        print(f"test cluster: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("test cluster: interrupted; nothing is left running", file=sys.stderr)
        return 130


def _up(arguments: argparse.Namespace) -> int:
    if arguments.provider == "kind":
        raise local.LocalError("the provider kind is not supported yet: use --provider local")
    if arguments.real_node:
        raise local.LocalError("--real-node is not supported yet")
    cluster = local.start(arguments.folder, progress=lambda line: print(line, flush=True))
    cluster.disown()
    print(f"use it:  export KUBECONFIG={cluster.kubeconfig}")
    print(f"end it:  python3 -m tests.cluster down {cluster.folder}")
    return 0


def _list(folder: pathlib.Path) -> int:
    cluster = local.attach(folder)
    ports = cluster.components.ports
    print(f"{'COMPONENT':<26}{'PID':<9}{'PORT':<7}STATE")
    for process in cluster.status():
        state = process.state if process.exit_code is None else f"{process.state}, exit code {process.exit_code}"
        print(f"{process.name:<26}{process.pid:<9}{ports.get(process.name, ''):<7}{state}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
