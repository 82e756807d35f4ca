"""The test cluster's command line: `python3 -m tests.cluster up DIR | down DIR | list DIR | build`."""

from __future__ import annotations

import argparse
import pathlib
import sys

from . import kind, local, providers, real_node, supervisor
from .cluster import Cluster, ClusterError


def main(argv: list[str]) -> int:
    """Exit code 0: done; 1: it could not be, and stderr says why; 2: usage; 130: interrupted, and nothing is left."""
    parser = argparse.ArgumentParser(prog="python3 -m tests.cluster", description=__doc__)
    verbs = parser.add_subparsers(dest="verb", required=True)
    up = verbs.add_parser("up", help="start a cluster whose files are in DIR (built first, when it is the first time)")
    up.add_argument(
        "--provider",
        choices=providers.NAMES,
        help="local: processes on this machine; kind: in Docker; without it: local, or kind if that is there and no go",
    )
    up.add_argument("--real-node", action="store_true", help="add a node with a real kubelet (needs root)")
    down = verbs.add_parser("down", help="end the cluster of DIR; its logs stay in DIR/logs")
    listing = verbs.add_parser("list", help="show the processes of the cluster of DIR")
    verbs.add_parser("build", help="build what a local cluster, and where it can run the real node, is made of")
    for verb in (up, down, listing):
        verb.add_argument("folder", metavar="DIR", type=pathlib.Path)
    arguments = parser.parse_args(argv)
    try:
        if arguments.verb == "up":
            return _up(arguments)
        if arguments.verb == "down":
            providers.down(arguments.folder)
            return 0
        if arguments.verb == "build":
            return _build()
        return _list(arguments.folder)
    except (ClusterError, supervisor.SupervisorError) as error:
        print(f"test cluster: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("test cluster: interrupted; nothing is left running", file=sys.stderr)
        return 130


def _up(arguments: argparse.Namespace) -> int:
    provider = providers.to_start(arguments.provider)
    if arguments.real_node and provider != "local":
        raise ClusterError("--real-node needs --provider local")
    if arguments.real_node:
        cluster = local.start(arguments.folder, with_real_node=True, progress=_say)
    else:
        cluster = providers.start(arguments.folder, provider, progress=_say)
    cluster.disown()
    print(f"use it:  export KUBECONFIG={cluster.kubeconfig}")
    print(f"end it:  python3 -m tests.cluster down {cluster.folder}")
    return 0


def _build() -> int:
    if providers.choose(None) == "local":
        if not real_node.missing():
            local.build_node_programs(_say)
        local.build_programs(_say)
    return 0


def _say(line: str) -> None:
    print(line, flush=True)


def _list(folder: pathlib.Path) -> int:
    cluster = providers.attach(folder)
    if kind.is_here(folder):
        _list_deployments(cluster)
    ports = {} if kind.is_here(folder) else cluster.components.ports
    print(f"{'COMPONENT':<26}{'PID':<9}{'PORT':<7}STATE")
    for process in cluster.status():
        state = process.state if process.exit_code is None else f"{process.state}, exit code {process.exit_code}"
        print(f"{process.name:<26}{process.pid:<9}{ports.get(process.name, ''):<7}{state}")
    return 0


def _list_deployments(cluster: Cluster) -> None:
    """What kind's cluster has in the place of processes."""
    print(f"{'COMPONENT':<26}{'REPLICAS':<10}DEPLOYMENT")
    for name, (namespace, deployment) in kind.DEPLOYMENTS.items():
        status = cluster.get("Deployment", deployment, namespace).get("status", {})
        print(f"{name:<26}{status.get('availableReplicas', 0):<10}{namespace}/{deployment}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
