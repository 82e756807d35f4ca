"""A real Kubernetes control plane with JobSet, Trainer, Kueue and kwok, for tests.

For a person: `python3 -m tests.cluster up DIR`, then `export KUBECONFIG=DIR/admin.kubeconfig`; `down DIR`; `list DIR`.

It runs in processes on this machine (local). `--provider kind` runs it in Docker, with the projects' releases, and
`$DISPATCH_TEST_KUBECONFIG` has the tests run on a cluster that is there: both do less, and what they cannot do raises
`Unsupported`, which skips the test.

`up DIR --real-node` (local, as root) adds a node with kubelet, containerd and runc, whose pods are processes.

For a test: the fixtures `cluster` (one per run, started when first asked for) and `namespace` (one per test, with a
ClusterQueue, a LocalQueue `lq` and an AdmissionCheck of its own). For a script: `with local.up(folder) as cluster:`.

    namespace = cluster.namespace(quota="4", check=True, cohort=…, flavors=…)    # namespaces.Queue lists the options
    namespace.create(obj); .get(kind, name); .find; .list(kind, labels=…); .patch; .delete     # plain dicts
    namespace.pods(job); namespace.workload(owner)
    namespace.wait_served(); namespace.activate()                                # with, and without, a running gate
    namespace.name, .cluster_queue, .queue ("lq"), .flavors, .check, .checks

    cluster.get|find|list|create|apply|update|patch|delete                       # any kind of api.KINDS, as the admin
    cluster.admin; cluster.kubeconfig                                            # an ApiClient; DIR/admin.kubeconfig
    cluster.token_kubeconfig(namespace, account); cluster.grant(namespace, account, rules, inside=…)
    cluster.kill|start|pause|resume(component)                                   # components.NAMES
    cluster.restart(component, flags=…, feature_gates=…, config=…)
    with cluster.reconfigured("kueue", feature_gates={"AdmissionGatedBy": False}): …
    cluster.audit(user, since=cluster.audit_mark())                              # {(verb, group, resource, subres.)}
    cluster.audit_events(user, since=…)                                          # one per request
    cluster.wait(lambda: …, "what is waited for", timeout=60)                    # the first true value

    cluster.pods.succeed|fail(pod, code)|oom|stick|unstick|log|read_log|condition|status
    cluster.nodes.create|lose|recover|delete|taint|untaint                       # "kwok-0" and "kwok-1" are there

    node = local.add_real_node(cluster)                                          # tests/node: fixture `real_node`
    node.lose|recover(); cluster.namespace(flavor_spec=real_node.FLAVOR)         # tests/node/site.py has more

    with cluster.controller("gate-a", guards_off=["old-pods"]) as gate:          # gate.Gate: .log .wait_log .kill …
        …

| where | what |
|---|---|
| `build` | makes the programs from their published Go modules, once, into a cache |
| `supervisor` | the parent of every process: nothing outlives it, and it does not outlive its owner |
| `components` | the flags, config files and readiness of each component |
| `manifests`, `stages` | the published custom resources and webhooks, and kwok's Stages, made to fit |
| `certificates`, `private_etc`, `read_only` | the cluster's own authority; another /etc for Kueue; no file to write |
| `real_node` | the node with a real kubelet: how its parts are configured, started and known to be ready |
| `machine`, `relay`, `images` | its namespaces; the one way out of them; its container images |
| `cgroups`, `kernel` | what would outlive its processes; system calls |
| `local` | the order of the start; `up`, `attach`, `down` |
| `providers` | which provider it is; `kind`, `existing`: the others; `remote`: what these two have in common |
| `folder` | what may be in a cluster's folder, and is removed from it |
| `cluster`, `namespaces`, `pods`, `nodes`, `audit`, `gate`, `unguarded` | what tests use |
| `api`, `waiting` | plain requests; waiting with a deadline |

Two variables put another Kueue in the place of the one that is built: `DISPATCH_TEST_KUEUE_BIN`, its program, and
`DISPATCH_TEST_KUEUE_SRC`, its source tree.
"""
