"""``ucch-run k8s``: the cluster file as a Volcano job, to be given to ``kubectl apply``."""

from __future__ import annotations

import json
import re
import textwrap
from collections.abc import Sequence

from ..machine.vendors import VENDORS
from . import cluster as cluster_file
from .cluster import Cluster, ClusterError
from .command import checked, program_of, renderer

LAUNCHER_IMAGE = "ucc-hetero:launcher"

_NAME = re.compile(r"[a-z]([a-z0-9-]{0,40}[a-z0-9])?")

#: The launcher's cluster file, whose hosts are the pods, and a job: all pods or none, done when the master is. The
#: folder of keys and the waiting process ``ucch-worker`` are those of the images in containers/.
_JOB = """\
---
apiVersion: v1
kind: ConfigMap
metadata: {{name: {name}-cluster, namespace: {namespace}}}
data:
  cluster.yaml: |
{file}
---
apiVersion: batch.volcano.sh/v1alpha1
kind: Job
metadata: {{name: {name}, namespace: {namespace}}}
spec:
  schedulerName: volcano
  queue: {queue}
  minAvailable: {pods}
  maxRetry: 1
  plugins:
    env: []
    svc: [--publish-not-ready-addresses=true]
    ssh: [--ssh-key-file-path=/home/ucch/.ssh]
  policies:
    - {{event: PodFailed, action: AbortJob}}
    - {{event: PodEvicted, action: AbortJob}}
  tasks:
    - name: master
      replicas: 1
      policies: [{{event: TaskCompleted, action: CompleteJob}}]
      template:
        spec:
          restartPolicy: Never
          containers:
            - name: launcher
              image: {image}
              command: {command}
              volumeMounts: [{{name: cluster, mountPath: /etc/ucch}}]
          volumes: [{{name: cluster, configMap: {{name: {name}-cluster}}}}]
"""

#: Pods that are alike: their vendor's image and devices, an sshd, and shared memory beyond the usual 64 MiB. Registered
#: memory is pinned, and neighbours' memory is read directly.
_WORKERS = """\
    - name: {name}
      replicas: {count}
      template:
        spec:
          restartPolicy: Never
          nodeSelector: {selector}
          containers:
            - name: ranks
              image: {image}
              command: [ucch-worker]
              ports: [{{name: ssh, containerPort: 2222}}]
              resources: {{limits: {limits}}}
              securityContext: {{capabilities: {{add: [IPC_LOCK, SYS_PTRACE]}}}}
              volumeMounts: [{{name: shm, mountPath: /dev/shm}}]
          volumes: [{{name: shm, emptyDir: {{medium: Memory}}}}]
"""


def _tasks(cluster: Cluster) -> dict[str, tuple[str, int, int]]:
    """Name -> vendor, slots and number of pods that are alike."""
    if not _NAME.fullmatch(cluster.name):
        raise ClusterError(f"name: {cluster.name!r} cannot be the name of pods: use small letters, digits and hyphens")
    kinds: dict[tuple[str, int], int] = {}
    for host in cluster.hosts:
        if host.vendor == "auto":
            raise ClusterError(
                f"hosts: give the vendor of {host.name}: Kubernetes has to know which devices a pod needs"
            )
        if not cluster.part(host.vendor).image:
            raise ClusterError(f"vendors.{host.vendor}.image: is missing, and pods are made of images")
        kinds[host.vendor, host.slots] = kinds.get((host.vendor, host.slots), 0) + 1
    found: dict[str, tuple[str, int, int]] = {}
    for (vendor, slots), count in kinds.items():
        number = 1 + sum(other == vendor for other, _, _ in found.values())
        found[vendor if number == 1 else f"{vendor}{number}"] = vendor, slots, count
    return found


def manifest(cluster: Cluster, program: Sequence[str], launcher_image: str = LAUNCHER_IMAGE) -> str:
    """The text of the manifest. Raises ``ClusterError`` for a file that does not say what Kubernetes has to know."""
    import yaml

    tasks, as_json = _tasks(cluster), json.dumps  # which is YAML as well
    # The names that Volcano's svc plugin gives pods.
    hosts = [
        {"name": f"{cluster.name}-{name}-{i}.{cluster.name}", "slots": slots, "vendor": vendor}
        for name, (vendor, slots, count) in tasks.items()
        for i in range(count)
    ]
    # The images have their interpreter in the same place, under this name.
    inner = {**cluster_file.as_document(cluster), "python": cluster.python or "python3", "hosts": hosts}
    command = ["ucch-run", "-c", "/etc/ucch/cluster.yaml", "--", *program]
    text = _JOB.format(
        name=cluster.name, namespace=as_json(cluster.namespace), queue=as_json(cluster.queue), pods=1 + len(hosts),
        image=as_json(launcher_image), command=as_json(command),
        file=textwrap.indent(yaml.safe_dump(inner, sort_keys=False).rstrip(), "    "),
    )  # fmt: skip
    for name, (vendor, slots, count) in tasks.items():
        part, resource = cluster.part(vendor), VENDORS[vendor].resource
        text += _WORKERS.format(
            name=name, count=count, image=as_json(part.image), selector=as_json(dict(part.node_selector)),
            limits=as_json({resource: slots} if resource else {}),
        )  # fmt: skip
    return text


def main(arguments: Sequence[str]) -> int:
    """The command line: prints the manifest."""
    parser = renderer("k8s", "Print a Kubernetes job for a cluster file; give it to kubectl apply -f -.")
    parser.add_argument("--launcher-image", default=LAUNCHER_IMAGE, metavar="IMAGE", help="default %(default)s")
    options = parser.parse_args(arguments)
    program = program_of(options.program)
    checked(program, "k8s -c cluster.yaml")
    print(manifest(cluster_file.load(options.cluster), program, options.launcher_image), end="")
    return 0
