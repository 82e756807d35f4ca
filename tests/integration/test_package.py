"""The packaged controller on a real control plane: nothing is missing in it, and it needs no place to write to."""

from __future__ import annotations

import json
import os
import pathlib
import sys
import urllib.parse
from typing import Any

import pytest
import yaml

from tests import jobs, packaged
from tests.cluster.cluster import Cluster
from tests.cluster.gate import PodFiles, account
from tests.cluster.namespaces import Namespace
from tests.integration.test_readmission import preempted_with_a_stuck_pod

READ_ONLY = [sys.executable, "-m", "tests.cluster.read_only"]


def token(kubeconfig: pathlib.Path) -> str:
    """The token in a kubeconfig."""
    [user] = yaml.safe_load(kubeconfig.read_text())["users"]
    found: str = user["user"]["token"]
    return found


def in_a_pod(cluster: Cluster) -> PodFiles:
    """The credentials of the gate's account as a pod has them."""
    server = urllib.parse.urlsplit(cluster.api.server)
    files = PodFiles(cluster, str(server.hostname), server.port or 443)
    files.set_token(token(account(cluster)))
    return files


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting everything read-only needs root")
@pytest.mark.parametrize("version", ["3.11", "3.12", "3.13"])
def test_in_a_pod_it_lets_a_job_back_in_when_its_old_pod_is_gone_and_writes_nowhere(
    cluster: Cluster, namespace: Namespace, zipapp: pathlib.Path, version: str
) -> None:
    python = packaged.interpreter(version)
    with cluster.controller(in_cluster=in_a_pod(cluster), zipapp=zipapp, python=python, wrapper=READ_ONLY):
        job, old = preempted_with_a_stuck_pod(namespace)
        jobs.wait_message(namespace, job, f"waiting for 1 pods of the earlier attempt: {old}")
        cluster.pods.unstick(namespace.get("Pod", old))
        jobs.running(namespace, job, count=2, epoch="1000002")


@pytest.mark.parametrize("version", ["3.11", "3.12", "3.13"])
def test_with_a_kubeconfig_it_runs_on_every_python_it_is_for(
    cluster: Cluster, namespace: Namespace, zipapp: pathlib.Path, version: str
) -> None:
    with cluster.controller(zipapp=zipapp, python=packaged.interpreter(version)):
        jobs.running(namespace, jobs.submit(namespace), epoch="1000001")


def logs_in(how: str, secret: str, tmp_path: pathlib.Path) -> dict[str, Any]:
    """A kubeconfig's user, in each way that the client loads code of its own for."""
    if how == "exec":
        kind = {"apiVersion": "client.authentication.k8s.io/v1", "kind": "ExecCredential"}
        credential = json.dumps({**kind, "status": {"token": secret}})
        plugin = tmp_path / "plugin"
        plugin.write_text(f"#!/bin/sh\necho '{credential}'\n")
        plugin.chmod(0o700)
        return {
            "exec": {
                "apiVersion": "client.authentication.k8s.io/v1",
                "command": str(plugin),
                "interactiveMode": "Never",
            }
        }
    if how == "oidc":  # not expired, so that no provider is asked
        return {"auth-provider": {"name": "oidc", "config": {"id-token": secret}}}
    file = tmp_path / "token"
    file.write_text(secret)
    return {"tokenFile": str(file)}


@pytest.mark.parametrize("how", ["exec", "oidc", "file"])
def test_a_kubeconfig_may_log_in_in_other_ways(
    cluster: Cluster, namespace: Namespace, zipapp: pathlib.Path, tmp_path: pathlib.Path, how: str
) -> None:
    config = yaml.safe_load(account(cluster).read_text())
    config["users"][0]["user"] = logs_in(how, token(account(cluster)), tmp_path)
    kubeconfig = tmp_path / "kubeconfig"
    kubeconfig.write_text(yaml.safe_dump(config))
    with cluster.controller(zipapp=zipapp, python=packaged.interpreter("3.13"), kubeconfig=kubeconfig):
        namespace.wait_served()
