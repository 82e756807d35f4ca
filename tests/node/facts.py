"""What the API server says about a job and all that belongs to it, without what differs from run to run.

`tests/node/recorded/<name>.json` holds such facts, at the moments that a scenario names, as they were seen on the real
node: material for whoever has to tell causes apart. `DISPATCH_RECORD=1` writes them anew.
"""

from __future__ import annotations

import contextlib
import difflib
import json
import operator
import os
import pathlib
import re
import time
from collections.abc import Callable
from typing import Any

from tests.cluster.api import Object
from tests.cluster.components import Components
from tests.cluster.namespaces import Namespace
from tests.cluster.real_node import NAME
from tests.cluster.waiting import WaitTimeout, wait

FOLDER = pathlib.Path(__file__).parent / "recorded"
KINDS = ("TrainJob", "JobSet", "Job", "Pod", "Workload")
# Of the metadata and the spec, what tells an attempt's story.
METADATA = {"name", "deletionTimestamp", "deletionGracePeriodSeconds", "finalizers"}
SPEC = {
    *("suspend", "active", "nodeName", "restartPolicy", "activeDeadlineSeconds", "backoffLimit"),
    "podReplacementPolicy",
}
LABELS = {
    *(f"jobset.sigs.k8s.io/{name}" for name in ("jobset-name", "replicatedjob-name", "restart-attempt")),
    "batch.kubernetes.io/job-completion-index",
}
OURS = "dispatch.phpboyscout.uk/"
# Of the status: what is random, or nobody's evidence.
NOISE = {
    *("containerID", "imageID", "hostIP", "hostIPs", "podIP", "podIPs", "qosClass", "observedGeneration", "user"),
    *("resources", "allocatedResources", "volumeMounts", "uncountedTerminatedPods", "lastProbeTime", "image"),
    "accumulatedPastExecutionTimeSeconds",
}


def of(namespace: Namespace, job: str) -> Object:
    """The facts about a TrainJob of this name now; a list for each kind, empty when there is none.

    Workloads are left out under a Kueue of another version, which may give other reasons.
    """
    place = namespace.cluster.components
    other_kueue = isinstance(place, Components) and place.programs.given_kueue
    kinds = [kind for kind in KINDS if not (other_kueue and kind == "Workload")]
    found = {kind: [_trimmed(obj) for obj in namespace.list(kind) if job in obj["metadata"]["name"]] for kind in kinds}
    text = json.dumps(found)
    text = text.replace(job, "JOB").replace(job.split("-")[1], "ULID").replace(namespace.name, "NAMESPACE")
    for pattern, word in _RANDOM:
        text = pattern.sub(word, text)
    made: Object = json.loads(text)
    return made


def of_the_node(namespace: Namespace) -> Object:
    """The facts about the real node."""
    node = namespace.cluster.get("Node", NAME)
    ready = [c for c in node["status"]["conditions"] if c["type"] == "Ready"]
    text = json.dumps({"taints": node["spec"].get("taints", []), "conditions": ready})
    made: Object = json.loads(_RANDOM[0][0].sub("TIME", text))
    return made


def check(name: str, moment: str, look: Callable[[], Object], *, within: float = 30) -> None:
    """Waits until what `look` sees is what is recorded of a scenario's moment, and fails with the difference.

    With $DISPATCH_RECORD, records it instead, once it has been the same for a while.
    """
    file = FOLDER / f"{name}.json"
    recorded = json.loads(file.read_text()) if file.exists() else {}
    if os.environ.get("DISPATCH_RECORD"):
        recorded[moment] = _settled(look)
        FOLDER.mkdir(exist_ok=True)
        file.write_text(json.dumps(recorded, indent=1, sort_keys=True) + "\n")

    def both() -> tuple[Object, Object]:
        seen = look()
        return seen, {kind: recorded[moment][kind] for kind in seen}

    with contextlib.suppress(WaitTimeout):
        wait(lambda: operator.eq(*both()), f"{name} looks as recorded", within)
    seen, expected = (json.dumps(facts, indent=1, sort_keys=True).splitlines() for facts in both())
    difference = "\n".join(difflib.unified_diff(expected, seen, "recorded", "seen", lineterm=""))
    assert not difference, f"{name}, {moment}:\n{difference}"


def _settled(look: Callable[[], Object], seconds: float = 4) -> Object:
    seen, since = look(), time.monotonic()

    def unchanged() -> bool:
        nonlocal seen, since
        now = look()
        if now != seen:
            seen, since = now, time.monotonic()
        return time.monotonic() - since > seconds

    wait(unchanged, "nothing changes any more")
    return seen


_RANDOM = (
    (re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d+)?Z"), "TIME"),
    (re.compile(r"(JOB-node-0-\d)-[a-z0-9]{5}"), r"\1-RANDOM"),
    (re.compile(r"(trainjob-JOB)-[a-z0-9]{5}"), r"\1-RANDOM"),
    (re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}"), "UID"),
    (re.compile(r"[0-9a-f]{64}"), "ID"),
    (re.compile(r"dial tcp: lookup [^\"]*"), "dial tcp: NO NETWORK"),
)


def _trimmed(obj: Object) -> Object:
    metadata, labels = obj["metadata"], obj["metadata"].get("labels", {})
    kept = {key: value for key, value in metadata.items() if key in METADATA}
    kept["labels"] = {key: value for key, value in labels.items() if key in LABELS or key.startswith(OURS)}
    annotations = metadata.get("annotations", {})
    kept["annotations"] = {key: value for key, value in annotations.items() if key.startswith(OURS)}
    kept["annotations"].pop(f"{OURS}spec", None)
    spec = {key: value for key, value in obj.get("spec", {}).items() if key in SPEC}
    return {"metadata": kept, "spec": spec, "status": _quiet(obj.get("status", {}))}


def _quiet(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _quiet(inner) for key, inner in value.items() if key not in NOISE}
    if isinstance(value, list):
        items = [_quiet(item) for item in value]
        kinds = all(isinstance(item, dict) and "type" in item for item in items)
        return sorted(items, key=lambda item: str(item["type"])) if kinds else items
    return value
